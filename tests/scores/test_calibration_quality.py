"""Calibration and the properties of anytime algorithms, against references that are slow."""

from __future__ import annotations

import math
from typing import List

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from score_cases import of_right, split

from narrowgauge_scores.answers import accuracies, confidences, costs_of, entropies
from narrowgauge_scores.calibration import auroc, expected_calibration_error
from narrowgauge_scores.quality import (
    conditional_profile,
    consistency,
    diminishing_returns,
    monotonicity,
    overthinking,
    performance_profile,
    spoiled,
)

#: 0 right or wrong at each of three exits, image by image.
RIGHT = np.array([[1, 1, 0, 0, 1], [1, 0, 1, 0, 1], [1, 0, 1, 0, 0]], bool)

_JUDGED = st.lists(
    st.tuples(st.sampled_from([0.0, 0.1, 0.2, 1 / 3, 0.5, 0.6, 0.9, 1.0]), st.booleans()),
    min_size=1,
    max_size=25,
)


def _slow_error(confidence: np.ndarray, correct: np.ndarray, bins: int) -> float:
    total = 0.0
    for number in range(bins):
        inside = [
            (c, r)
            for c, r in zip(confidence, correct)
            if number / bins < c <= (number + 1) / bins or (number == 0 and c == 0)
        ]
        if inside:
            gap = abs(np.mean([c for c, _ in inside]) - np.mean([r for _, r in inside]))
            total += len(inside) / len(confidence) * gap
    return total


@settings(max_examples=80, deadline=None)
@given(_JUDGED, st.sampled_from([1, 2, 5, 15]))
def test_calibration_error_is_that_of_bins_one_by_one(judged: List, bins: int) -> None:
    confidence = np.array([each[0] for each in judged])
    correct = np.array([each[1] for each in judged])
    # A confidence on an edge falls where its product rounds to; leave those out of the comparison.
    on_edge = np.isclose(confidence * bins, np.round(confidence * bins)) & (confidence > 0)
    inside = ~on_edge | np.isin(confidence, [0.5, 1.0])
    if inside.any():
        found = expected_calibration_error(confidence[inside], correct[inside], bins)
        assert found == pytest.approx(_slow_error(confidence[inside], correct[inside], bins))


def test_a_sure_and_wrong_network_has_the_worst_calibration() -> None:
    assert expected_calibration_error(np.ones(4), np.zeros(4, bool)) == 1.0
    assert expected_calibration_error(np.ones(4), np.ones(4, bool)) == 0.0


@settings(max_examples=80, deadline=None)
@given(_JUDGED)
def test_auroc_is_what_all_pairs_give(judged: List) -> None:
    score = np.array([each[0] for each in judged])
    correct = np.array([each[1] for each in judged])
    right, wrong = score[correct], score[~correct]
    found = auroc(score, correct)
    if not len(right) or not len(wrong):
        assert found is None
        return
    pairs = [1.0 if r > w else 0.5 if r == w else 0.0 for r in right for w in wrong]
    assert found == pytest.approx(np.mean(pairs))


def test_answers_of_extreme_logits_are_numbers() -> None:
    logits = np.array([[3e38, -3e38, 0.0], [0.0, 0.0, 0.0]], np.float32)

    assert entropies(logits).tolist() == pytest.approx([0.0, math.log(3)])
    assert confidences(logits).tolist() == pytest.approx([1.0, 1 / 3])


def test_accuracies_and_costs_of_answers() -> None:
    assert accuracies(of_right(RIGHT)).tolist() == pytest.approx([0.6, 0.6, 0.4])
    assert costs_of(split(), np.array([1, 2, 3])).shape == (3, 40)


def test_properties_by_hand() -> None:
    assert monotonicity([0.6, 0.6, 0.4]) == 0.5
    assert monotonicity([0.6]) is None
    assert diminishing_returns([0.5, 0.7, 0.8, 0.95]) == 0.5
    assert diminishing_returns([0.5, 0.7]) is None
    # Images 1 and 4 are right at some exit and wrong at the last.
    assert overthinking(RIGHT) == pytest.approx(0.4)
    assert spoiled(RIGHT).tolist() == pytest.approx([0.2, 0.2])
    # Images 0, 2, 3 keep what they have once it is right; 1 and 4 do not.
    assert consistency(RIGHT) == pytest.approx(0.6)


def test_a_performance_profile_by_hand() -> None:
    """Two passes: exits after 1 and 3 s, and after 2 and 2.5 s."""
    latency = np.array([[1.0, 2.0], [3.0, 2.5]])
    found = performance_profile(latency, [0.5, 0.9], [0.5, 1.0, 2.0, 2.5, 3.0], chance=0.1)

    assert found.tolist() == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])


def test_an_exit_that_was_measured_quicker_than_the_one_before_is_not_earlier() -> None:
    found = performance_profile(np.array([[2.0], [1.0]]), [0.5, 0.9], [1.5, 2.0], chance=0.1)

    assert found.tolist() == pytest.approx([0.1, 0.9])


def test_a_conditional_profile_by_hand() -> None:
    confidence = np.array([[0.1, 0.2, 0.8, 0.9]] * 2)
    correct = np.array([[0, 0, 1, 1], [1, 0, 1, 0]], bool)
    found = conditional_profile(confidence, correct, bins=2)

    assert found.edges.tolist() == pytest.approx([0.1, 0.5, 0.9])
    assert found.share.tolist() == [0.5, 0.5]
    assert found.right.tolist() == [[0.0, 1.0], [0.5, 0.5]]
    assert found.kept.tolist() == [1.0, 0.5]
    assert found.mended.tolist() == [0.0, 0.5]


@settings(max_examples=40, deadline=None)
@given(_JUDGED, st.integers(1, 6))
def test_bins_share_out_every_image(judged: List, bins: int) -> None:
    confidence = np.array([[each[0] for each in judged]])
    correct = np.array([[each[1] for each in judged]])
    found = conditional_profile(confidence, correct, bins=bins)

    assert found.share.sum() == pytest.approx(1.0)
    weighted = np.nansum(found.right[0] * found.share)
    assert weighted == pytest.approx(correct.mean())
    assert math.isnan(found.kept[0]) == (not correct.any())
