"""The least detectable effect: found as often as promised, unknown where nothing can be said."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from narrowgauge.statistics import least_detectable_effect


def _processes(chance: np.random.Generator, n: int, spread: float = 0.01) -> list[float]:
    return np.exp(chance.normal(-6.0, spread, n)).tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("size", [1, 3, 10])
def test_for_normal_noise_it_is_what_theory_says(size: int) -> None:
    """Two-sided 5 % and 95 % power: 1.96 + 1.645 standard errors; those of a median of 10 are
    1.17 times those of a mean, of 3 1.16 times."""
    wider = {1: 1.0, 3: 1.16, 10: 1.17}[size]
    error = 0.01 * math.sqrt(2 / size) * wider

    normal = [math.exp(NormalDist(-6.0, 0.01).inv_cdf((i + 0.5) / 400)) for i in range(400)]

    found = least_detectable_effect(normal, size, size)

    assert found.threshold is not None
    assert found.least is not None
    assert math.log1p(found.threshold) == pytest.approx(1.96 * error, rel=0.04)
    assert math.log1p(found.least) == pytest.approx((1.96 + 1.645) * error, rel=0.04)


@pytest.mark.parametrize("sign", [1, -1])
def test_comparisons_of_that_size_find_it_and_raise_few_false_alarms(sign: int) -> None:
    chance = np.random.default_rng(5)
    size, count = 10, 4000
    found = least_detectable_effect(_processes(chance, 60), size, size)
    assert found.threshold is not None
    assert found.least is not None
    above = np.median(np.exp(chance.normal(0, 0.01, (count, size))), axis=1)
    below = np.median(np.exp(chance.normal(0, 0.01, (count, size))), axis=1)
    logs = np.log(above / below)
    threshold, effect = math.log1p(found.threshold), sign * math.log1p(found.least)

    # Sixty processes know their own spread to a tenth; so the rates to a few hundredths.
    assert np.mean(np.abs(logs) > threshold) == pytest.approx(0.05, abs=0.03)
    assert np.mean(np.abs(logs + effect) > threshold) == pytest.approx(0.95, abs=0.04)


def test_a_larger_comparison_sees_less() -> None:
    noise = _processes(np.random.default_rng(2), 12)

    found = [least_detectable_effect(noise, n, n).least or 0.0 for n in (1, 3, 10)]

    assert found == sorted(found, reverse=True)
    assert found == [least_detectable_effect(noise, n, n).least for n in (1, 3, 10)]


def test_the_smaller_side_decides() -> None:
    noise = _processes(np.random.default_rng(2), 12)
    both, one = (least_detectable_effect(noise, n, 3).least or 0.0 for n in (3, 30))

    assert 0.6 * both < one < both


def test_two_kinds_of_processes_count_as_they_are() -> None:
    """Half of the processes 10 % slower: no comparison of two single ones sees less than that."""
    effect = least_detectable_effect([1.0, 1.1] * 5, 1, 1)

    assert effect.least is not None
    assert effect.least > 0.17


@pytest.mark.parametrize(
    ("processes", "sides", "reason"),
    [
        ([], (3, 3), "0 processes, and fewer than 6"),
        ([1.0, 1.1, 1.2, 1.0, 1.1], (3, 3), "5 processes"),
        ([1.0] * 9, (3, 3), "do not differ"),
        ([0.3] * 9, (3, 3), "do not differ"),
        ([1.0] * 8 + [0.0], (3, 3), "not a positive number"),
        ([1.0] * 8 + [-1.0], (3, 3), "not a positive number"),
        ([1.0] * 8 + [math.nan], (3, 3), "not a positive number"),
        ([1.0, 1.1] * 5, (0, 3), "one side has no process"),
    ],
)
def test_what_cannot_be_said_is_not(
    processes: list[float], sides: tuple[int, int], reason: str
) -> None:
    found = least_detectable_effect(processes, *sides)

    assert (found.least, found.threshold) == (None, None)
    assert reason in found.reason
