"""Areas: the printed curves' figures, a slow integral, and what holds of any curve."""

from __future__ import annotations

import math
from typing import List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import BadValueError
from narrowgauge_scores.areas import (
    RANGES,
    accuracy_at,
    area,
    area_weights,
    cost_reaching,
    own_range,
)

#: IResNeXt with 7 blocks a stage: MACs of its exits in millions, and the test errors of exits 0 to
#: 7 that were printed at the end of its trainings.
MACS = (15.88, 29.99, 44.09, 58.20, 72.31, 86.41, 100.52, 114.63)
CIFAR10 = (0.0972, 0.0732, 0.0675, 0.0640, 0.0600, 0.0591, 0.0580, 0.0566)
CIFAR100 = (0.3317, 0.3033, 0.2879, 0.2764, 0.2631, 0.2592, 0.2551, 0.2561)


@pytest.mark.parametrize(
    ("errors", "chance", "straight", "stepped"),
    [(CIFAR10, 0.1, 0.9292, 0.9242), (CIFAR100, 0.01, 0.7108, 0.7029)],
)
def test_the_reference_areas_follow_from_the_printed_errors(
    errors: Tuple[float, ...], chance: float, straight: float, stepped: float
) -> None:
    """The published figures are of straight lines between the points; steps give less."""
    heights, own = 1 - np.array(errors), own_range(MACS)
    by_lines = area(MACS, heights, own.low, own.high, chance=chance, linear=True)
    by_steps = area(MACS, heights, own.low, own.high, chance=chance)

    assert round(by_lines, 4) == straight
    assert round(by_steps, 4) == stepped


def test_an_area_by_hand() -> None:
    """From 1 to e²: chance until e, then half."""
    found = area([math.e], [0.5], 1.0, math.e**2, chance=0.1)

    assert found == pytest.approx(0.3)


_CURVES = st.lists(
    st.tuples(st.floats(0.01, 100.0), st.floats(0.0, 1.0)), min_size=1, max_size=6
).map(lambda points: sorted(points, key=lambda point: point[0]))
_RANGES = st.tuples(st.floats(0.02, 5.0), st.floats(1.1, 30.0)).map(
    lambda pair: (pair[0], pair[0] * pair[1])
)


def _slow(points: List[Tuple[float, float]], low: float, high: float, linear: bool) -> float:
    """The middle of many thin slices, each looked up."""
    logs = np.linspace(math.log(low), math.log(high), 20_001)
    middles = np.exp((logs[1:] + logs[:-1]) / 2)
    total = 0.0
    costs, heights = [p[0] for p in points], [p[1] for p in points]
    if linear:
        found = np.interp(np.log(middles), np.log(costs), heights, left=0.1)
        return float(found.mean())
    for cost, height in zip(costs, heights):
        total = np.where(middles >= cost, height, 0.1 if isinstance(total, float) else total)
    return float(np.mean(total))


@settings(max_examples=60, deadline=None)
@given(_CURVES, _RANGES)
def test_steps_are_what_a_slow_integral_gives(
    points: List[Tuple[float, float]], span: Tuple[float, float]
) -> None:
    costs, heights = [p[0] for p in points], [p[1] for p in points]

    found = area(costs, heights, *span, chance=0.1)
    assert found == pytest.approx(_slow(points, *span, linear=False), abs=1e-3)


@settings(max_examples=40, deadline=None)
@given(_CURVES, _RANGES)
def test_straight_lines_are_what_a_slow_integral_gives(
    points: List[Tuple[float, float]], span: Tuple[float, float]
) -> None:
    # Of points of one cost a line has no slope; keep those that differ.
    kept = [p for i, p in enumerate(points) if i == 0 or p[0] > points[i - 1][0] * 1.001]
    costs, heights = [p[0] for p in kept], [p[1] for p in kept]

    found = area(costs, heights, *span, chance=0.1, linear=True)
    assert found == pytest.approx(_slow(kept, *span, linear=True), abs=2e-3)


@settings(max_examples=60, deadline=None)
@given(_CURVES, _RANGES)
def test_weights_are_a_share_of_the_range_each(
    points: List[Tuple[float, float]], span: Tuple[float, float]
) -> None:
    weights = area_weights([p[0] for p in points], *span)

    assert weights.min() >= -1e-12
    assert weights.sum() == pytest.approx(1.0)
    assert len(weights) == len(points) + 1


def test_what_lies_outside_the_range_counts_at_its_edges_only() -> None:
    assert area([1.0, 200.0], [0.4, 0.9], 2.0, 100.0, chance=0.1) == pytest.approx(0.4)
    assert area([200.0], [0.9], 2.0, 100.0, chance=0.1) == pytest.approx(0.1)


def test_of_points_of_one_cost_the_last_counts() -> None:
    assert area([1.0, 1.0], [0.9, 0.4], 1.0, 10.0, chance=0.1) == pytest.approx(0.4)


@pytest.mark.parametrize(
    "costs", [[], [0.0], [-1.0], [2.0, 1.0], [math.nan], [math.inf], [[1.0, 2.0]]]
)
def test_costs_that_make_no_curve_are_refused(costs: List[float]) -> None:
    with pytest.raises(BadValueError, match="no curve"):
        area(costs, [0.5] * len(costs), 1.0, 2.0, chance=0.1)


@pytest.mark.parametrize("span", [(0.0, 1.0), (2.0, 1.0), (1.0, 1.0), (1.0, math.inf)])
def test_a_range_that_is_none_is_refused(span: Tuple[float, float]) -> None:
    with pytest.raises(BadValueError, match="no area"):
        area([1.0], [0.5], *span, chance=0.1)


def test_accuracies_and_costs_must_be_as_many() -> None:
    with pytest.raises(BadValueError, match="2 accuracies for 1 costs"):
        area([1.0], [0.5, 0.6], 1.0, 2.0, chance=0.1)


def test_accuracy_at_a_budget_is_the_last_answer_until_then() -> None:
    found = [
        accuracy_at([1.0, 3.0], [0.5, 0.8], budget, chance=0.1) for budget in (0.5, 1, 2.9, 3, 9)
    ]

    assert found == [0.1, 0.5, 0.5, 0.8, 0.8]


def test_the_least_cost_that_is_accurate_enough() -> None:
    costs, heights = [1.0, 2.0, 3.0], [0.5, 0.8, 0.7]

    assert cost_reaching(costs, heights, 0.7) == 2.0
    assert cost_reaching(costs, heights, 0.5) == 1.0
    assert cost_reaching(costs, heights, 0.81) is None


def test_ranges_are_of_the_plain_networks() -> None:
    # ResNet-32: a stem, three stages of ten layers of which the later two begin with half, a head.
    layer = 16 * 16 * 9 * 32 * 32
    resnet_32 = 3 * 16 * 9 * 32 * 32 + 10 * layer + 2 * (layer // 2 + 9 * layer) + 64 * 10
    lenet = 25 * (5 * 30**2 + 5 * 10 * 17**2 + 10 * 20 * 11**2) + 720 * 84 + 84 * 10

    assert RANGES["cifar10"].high == resnet_32
    assert RANGES["cifar100"].high == resnet_32 + 64 * 90 == 68_868_352
    assert RANGES["cifar10"].low == pytest.approx(0.02 * resnet_32)
    assert "ResNet-32" in RANGES["cifar10"].why
    assert RANGES["mnist"].high == RANGES["fashion-mnist"].high == lenet
    assert own_range([5.0]).low < 5.0 < own_range([5.0]).high
