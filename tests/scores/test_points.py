"""Operating points, fronts, and the staircase of somebody who knows the labels."""

from __future__ import annotations

import dataclasses
import math
from typing import List, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import of_right, run, split

from narrowgauge_scores.answers import entropies
from narrowgauge_scores.areas import area
from narrowgauge_scores.fronts import best_static_gain, hypervolume, pareto_front
from narrowgauge_scores.points import (
    budgeted_points,
    exit_costs,
    exit_points,
    exits_taken,
    geometric_thresholds,
    law_points,
    mean_points,
    oracle_points,
    scored,
)

RIGHT = np.array([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 0, 1, 0, 0]], bool)


def test_exits_cost_what_they_cost_without_the_heads_before_them() -> None:
    answers = run()

    assert exit_costs(answers).tolist() == [2e6, 8e6, 28e6]
    assert exit_costs(answers, interruptible=True).tolist() == [2e6, 9e6, 30e6]
    assert [point.macs for point in exit_points(answers)] == [2e6, 8e6, 28e6]


def test_costs_that_depend_on_the_image_are_means_less_the_heads() -> None:
    macs = np.repeat(np.array([[2e6], [10e6], [34e6]]), 40, axis=1)
    macs[:, ::2] += 1e6
    answers = run(test=dataclasses.replace(split(), macs=macs))

    assert exit_costs(answers, interruptible=True).tolist() == [2.5e6, 10.5e6, 34.5e6]
    assert exit_costs(answers).tolist() == [2.5e6, 9.5e6, 32.5e6]


def test_an_oracle_leaves_at_the_first_exit_that_is_right() -> None:
    answers = run(test=of_right(RIGHT), val=None)
    last = oracle_points(answers)[-1]

    assert last.accuracy == pytest.approx(0.8)
    # Four leave at the first exit, the one that none gets right among them, and one at the second.
    assert last.shares == pytest.approx((0.8, 0.2, 0.0))
    assert last.macs == pytest.approx((4 * 2e6 + 9e6) / 5)
    assert [p.accuracy for p in oracle_points(answers)] == pytest.approx([0.6, 0.8, 0.8])


def test_nobody_beats_the_oracle() -> None:
    answers = run()
    best = oracle_points(answers)[-1].accuracy

    assert all(point.accuracy <= best for point in exit_points(answers) + budgeted_points(answers))


def test_thresholds_let_the_shares_go_on_the_validation_split() -> None:
    logits = split(images=900).logits
    thresholds = geometric_thresholds(logits, ratio=1.0)
    taken = exits_taken(entropies(logits), thresholds)

    assert np.bincount(taken).tolist() == [300, 300, 300]


def test_laws_from_few_to_many_are_cheap_to_dear() -> None:
    points = budgeted_points(run(test=split(400), val=split(400, seed=1)))

    assert len(points) > 20
    macs = [point.macs for point in points]
    assert macs == sorted(macs)
    assert macs[0] < 4e6 < 15e6 < macs[-1]
    assert all(sum(point.shares) == pytest.approx(1.0) for point in points)
    assert len({point.thresholds for point in points}) == len(points)


def test_thresholds_come_from_validation_and_not_from_the_test_split() -> None:
    answers = run()
    other = dataclasses.replace(answers, test=split(seed=9))

    assert {p.thresholds for p in budgeted_points(answers)} == {
        p.thresholds for p in budgeted_points(other)
    }


def test_without_validation_or_with_one_exit_there_are_no_thresholds() -> None:
    one = np.array([5_000_000])
    alone = run(test=split(exits=1), val=split(exits=1), cumulative_macs=one, direct_macs=one)

    assert budgeted_points(run(val=None)) == ()
    assert budgeted_points(alone) == ()
    assert len(oracle_points(alone)) == len(exit_points(alone)) == 1


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 30), st.integers(2, 5), st.floats(0.01, 3.0), st.integers(0, 99))
def test_any_law_gives_everybody_an_exit(images: int, exits: int, ratio: float, seed: int) -> None:
    logits = split(images, exits, seed=seed).logits
    thresholds = geometric_thresholds(logits, ratio)
    taken = exits_taken(entropies(logits), thresholds)

    assert thresholds.shape == (exits - 1,)
    assert taken.min() >= 0
    assert taken.max() < exits


