"""All figures of a run, by the names that records have for them."""

from __future__ import annotations

import math
from typing import Dict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import of_right, run, split
from test_areas import CIFAR10, MACS

from narrowgauge_contract.errors import BadValueError
from narrowgauge_scores.answers import accuracies
from narrowgauge_scores.areas import RANGES, CostRange, area
from narrowgauge_scores.points import exit_costs
from narrowgauge_scores.scalars import (
    Scalar,
    area_of,
    area_values,
    median_latency,
    range_of,
    scalars_of,
)
from narrowgauge_scores.side_file import RunLogits


def _named(answers: RunLogits) -> Dict[str, Scalar]:
    found = scalars_of(answers)
    assert len({each.name for each in found}) == len(found)
    return {each.name: each for each in found}


def _printed(**changes: object) -> RunLogits:
    """10,000 images of which each exit gets as many right as IResNeXt's printed errors say."""
    right = np.arange(10_000)[np.newaxis] >= np.round(np.array(CIFAR10) * 10_000)[:, np.newaxis]
    macs = np.array([round(cost * 1e6) for cost in MACS])
    fields = {"test": of_right(right), "val": None, "cumulative_macs": macs, "direct_macs": macs}
    return run(**{**fields, **changes})


def test_the_reference_curve_comes_out_of_a_run_of_it() -> None:
    found = _named(_printed())

    assert round(found["area_own"].value, 4) == 0.9292
    assert found["exit0_accuracy"].value == pytest.approx(90.28)
    assert found["exit7_accuracy"].value == pytest.approx(94.34)
    # 25 % of ResNet-32 are 17.2 million: the first exit's. Two classes here, so chance is 50 %.
    assert found["accuracy_at_10"].value == 50.0
    assert found["accuracy_at_25"].value == pytest.approx(90.28)
    # 93.34 % is a point below the last exit: the third exit has 93.25, the fourth 93.60.
    assert found["macs_at_last_less_1"].value == 58.20e6
    assert found["monotonicity"].value == 1.0
    assert found["overthinking"].value == 0.0


def test_a_fixed_range_counts_what_is_not_there_as_chance() -> None:
    answers, within = _printed(), RANGES["cifar10"]
    by_hand = area(MACS, 1 - np.array(CIFAR10), within.low / 1e6, within.high / 1e6, chance=0.5)

    assert _named(answers)["area"].value == pytest.approx(by_hand)
    assert by_hand < 0.7


def test_heads_that_are_paid_on_the_way_cost_area() -> None:
    found = _named(run())

    assert found["area_interruptible"].value < found["area"].value
    assert found["exit1_macs"].value == 8e6
    assert found["exit1_cumulative_macs"].value == 9e6
    assert found["exit1_macs"].unit == "MAC"


def test_made_up_and_unknown_data_have_no_area_but_their_own() -> None:
    for answers in (run(synthetic=True), run(data="something")):
        found = _named(answers)
        assert range_of(answers) is None
        assert "area" not in found
        assert "hypervolume" not in found
        assert "area_own" in found
        assert "accuracy_at_100" in found


def test_a_base_is_the_plain_network_that_a_run_names_and_no_other() -> None:
    right = np.arange(100)[np.newaxis] >= np.array([[20], [10], [5]])
    test = of_right(right)
    based = _named(run(test=test, val=None, base_accuracy=90.9))
    assert based["macs_at_base_less_1"].value == 8e6
    assert based["macs_at_last_less_1"].value == 28e6

    alone = _named(run(test=test, val=None))
    assert "macs_at_base_less_1" not in alone
    assert alone["macs_at_last_less_1"].value == 28e6

    never = _named(run(base_accuracy=100.0, test=of_right(np.zeros((3, 4))), val=None))
    assert "macs_at_base_less_1" not in never


def test_the_base_less_exactly_a_point_counts() -> None:
    right = np.arange(100)[np.newaxis] >= np.array([[8], [7], [7]])
    found = _named(run(test=of_right(right), val=None, base_accuracy=93.0))

    assert found["macs_at_base_less_1"].value == 2e6
    assert found["macs_at_last_less_1"].value == 2e6


