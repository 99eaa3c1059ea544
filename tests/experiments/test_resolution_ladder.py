"""The experiment `resolution-ladder`, on made-up images."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pytest
from one_row import EXPERIMENTS, Rows

from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.outcome import Row
from narrowgauge_scores.side_file import read_logits

QUICK = (
    "data=synthetic", "sizes=16,20,32", "width=0.0625", "epochs=1", "validation=20",
    "train_limit=32", "test_limit=20", "batch_size=16", "recalibration=32",
)  # fmt: skip
ROWS = Rows("resolution-ladder", QUICK)
CLAIMS = load_claims(EXPERIMENTS / "resolution-ladder" / "claims.toml", ROWS.spec())


def _value(row: Row, name: str) -> float:
    metric = row.metric(name)
    assert metric is not None, f"no metric {name}"
    return metric.values[-1]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Tuple[Row, Row, Path]:
    """The sizes; then, with the weights that a row of the same run finds, the glance."""
    first, out = (tmp_path_factory.mktemp(name) for name in ("sizes", "glance"))
    sizes = ROWS.run(first, "answers=sizes")
    shutil.copy(first / "weights-random-0.pt", out)
    return sizes, ROWS.run(out, "answers=glance"), out


def test_statistics_taken_anew_change_the_answers(
    both: Tuple[Row, Row, Path], tmp_path: Path
) -> None:
    shutil.copy(both[2] / "weights-random-0.pt", tmp_path)

    row = ROWS.run(tmp_path, "answers=glance", "statistics=kept")

    kept, anew = (read_logits(out / "row-0" / "logits.npz") for out in (tmp_path, both[2]))
    assert row.facts["variant"].count("statistics kept") == 1
    for exit in (0, 1):
        assert np.abs(kept.test.logits[exit] - anew.test.logits[exit]).max() > 1e-3


def _asked(answers: str) -> Any:
    found = [each for claim in CLAIMS for each in claim.selections]
    return {each.metric for each in found if each.where["answers"] == answers}


def test_sizes_are_answers_of_one_network(both: Tuple[Row, Row, Path]) -> None:
    row, _, _ = both

    assert row.validity.valid, row.validity.reasons
    assert row.facts["weights_from"] == "trained in this row"
    assert row.facts["exact_graphs_ran"] == "off"
    assert row.facts["recalibration_images"] == 32
    assert "trained at random sizes" in row.facts["variant"]
    cost = [_value(row, f"size{size}_macs") for size in (16, 20, 32)]
    assert cost == [_value(row, f"exit{k}_macs") for k in (0, 1, 2)]
    assert cost[2] / cost[0] == pytest.approx(4, abs=0.01)
    assert _value(row, "size16_over_area") == pytest.approx(1, abs=1e-3)
    assert _value(row, "size32_accuracy") == _value(row, "exit2_accuracy")
    assert _value(row, "exit2_cumulative_macs") == sum(cost)
    recorded = {metric.name for metric in row.metrics}
    assert {each for each in _asked("sizes") if not each.startswith("area")} <= recorded


def test_a_glance_starts_from_the_weights_of_the_sizes(both: Tuple[Row, Row, Path]) -> None:
    sizes, row, out = both

    assert row.validity.valid, row.validity.reasons
    assert row.facts["weights_from"] == "an earlier row of this run"
    assert row.facts["weights_sha256"] == sizes.facts["weights_sha256"]
    assert row.facts["sizes_accuracy"]["16 pixels"] == _value(sizes, "size16_accuracy")
    assert row.facts["policy_ran"].startswith("entropy:")
    # The map is of the same glance, and costs next to nothing.
    assert _value(row, "exit0_accuracy") == _value(sizes, "size16_accuracy")
    assert _value(row, "exit0_macs") == pytest.approx(_value(sizes, "size16_macs"), rel=1e-3)
    first, second = (_value(row, f"exit{k}_cumulative_macs") for k in (0, 1))
    assert first <= _value(row, "mean_macs") <= second
    run = read_logits(out / "row-0" / "logits.npz")
    assert (run.family, run.exits) == ("glance", 2)
    assert {each for each in _asked("glance") if not each.startswith("area")} <= {
        metric.name for metric in row.metrics
    }


def test_the_gain_is_over_the_best_size_that_costs_no_more(both: Tuple[Row, Row, Path]) -> None:
    sizes, row, _ = both
    affordable = [
        _value(sizes, f"size{size}_accuracy")
        for size in (16, 20, 32)
        if _value(sizes, f"size{size}_macs") <= _value(row, "mean_macs")
    ]

    gain = _value(row, "adaptive_accuracy") - max(affordable)
    assert _value(row, "gain_over_sizes") == pytest.approx(gain)


def test_a_glance_that_never_looks_twice_gains_nothing(both: Any, tmp_path: Path) -> None:
    """It is the plain size of its own pixels, and no claim may take that for a gain."""
    shutil.copy(both[2] / "weights-random-0.pt", tmp_path)

    row = ROWS.run(tmp_path, "answers=glance", "policy=entropy:10")

    assert _value(row, "exit0_share") == 100
    assert _value(row, "gain_over_sizes") == 0
    (claim,) = (each for each in CLAIMS if each.id == "glance-beats-sizes")
    least = claim.expected["any"].minimum
    assert least is not None
    assert least > 0


def test_the_threshold_never_sees_the_test_split(both: Tuple[Row, Row, Path]) -> None:
    _, row, out = both
    run = read_logits(out / "row-0" / "logits.npz")
    assert run.val is not None
    logs = run.val.logits[0] - np.logaddexp.reduce(run.val.logits[0], axis=1, keepdims=True)
    entropies = -(np.exp(logs) * logs).sum(1)
    limit = float(row.facts["policy_ran"].partition(":")[2])

    near = np.abs(entropies - limit).min()
    assert near < 1e-5 or limit == 0 or np.isinf(limit)


@pytest.mark.parametrize(
    "words",
    [
        ("answers=sizes", "trained=fixed", "place=whole"),
        ("answers=glance", "place=centre", "combined=mean", "policy=entropy:1.0"),
    ],
)
def test_other_rows_run(tmp_path: Path, words: Any) -> None:
    row = ROWS.run(tmp_path, *words)

    assert row.validity.valid, row.validity.reasons
    if "answers=glance" in words:
        assert row.facts["policy_ran"] == "entropy:1.0"
        assert row.facts["variant"].endswith("by centre, mean of both")


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sizes=16,6", "a size of 6 pixels"), ("sizes=large", "does not take"),
        ("sizes=16,16", "name one twice"), ("glance=4", "a glance of 4 pixels"),
        ("look=500", "a look of 500 pixels"), ("crop=33", "a window of 33 pixels"),
        ("crop=4", "a window of 4 pixels"), ("look=16", "a look at 16 pixels after a glance"),
        ("policy=guess", "does not take"), ("policy=paper", "does not take"),
        ("width=0", "width"),
    ],
)  # fmt: skip
def test_what_cannot_be_asked_is_refused_before_training(
    tmp_path: Path, word: str, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        ROWS.run(tmp_path, word)

    assert not list(tmp_path.glob("weights-*"))


def test_training_that_diverges_is_said(tmp_path: Path) -> None:
    row = ROWS.run(tmp_path, "lr=100", "epochs=4", "weight_decay=1", "trained=fixed")

    assert not row.validity.valid
    assert not (tmp_path / "row-0" / "logits.npz").exists()
    assert not list(tmp_path.glob("weights-*"))  # that another row would take


def test_profiles_are_what_the_readme_says() -> None:
    paper = ROWS.job(profile="paper").rows
    short = ROWS.job(profile="short").rows

    assert len(paper) == 3 * 8
    assert {row.parameters["sizes"] for row in (*paper, *short)} == {"16,20,24,28,32,40"}
    assert {row.parameters["width"] for row in paper} == {0.25}
    assert {(row.parameters["width"], row.parameters["test_limit"]) for row in short} == {
        (0.0625, 1000)
    }
