"""The experiment `feature-pyramid`: both kinds of heads on made-up images, at the same cost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "blocks=1", "exits_per_scale=1", "width=0.25", "channels=4", "epochs=1",
    "train_limit=64", "validation=30", "test_limit=40", "batch_size=32",
)  # fmt: skip
ROWS = Rows("feature-pyramid", QUICK)


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def test_both_kinds_of_heads_are_scored_at_equal_cost(tmp_path: Path) -> None:
    rows = {
        heads: ROWS.run(tmp_path / heads, f"heads={heads}", "save_weights=true")
        for heads in ("pyramid", "plain")
    }

    for k in range(3):
        for cost in (f"exit{k}_macs", f"exit{k}_cumulative_macs"):
            one, other = (_values(row, cost)[0] for row in rows.values())
            assert other == pytest.approx(one, rel=0.01)
    for heads, row in rows.items():
        assert row.validity.valid
        assert row.facts["macs_apart"] <= 0.01
        assert row.facts["macs_apart"] < row.facts["heads_apart"] < 0.05
        assert len(row.facts["plain_channels"]) == 3
        run = read_logits(tmp_path / heads / "row-0" / LOGITS_FILE)
        assert (run.family, run.exits) == ("feature-pyramid", 3)
        assert run.variant.startswith("plain heads" if heads == "plain" else "pyramid of 4")
        assert run.variant.endswith("twin of width 0.25")
        assert row.facts["policy_ran"] == row.facts["fitted_policy"] in row.facts["front_policies"]
        assert row.facts["policy_ran"].startswith("max-probability:")
        shares = [_values(row, f"exit{k}_share")[0] for k in range(3)]
        assert sum(shares) == pytest.approx(100.0)
        assert _values(row, "macs_gain")[0] == pytest.approx(
            _values(row, "exit2_macs")[0] / _values(row, "mean_macs")[0]
        )

    weights = tmp_path / "plain" / "row-0" / "weights.pt"
    again = ROWS.run(tmp_path / "again", "heads=plain", f"weights={weights}")
    assert again.metric("train_loss") is None
    assert _values(again, "adaptive_accuracy") == _values(rows["plain"], "adaptive_accuracy")
    assert _values(again, "exit2_accuracy") == _values(rows["plain"], "exit2_accuracy")


def test_heads_that_do_not_cost_the_same_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With less allowed than the one percent that whole channels keep to."""
    monkeypatch.setattr(ROWS.module("run"), "_EQUAL", 1e-6)
    with pytest.raises(UsageError, match=r"come within 0\.\d\d % of the pyramid's cost"):
        ROWS.run(tmp_path, "heads=plain")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("exits_per_scale=2",), "2 exits a scale of 1 blocks"),
        (("policy=guess",), "does not take 'guess'"),
        (("validation=600",), "600 images for validation"),
        (("form=later",), "form"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, words: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)


class TestDeclarations:
    def test_the_paper_profile_is_resnet_32_with_both_heads_of_both_forms(self) -> None:
        rows = ROWS.job(profile="paper").rows
        seen = {(row.parameters["form"], row.parameters["heads"]) for row in rows}

        assert len(rows) == 12
        assert len(seen) == 4
        for row in rows:
            named = {name: row.parameters[name] for name in ("blocks", "width", "test_limit")}
            assert named == {"blocks": 5, "width": 1.0, "test_limit": 0}

    def test_claims_ask_which_heads_are_better_at_equal_cost(self) -> None:
        claims = load_claims(EXPERIMENTS / "feature-pyramid" / "claims.toml", ROWS.spec())
        asked = {claim.id: [selection.metric for selection in claim.selections] for claim in claims}

        assert asked == {
            "equal-cost-own": ["exit5_cumulative_macs"] * 2,
            "pyramid-over-plain-own": ["area"] * 2,
            "equal-cost-trunk": ["exit5_cumulative_macs"] * 2,
            "pyramid-over-plain-trunk": ["area"] * 2,
        }
