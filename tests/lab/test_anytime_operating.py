"""Where a network is operated: fitted on validation, scored on test, and recorded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Dict, Tuple

import numpy as np
import pytest
import torch

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_contract.events import EVENTS_FILE, EventKind, EventLog, read_events
from narrowgauge_contract.job import RowPlan
from narrowgauge_contract.outcome import Fold, Row
from narrowgauge_lab.anytime.loss_weights import parse_loss_weights
from narrowgauge_lab.anytime.operating import (
    FITTED,
    PAPER,
    Operation,
    of_test_split,
    operate,
    require_policy,
)
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.side_file import RunLogits, Split


def _split(count: int, sure: int) -> Split:
    """The first exit is sure and right of the first `sure` images, and knows nothing of the rest;
    the second is right of all."""
    labels = np.arange(count) % 3
    right = np.eye(3, dtype=np.float32)[labels]
    first = np.where(np.arange(count)[:, None] < sure, 9.0 * right, -0.1 * right)
    return Split(
        np.stack([first, 9.0 * right]).astype(np.float32),
        labels.astype(np.int64),
        np.arange(count, dtype=np.int64),
    )


def _run(validation: int = 60, test: int = 20) -> RunLogits:
    return RunLogits(
        family="toy",
        variant="toy",
        data="synthetic",
        seed=0,
        test=_split(100, test),
        cumulative_macs=np.array([10, 110], dtype=np.int64),
        direct_macs=np.array([10, 100], dtype=np.int64),
        val=_split(100, validation),
    )


def _operate(
    out: Path, run: RunLogits, asked: str, lose: float = 0.0
) -> Tuple[Operation, Row, Dict[str, float]]:
    plan = RowPlan(index=0, repeat=0, seed=0, parameters={})
    with EventLog(out / EVENTS_FILE) as log:
        ctx = RowContext(plan, log, out, device=torch.device("cpu"), profile="short")
        log.emit(EventKind.ROW_START, 0, repeat=0, seed=0, parameters={})
        found = operate(ctx, run, asked=asked, paper="entropy:0", kind="entropy", lose=lose)
    (row,) = Fold().add_all(read_events(out / EVENTS_FILE)).rows()
    return found, row, {each.name: each.values[-1] for each in row.metrics}


def test_fitted_thresholds_are_of_the_validation_split_and_scored_on_test(tmp_path: Path) -> None:
    found, row, metrics = _operate(tmp_path, _run(), FITTED)

    assert found.policy == row.facts["fitted_policy"] == row.facts["policy_ran"]
    # 20 of the test images leave early, not the 60 of the validation's, and all are right.
    assert metrics["adaptive_accuracy"] == 100.0
    assert metrics["exit0_share"] == pytest.approx(20.0)
    assert metrics["mean_macs"] == pytest.approx(0.2 * 10 + 0.8 * 110)
    assert metrics["macs_gain"] == pytest.approx(100 / 90)
    assert found.point.split == "test"
    assert metrics["fitted_exit1_share"] == pytest.approx(80.0)
    assert metrics["paper_macs"] == 110.0
    assert len(found.front) == len(row.facts["front_policies"])


def test_what_may_be_lost_buys_cheaper_thresholds(tmp_path: Path) -> None:
    _, _, metrics = _operate(tmp_path, _run(), FITTED, lose=50.0)

    assert metrics["mean_macs"] == metrics["fitted_macs"] == 10.0
    assert metrics["adaptive_accuracy"] == pytest.approx(20.0)
    # What loses nothing on the validation split is there too.
    assert metrics["best_accuracy"] == 100.0
    assert metrics["best_macs"] == pytest.approx(0.2 * 10 + 0.8 * 110)


@pytest.mark.parametrize(
    ("asked", "macs"), [(PAPER, 110.0), ("entropy:10", 10.0), ("max-probability:0.9", 90.0)]
)
def test_the_row_may_have_the_papers_or_its_own(asked: str, macs: float, tmp_path: Path) -> None:
    found, row, metrics = _operate(tmp_path, _run(), asked)

    assert metrics["mean_macs"] == pytest.approx(macs)
    assert row.facts["policy_ran"] == found.policy == (asked if asked != PAPER else "entropy:0")
    assert metrics["fitted_macs"] == pytest.approx(90.0), "recorded beside it"


@pytest.mark.parametrize(
    ("plain", "told"), [(90, 1), (100, 0), (101, 0)], ids=["better", "alike", "unknown"]
)
def test_the_difference_to_the_plain_network_has_a_paired_interval(
    tmp_path: Path, plain: int, told: int
) -> None:
    """By its policy the network is right of all 100 images, the plain one of the first so many."""
    run = _run()
    if plain <= 100:
        right = (np.arange(100) < plain).astype(np.uint8)
        run = dataclasses.replace(run, test=dataclasses.replace(run.test, base_correct=right))
    _, _, metrics = _operate(tmp_path, run, FITTED)

    names = [f"adaptive_minus_base{end}" for end in ("", "_low", "_high")]
    if plain > 100:
        assert not set(names) & set(metrics)
        return
    value, low, high = (metrics[name] for name in names)
    assert value == pytest.approx(100.0 - plain)
    if not told:
        assert value == low == high == 0.0, "the very same answers: no draw tells them apart"
        return
    # A binomial of 100 with 0.1: 5 to 16 in 95 % of the draws.
    assert 3.0 <= low <= 6.0
    assert 14.0 <= high <= 18.0


def test_a_loss_is_told_too_by_whichever_policy_ran(tmp_path: Path) -> None:
    run = _run(test=20)
    right = np.ones(100, np.uint8)
    run = dataclasses.replace(run, test=dataclasses.replace(run.test, base_correct=right))
    _, _, metrics = _operate(tmp_path, run, "entropy:10")

    # Everybody leaves at the first exit, which is right of every third beside the first 20.
    lost = metrics["adaptive_accuracy"] - 100.0
    assert metrics["adaptive_minus_base"] == pytest.approx(lost)
    assert metrics["adaptive_minus_base_low"] < lost < metrics["adaptive_minus_base_high"] < 0


def test_without_a_validation_split_nothing_is_fitted(tmp_path: Path) -> None:
    with pytest.raises(BadValueError, match="validation"):
        _operate(tmp_path, dataclasses.replace(_run(), val=None), FITTED)


def test_the_test_split_is_what_the_run_says_of_it() -> None:
    run = _run(test=20)
    macs = np.tile(np.array([[5.0], [50.0]]), (1, 100))
    counted = dataclasses.replace(run, test=dataclasses.replace(run.test, macs=macs))

    said, costs = of_test_split(counted)

    assert said.split == "test"
    assert np.array_equal(said.logits.numpy(), run.test.logits)
    assert np.array_equal(said.labels.numpy(), run.test.labels)
    assert np.array_equal(said.cumulative(costs).numpy(), macs)
    assert (costs.cumulative, costs.direct) == ((10, 110), (10, 100))
    assert of_test_split(run)[0].macs is None


def test_a_policy_is_refused_early() -> None:
    for good in (FITTED, PAPER, "entropy:0.5", "patience:1"):
        require_policy(good, 2)
    with pytest.raises(UnknownNameError, match="fittd"):
        require_policy("fittd", 2)
    with pytest.raises(BadValueError, match="thresholds"):
        require_policy("entropy:0.5,0.1", 2)


@pytest.mark.parametrize("text", ["", "a", "1,,2", "nan", "-1", "0", "1,2", "inf,1,1"])
def test_loss_weights_that_there_are_not(text: str) -> None:
    with pytest.raises(BadValueError, match="weights"):
        parse_loss_weights(text, 3)