def test_a_shared_range_serves_where_the_data_set_has_none() -> None:
    shared = CostRange(1e6, 40e6, "of these runs")
    answers = run(synthetic=True)
    found = {each.name: each.value for each in scalars_of(answers, within=shared)}
    heights = accuracies(answers.test)

    # 25 % of 40 million are 10: the second exit's 8 million.
    assert found["accuracy_at_25"] == pytest.approx(100 * heights[1])
    assert found["area"] == pytest.approx(area_of(answers, shared))
    # Of the run's own 28 million they are 7: the first exit's.
    assert _named(answers)["accuracy_at_25"].value == pytest.approx(100 * heights[0])
    known = run()
    assert scalars_of(known, within=shared) == scalars_of(known)


def test_latencies_are_kept_whole_and_scored_by_their_medians() -> None:
    latency = np.array([[0.01, 0.01, 0.5], [0.02, 0.02, 0.02], [0.04, 0.04, 0.04]])
    found = _named(run(latency=latency))

    assert found["exit0_latency"].values == (0.01, 0.01, 0.5)
    assert found["exit0_latency"].unit == "s"
    assert 0.0 < found["area_latency"].value < 1.0
    assert median_latency(latency).tolist() == [0.01, 0.02, 0.04]
    assert median_latency(latency[::-1]).tolist() == [0.04, 0.04, 0.04]


def test_operating_points_are_lists_and_need_validation() -> None:
    found = _named(run())

    assert len(found["budgeted_accuracy"].values) == len(found["budgeted_macs"].values) > 3
    assert found["budgeted_macs"].index == "operating point"
    assert "budgeted_accuracy" not in _named(run(val=None))


def test_the_runs_own_policy() -> None:
    answers = run()
    taken = np.array([0] * 20 + [1] * 10 + [2] * 10)
    found = {each.name: each for each in scalars_of(answers, taken)}

    assert found["mean_macs"].value == pytest.approx(0.5 * 2e6 + 0.25 * 9e6 + 0.25 * 30e6)
    assert [found[f"exit{k}_share"].value for k in range(3)] == pytest.approx([50, 25, 25])
    right = answers.test.logits.argmax(-1)[taken, np.arange(40)] == answers.test.labels
    assert found["adaptive_accuracy"].value == pytest.approx(100 * right.mean())


@pytest.mark.parametrize(
    "taken", [np.full(40, 3), np.full(40, -1), np.zeros(39, int), np.zeros(40), np.zeros((40, 1))]
)
def test_exits_that_there_are_not_are_refused(taken: np.ndarray) -> None:
    with pytest.raises(BadValueError, match="no exits"):
        scalars_of(run(), taken)


def test_an_area_is_the_mean_of_what_each_image_gives() -> None:
    answers = run()
    within = RANGES["cifar10"]
    values = area_values(answers, exit_costs(answers), within)

    assert values.shape == (40,)
    assert values.mean() == pytest.approx(area_of(answers, within))


@settings(max_examples=40, deadline=None)
@given(
    images=st.integers(1, 12),
    exits=st.integers(1, 4),
    classes=st.integers(2, 5),
    seed=st.integers(0, 999),
    scale=st.sampled_from([0.0, 1e-3, 1.0, 1e4]),
    has_val=st.booleans(),
)
def test_any_answers_have_finite_figures_within_their_bounds(
    images: int, exits: int, classes: int, seed: int, scale: float, has_val: bool
) -> None:
    test = split(images, exits, classes, seed)
    test.logits[...] *= scale
    macs = np.cumsum(np.random.default_rng(seed).integers(1, 9_000_000, exits))
    val = split(3, exits, classes, seed + 1) if has_val else None
    answers = run(test=test, val=val, cumulative_macs=macs, direct_macs=macs)
    for each in scalars_of(answers):
        assert each.values
        most = {"%": 100.0, "1": 1.0, "MAC": math.inf}[each.unit]
        assert all(-1e-12 <= value <= most + 1e-9 for value in each.values), each
