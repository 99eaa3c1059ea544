"""Intervals: their coverage, that pairs are paired, and seeds."""

from __future__ import annotations

import numpy as np
import pytest

from narrowgauge_contract.errors import BadValueError
from narrowgauge_scores.resampling import draw_means, interval_of


def _interval(values: np.ndarray, draws: int = 1000, seed: int = 0) -> tuple:
    found = interval_of(float(values.mean()), draw_means([values], draws, seed)[0], -9.0, 9.0)
    return found.low, found.high


def test_an_interval_is_as_wide_as_the_normal_one() -> None:
    values = np.random.default_rng(0).random((1, 2000)) < 0.9
    low, high = _interval(values)
    deviation = np.sqrt(0.9 * 0.1 / 2000)

    assert low < values.mean() < high
    assert high - low == pytest.approx(2 * 1.96 * deviation, rel=0.15)


def test_the_truth_lies_within_about_as_often_as_said() -> None:
    chance = np.random.default_rng(1)
    inside = 0
    for trial in range(150):
        low, high = _interval(chance.random((1, 150)) < 0.7, draws=300, seed=trial)
        inside += low <= 0.7 <= high

    assert 0.88 <= inside / 150 <= 0.99


def test_a_difference_is_paired() -> None:
    """Two networks that err on nearly the same images: each is uncertain, their gap is not."""
    hard = np.random.default_rng(0).random(1000) < 0.7
    better = hard.copy()
    better[np.flatnonzero(~hard)[:20]] = True
    drawn = draw_means([better[np.newaxis], hard[np.newaxis]])
    gap = interval_of(0.02, drawn[0] - drawn[1], -1.0, 1.0)
    alone = interval_of(float(hard.mean()), drawn[1], 0.0, 1.0)

    assert gap.excludes_zero
    assert gap.high - gap.low < (alone.high - alone.low) / 2
    assert not interval_of(0.0, drawn[0] - drawn[0], -1.0, 1.0).excludes_zero


def test_seeds_that_differ_widen_an_interval() -> None:
    chance = np.random.default_rng(0)
    alike = np.repeat(chance.random((1, 500)) < 0.8, 3, axis=0).astype(float)
    apart = alike + np.array([[-0.2], [0.0], [0.2]])
    narrow, wide = _interval(alike), _interval(apart)

    assert wide[1] - wide[0] > 2 * (narrow[1] - narrow[0])
    # Three equal seeds know no more of the images than one does.
    one = _interval(alike[:1])
    assert narrow[1] - narrow[0] == pytest.approx(one[1] - one[0], rel=0.1)


def test_few_seeds_have_the_variance_of_their_sample() -> None:
    """Of constant images all that varies is the seeds: s / sqrt(n) with n - 1 below."""
    values = np.repeat(np.array([[0.1], [0.2], [0.4]]), 50, axis=1)
    drawn = draw_means([values], draws=20_000)[0]

    assert drawn.std() == pytest.approx(
        np.array([0.1, 0.2, 0.4]).std(ddof=1) / np.sqrt(3), rel=0.03
    )


def test_the_same_answers_give_the_same_interval() -> None:
    values = np.random.default_rng(0).random((2, 300))

    assert np.array_equal(draw_means([values], 50), draw_means([values], 50))
    assert not np.array_equal(draw_means([values], 50), draw_means([values], 50, seed=1))


def test_limits_are_kept() -> None:
    found = interval_of(0.99, np.linspace(0.9, 1.1, 100), 0.0, 1.0)

    assert found.high == 1.0


@pytest.mark.parametrize(
    "shapes", [[(1, 5), (1, 6)], [(1, 0)], [(0, 5)], []], ids=["images", "none", "no seed", "empty"]
)
def test_families_of_different_images_are_refused(shapes: list) -> None:
    with pytest.raises(BadValueError, match="no draws in common"):
        draw_means([np.zeros(shape) for shape in shapes])
