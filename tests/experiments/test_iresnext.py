"""The experiment `iresnext`: both forms and both rules, on made-up images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.spec import load_toml
from narrowgauge_lab.anytime import operating, policies, thresholds
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

QUICK = (
    "data=synthetic", "blocks=1", "width=0.25", "epochs=1", "train_limit=64", "validation=40",
    "test_limit=40", "batch_size=32", "recalibration=32",
)  # fmt: skip
ROWS = Rows("iresnext", QUICK)


@pytest.fixture(autouse=True)
def _few_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def _values(row: Row, name: str) -> Any:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values


def test_the_published_form_by_all_exits(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "variant=shared", "objective=all", "epochs=2")

    assert row.validity.valid
    assert row.facts["synthetic"] is True
    assert row.facts["variant"] == "shared, all, 1 blocks, twin of width 0.25"
    assert "recalibration_images" not in row.facts
    for exit in range(8):
        assert len(_values(row, f"exit{exit}_train_loss")) == 2
        (accuracy,) = _values(row, f"exit{exit}_accuracy")
        assert accuracy == pytest.approx(_values(row, f"exit{exit}_test_accuracy")[-1])
    macs = [_values(row, f"exit{exit}_macs")[0] for exit in range(8)]
    assert _values(row, "exit7_cumulative_macs")[0] == sum(macs)
    claims = load_claims(EXPERIMENTS / "iresnext" / "claims.toml", ROWS.spec())
    asked = {selection.metric for claim in claims for selection in claim.selections}
    assert asked <= {metric.name for metric in row.metrics}
    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    assert run.test.logits.shape == (8, 40, 10)
    assert (run.family, run.exit_names[0]) == ("iresnext", "1 of 8 branches")


def test_the_incremental_form_by_the_sandwich_rule(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "variant=incremental", "objective=sandwich", "save_weights=true")

    assert row.validity.valid
    assert row.facts["recalibration_images"] == 32
    assert np.isfinite(_values(row, "random_exits_train_loss")).all()
    assert np.isnan(_values(row, "exit3_train_loss")).all()  # which one was drawn is not told
    last, everything = _values(row, "exit7_macs")[0], _values(row, "exit7_cumulative_macs")[0]
    assert last < everything < 1.01 * last
    assert 0 < _values(row, "mean_macs")[0] <= everything

    weights = tmp_path / "row-0" / "weights.pt"
    (held,) = _values(row, "weights_bytes")
    assert held < weights.stat().st_size < 2.5 * held  # names and zip entries beside the tensors
    words = ("variant=incremental", "objective=sandwich", f"weights={weights}")
    again = ROWS.run(tmp_path / "again", *words)

    assert again.metric("train_loss") is None
    for exit in range(8):  # with the statistics that were taken anew
        assert _values(again, f"exit{exit}_accuracy") == _values(row, f"exit{exit}_accuracy")

    with pytest.raises(DataCorruptError, match="weights of this SharedIResNeXt"):
        ROWS.run(tmp_path / "other", "variant=shared", f"weights={weights}")


@pytest.mark.parametrize("variant", ["shared", "incremental"])
def test_thresholds_are_fitted_on_the_validation_split_by_default(
    tmp_path: Path, variant: str
) -> None:
    row = ROWS.run(tmp_path, f"variant={variant}", "lose=100")

    run = read_logits(tmp_path / "row-0" / LOGITS_FILE)
    policy = row.facts["policy_ran"]
    assert policy == row.facts["fitted_policy"] in row.facts["front_policies"]
    assert "paper_policy" not in row.facts
    test, costs = operating.of_test_split(run)
    kept = thresholds.fit(thresholds.validation_of(run), costs, "max-probability", "knapsack")
    assert policy == thresholds.choose(kept, 100.0).policy
    point = thresholds.score(policies.parse(policy, 8), test, costs)
    assert _values(row, "adaptive_accuracy") == (pytest.approx(point.accuracy),)
    assert _values(row, "mean_macs") == (pytest.approx(point.macs),)
    # All may be lost, and so most leave at once.
    assert _values(row, "exit0_share")[0] > 50


def test_another_policy_leaves_the_fitted_one_beside_it(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "policy=max-probability:inf")

    assert row.facts["policy_ran"] == "max-probability:inf"
    assert _values(row, "mean_macs") == _values(row, "exit7_cumulative_macs")
    assert _values(row, "fitted_macs") <= _values(row, "mean_macs")


def test_training_that_diverges_stops_and_is_said(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "variant=incremental", "lr=100", "epochs=3", "weight_decay=1")

    assert not row.validity.valid
    assert "diverged" in row.validity.reasons[0]
    assert not (tmp_path / "row-0" / LOGITS_FILE).exists()


def test_cifar100_that_is_missing_is_named_and_how_to_place_it(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match="'cifar100' is not here") as missing:
        ROWS.run(tmp_path / "out", "data=cifar100", data=tmp_path)

    assert "cifar-100-binary.tar.gz" in missing.value.next_step
    assert "data fetch cifar100" in missing.value.next_step


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("width=0.3",), "width 0.3"),
        (("policy=guess",), "does not take 'guess'"),
        (("policy=paper",), "does not take 'paper'"),  # there is none of the paper's
        (("policy=entropy:nan",), "nan"),
        (("policy=max-probability:0.9,0.8",), "threshold"),
        (("validation=700",), "700 images for validation"),
        (("blocks=0",), "blocks"),
        (("variant=nested",), "variant"),
    ],
    ids=lambda given: " ".join(given) if isinstance(given, tuple) else "",
)
def test_what_cannot_be_is_said_before_anything_is_trained(
    tmp_path: Path, words: Any, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, *words)


class TestDeclarations:
    def test_the_paper_profile_is_the_published_configuration(self) -> None:
        (row, *others) = ROWS.job(profile="paper").rows
        published = {
            "variant": "shared", "objective": "all", "blocks": 7, "width": 1.0, "epochs": 300,
            "batch_size": 64, "lr": 0.1, "momentum": 0.9, "weight_decay": 1e-4, "validation": 5000,
            "train_limit": 0, "test_limit": 0, "data": "cifar10",
        }  # fmt: skip

        assert len(others) == 2
        assert {name: row.parameters[name] for name in published} == published

    def test_the_short_profile_is_a_twin_of_both_forms_on_a_thousand_images(self) -> None:
        rows = ROWS.job(profile="short").rows

        assert [row.parameters["variant"] for row in rows] == ["shared", "incremental"]
        for row in rows:
            named = {name: row.parameters[name] for name in ("width", "test_limit", "data")}
            assert named == {"width": 0.25, "test_limit": 1000, "data": "cifar10"}

    @pytest.mark.parametrize("data", ["cifar10", "cifar100"])
    def test_claimed_areas_follow_from_the_claimed_exits(self, data: str) -> None:
        document = load_toml(EXPERIMENTS / "iresnext" / "claims.toml")
        figures = {each["id"]: each["expected"]["any"].get("figure") for each in document["claim"]}
        macs = [15.88, 29.99, 44.09, 58.20, 72.31, 86.41, 100.52, 114.63]
        right = np.array([figures[f"{data}-exit{exit}"] for exit in range(8)]) / 100

        widths = np.diff(np.log(macs)) / np.log(macs[-1] / macs[0])
        assert (widths * (right[1:] + right[:-1]) / 2).sum() == pytest.approx(
            figures[f"{data}-area"], abs=5e-5
        )

    def test_claims_allow_seven_tenths_of_a_point(self) -> None:
        document = load_toml(EXPERIMENTS / "iresnext" / "claims.toml")
        exits = [each for each in document["claim"] if "-exit" in each["id"]]

        assert len(exits) == 18
        for each in exits:
            expected = each["expected"]["any"]
            assert expected["figure"] * expected["tolerance"] == pytest.approx(0.7, abs=1e-3)