@pytest.mark.parametrize(("threshold", "exit"), [(math.inf, 0), (-1.0, 2)])
def test_thresholds_that_all_or_none_meet(threshold: float, exit: int) -> None:
    answers = run()
    taken = exits_taken(entropies(answers.test.logits), [threshold, threshold])
    point = scored(answers, taken, kind="B", label="")

    assert taken.tolist() == [exit] * 40
    assert point.macs == answers.cumulative_macs[exit]


_POINTS = st.lists(st.tuples(st.floats(0.1, 50.0), st.floats(0.0, 1.0)), min_size=1, max_size=12)


@settings(max_examples=80, deadline=None)
@given(_POINTS)
def test_the_front_is_who_nobody_beats(points: List[Tuple[float, float]]) -> None:
    costs, heights = [p[0] for p in points], [p[1] for p in points]
    front = pareto_front(costs, heights)
    values = {points[index] for index in front}
    beaten = {p for p in points if any(q[0] <= p[0] and q[1] >= p[1] and q != p for q in points)}

    assert values == set(points) - beaten
    assert [points[i][0] for i in front] == sorted(points[i][0] for i in front)


@settings(max_examples=80, deadline=None)
@given(_POINTS, st.tuples(st.floats(0.1, 50.0), st.floats(0.0, 1.0)))
def test_a_further_point_never_makes_the_volume_smaller(
    points: List[Tuple[float, float]], more: Tuple[float, float]
) -> None:
    def volume(listed: List[Tuple[float, float]]) -> float:
        return hypervolume([p[0] for p in listed], [p[1] for p in listed], 1.0, 20.0, floor=0.1)

    assert 0.0 <= volume(points) <= volume([*points, more]) + 1e-12
    assert volume([*points, more]) <= 1.0 + 1e-12


def test_hypervolumes_by_hand() -> None:
    assert hypervolume([1.0], [1.0], 1.0, 10.0, floor=0.1) == pytest.approx(1.0)
    assert hypervolume([10.0], [1.0], 1.0, 10.0, floor=0.1) == pytest.approx(0.0)
    assert hypervolume([1.0], [0.05], 1.0, 10.0, floor=0.1) == pytest.approx(0.0)
    assert hypervolume([], [], 1.0, 10.0, floor=0.1) == 0.0
    half = hypervolume([math.sqrt(10)], [1.0], 1.0, 10.0, floor=0.0)
    assert half == pytest.approx(0.5)
    steps = area([1.0, 2.0], [0.5, 0.9], 1.0, 10.0, chance=0.0)
    assert hypervolume([1.0, 2.0, 3.0], [0.5, 0.9, 0.6], 1.0, 10.0, floor=0.0) == pytest.approx(
        steps
    )


def test_a_gain_is_over_the_best_that_is_as_cheap() -> None:
    costs, heights = [1.0, 2.0, 5.0], [0.5, 0.7, 0.95]

    assert best_static_gain(3.0, 0.8, costs, heights) == pytest.approx(0.1)
    assert best_static_gain(5.0, 0.8, costs, heights) == pytest.approx(-0.15)
    assert best_static_gain(0.5, 0.8, costs, heights) is None


def test_a_point_for_each_law_so_that_seeds_go_together() -> None:
    laws = (0.5, 1.0, 1.0, 2.0)
    points = law_points(run(), laws)

    assert [point.label for point in points] == [f"geometric, ratio {ratio:g}" for ratio in laws]
    assert points[1] == points[2]
    assert {p.thresholds for p in points} == {p.thresholds for p in budgeted_points(run(), laws)}
    assert len(budgeted_points(run(), laws)) == 3
    assert law_points(run(val=None)) == ()


def test_points_of_several_seeds_are_means_and_no_lucky_seeds() -> None:
    right = np.arange(10)[np.newaxis] >= np.array([[5], [5], [5]])
    lucky = run(test=of_right(np.ones((3, 10))), val=None)
    plain = run(test=of_right(right), val=None)
    points = mean_points((lucky, plain))

    assert [point.accuracy for point in points] == [0.75] * 3
    assert [point.macs for point in points] == [2e6, 8e6, 28e6]
    both = mean_points((run(), run(test=split(seed=5), val=split(seed=6))))
    ones, others = law_points(run()), law_points(run(test=split(seed=5), val=split(seed=6)))
    assert len(both) == 3 + len(ones)
    assert both[3].accuracy == pytest.approx((ones[0].accuracy + others[0].accuracy) / 2)
    assert both[3].macs == pytest.approx((ones[0].macs + others[0].macs) / 2)
    # One without validation has no laws, so the family has none.
    assert len(mean_points((run(), run(val=None)))) == 3
