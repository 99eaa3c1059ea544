"""Ratios of medians: known answers, coverage by simulation, and what cannot be told is not."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Sequence
from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from result_cases import job, record_of
from scipy.stats import bootstrap

from narrowgauge.statistics import (
    Configuration,
    LogRatio,
    configurations,
    equivalent,
    geometric_mean_interval,
    hierarchical_log_ratio_interval,
    log_ratio_interval,
    ratio_of,
)
from narrowgauge.statistics import ratios as module
from narrowgauge.store import Store

POSITIVE = st.floats(1e-6, 1e6)


def _noisy(chance: np.random.Generator, centre: float, n: int, spread: float = 0.02) -> list[float]:
    """Times around `centre`, in the way in which times spread: by factors."""
    return (centre * np.exp(chance.normal(0.0, spread, n))).tolist()  # type: ignore[no-any-return]


def _statistic(above: np.ndarray, below: np.ndarray, axis: int = -1) -> np.ndarray:
    return np.log(np.median(above, axis=axis) / np.median(below, axis=axis))


@pytest.mark.parametrize("n", [6, 10, 25])
def test_the_interval_is_that_of_scipy(n: int) -> None:
    chance = np.random.default_rng(n)
    above, below = _noisy(chance, 1.1, n), _noisy(chance, 1.0, n)

    mine = log_ratio_interval(above, below)

    theirs = bootstrap(
        (above, below), _statistic, paired=False, vectorized=True, n_resamples=9999, method="BCa"
    ).confidence_interval
    assert mine.interval is not None
    width = theirs.high - theirs.low
    # Medians of few samples take few values, so a resample more or less moves an end by a step.
    assert mine.interval.low == pytest.approx(theirs.low, abs=0.15 * width)
    assert mine.interval.high == pytest.approx(theirs.high, abs=0.15 * width)


@pytest.mark.parametrize("n", [6, 10])
def test_it_covers_about_as_often_as_it_says(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_RESAMPLES", 999)
    chance = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        above, below = _noisy(chance, 1.1, n), _noisy(chance, 1.0, n)
        interval = log_ratio_interval(above, below).ratio_interval
        assert interval is not None
        held += interval.low <= 1.1 <= interval.high

    assert held >= 180  # 90 %: a bootstrap of so few is known to be a little short of its 95 %


def _pairs(
    chance: np.random.Generator, count: int, n: int, shared: float, ratio: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """So many samples of n pairs, which share a drift of `shared` and differ by 1 % each."""
    drift = chance.normal(0.0, shared, (count, n))
    above, below = (drift + chance.normal(0.0, 0.01, (count, n)) for _ in range(2))
    return ratio * np.exp(above), np.exp(below)


class TestPairs:
    @pytest.mark.parametrize("shared", [0.0, 0.01, 0.05])
    @pytest.mark.parametrize(("n", "misses"), [(6, 2 / 64), (10, 22 / 1024), (20, 0.0414)])
    def test_what_they_share_makes_no_false_alarm(
        self, n: int, misses: float, shared: float
    ) -> None:
        """1000 samples: three standard errors of a rate of 3 % are 1.6 %."""
        tops, bottoms = _pairs(np.random.default_rng(n), 1000, n, shared, ratio=1.1)

        found = [
            log_ratio_interval(above, below, paired=True).ratio_interval
            for above, below in zip(tops.tolist(), bottoms.tolist(), strict=True)
        ]

        missed = np.mean([i is None or not i.low <= 1.1 <= i.high for i in found])
        assert missed == pytest.approx(misses, abs=0.019)

    @pytest.mark.parametrize(("n", "misses"), [(20, 0.0414), (39, 0.0237)])
    def test_within_one_process_the_rule_is_near_its_nominal_rate(
        self, n: int, misses: float
    ) -> None:
        """Pairs of the size that the bench of the harness and noise-floor take, with heavy tails
        and a drift that the two sides of a pair share."""
        chance = np.random.default_rng(n)
        drift = np.cumsum(chance.normal(0.0, 0.01, (1000, n)), axis=1)
        tops, bottoms = (np.exp(drift + chance.exponential(0.02, (1000, n))) for _ in "ab")

        alarms = [
            log_ratio_interval(above, below, paired=True).holds_one is False
            for above, below in zip(tops.tolist(), bottoms.tolist(), strict=True)
        ]

        assert np.mean(alarms) == pytest.approx(misses, abs=0.02)

    def test_value_and_interval_are_those_of_their_ratios(self) -> None:
        below = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0]
        ratios = [1.1, 0.9, 1.3, 1.0, 1.2, 1.4]
        above = [r * b for r, b in zip(ratios, below, strict=True)]

        found = log_ratio_interval(above, below, paired=True)

        assert found.ratio == pytest.approx(math.sqrt(1.1 * 1.2))
        assert found.ratio_interval is not None
        assert found.ratio_interval.low == pytest.approx(0.9)
        assert found.ratio_interval.high == pytest.approx(1.4)
        assert found.ratio_interval.coverage == pytest.approx(1 - 2 / 64)

    def test_five_tell_at_90_percent_and_not_at_95(self) -> None:
        above, below = [1.0, 1.1, 1.2, 1.3, 1.4], [1.0] * 5

        wide = log_ratio_interval(above, below, paired=True, coverage=0.90)

        assert wide.interval is not None
        assert wide.ratio_interval is not None
        assert wide.ratio_interval.high == pytest.approx(1.4)
        assert log_ratio_interval(above, below, paired=True).reason.endswith(
            "fewer than 6 do not tell"
        )
        four = log_ratio_interval(above[:4], below[:4], paired=True, coverage=0.90)
        assert four.reason == "4 repeats, and fewer than 5 do not tell"


def test_pairs_that_drift_together_are_told_apart_only_as_pairs() -> None:
    chance = np.random.default_rng(3)
    drift = np.linspace(1.0, 3.0, 12)
    above = (drift * 1.02 * np.exp(chance.normal(0, 0.002, 12))).tolist()
    below = (drift * np.exp(chance.normal(0, 0.002, 12))).tolist()

    as_pairs = log_ratio_interval(above, below, paired=True)
    apart = log_ratio_interval(above, below)

    assert as_pairs.holds_one is False
    assert apart.holds_one is True
    assert as_pairs.ratio == pytest.approx(1.02, rel=0.01)


@settings(max_examples=25, deadline=None)
@given(st.lists(POSITIVE, min_size=6, max_size=9), st.lists(POSITIVE, min_size=6, max_size=9))
def test_the_inverse_has_the_opposite_logarithm(above: list[float], below: list[float]) -> None:
    one, other = log_ratio_interval(above, below), log_ratio_interval(below, above)

    assert one.value == pytest.approx(-(other.value or 0.0), abs=1e-9)
    assert one.value == pytest.approx(math.log(np.median(above) / np.median(below)), abs=1e-9)
    assert one == log_ratio_interval(above, below)
    if one.interval is not None:
        assert one.interval.low <= one.interval.high


@pytest.mark.parametrize(
    ("above", "below", "reason"),
    [
        ([], [1.0] * 9, "there are no samples"),
        ([1.0], [2.0], "1 repeat, and fewer than 6 do not tell"),
        ([1.0, 2.0, 3.0], [1.0, 2.0, 3.0], "3 repeats"),
        ([2.0] * 9, [1.0] * 9, "the samples do not differ"),
        ([1.0] * 9, [0.0] * 9, "zero or negative"),
        ([-1.0] * 9, [1.0] * 9, "zero or negative"),
        ([math.nan] * 9, [1.0] * 9, "not finite"),
        ([1.0] * 9, [*[1.0] * 8, math.inf], "not finite"),
        ([1.0] * 9, [5e-324] * 9, "no float64 holds their ratio"),
        ([1e-200] * 9, [1e200] * 9, "no float64 holds their ratio"),
    ],
)
def test_what_cannot_be_told_is_not_and_says_why(
    above: list[float], below: list[float], reason: str
) -> None:
    found = log_ratio_interval(above, below)
    nested = hierarchical_log_ratio_interval([[v] for v in above], [[v] for v in below])
    mean = geometric_mean_interval([(above, below)] * 7)

    for each in (found, nested, mean):
        assert each.interval is None
        assert each.ratio_interval is None
        assert each.holds_one is None
    assert reason in found.reason
    assert reason in nested.reason
    assert reason in mean.reason


@pytest.mark.parametrize("samples", [6, 7, 20, 33])
def test_samples_drawn_in_parts_are_the_same_samples(
    samples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = np.random.default_rng(samples)
    above, below = _noisy(chance, 1.0, samples), _noisy(chance, 1.1, samples + 3)
    pairs = [(above, below[: samples + i]) for i in range(4)] * 2

    def found() -> list[LogRatio]:
        nested = hierarchical_log_ratio_interval([above] * 6, [below] * 7)
        return [log_ratio_interval(above, below), geometric_mean_interval(pairs), nested]

    whole = found()
    monkeypatch.setattr(module, "_AT_ONCE", 1000)

    assert found() == whole
    assert all(each.interval is not None for each in whole)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 9).map(float) | POSITIVE, min_size=2, max_size=9))
def test_the_medians_without_each_are_those_of_the_others(values: list[float]) -> None:
    asked = module._medians_without_each(np.asarray(values))

    others = [np.median(np.delete(values, i)) for i in range(len(values))]
    assert asked.tolist() == others


def test_the_memory_of_many_samples_is_bounded() -> None:
    """All resamples of these at once would take 500 MB."""
    chance = np.random.default_rng(0)
    above, below = _noisy(chance, 1.0, 2000), _noisy(chance, 1.01, 2000)
    tracemalloc.start()
    try:
        found = log_ratio_interval(above, below)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()

    assert found.interval is not None
    assert most < 60e6


def test_a_ratio_without_an_interval_is_still_a_ratio() -> None:
    assert log_ratio_interval([4.0], [2.0]).ratio == pytest.approx(2.0)
    assert math.isnan(log_ratio_interval([4.0], [0.0]).ratio)


def test_samples_that_differ_on_one_side_only_do_for_an_interval() -> None:
    assert log_ratio_interval([2.0, 2.1, 1.9, 2.0, 2.2, 2.1], [1.0] * 6).interval is not None


def test_a_constant_ratio_of_pairs_has_no_spread_to_know() -> None:
    below = [1.0, 2.0, 3.0, 4.0, 5.0, 7.0]

    found = log_ratio_interval([2 * v for v in below], below, paired=True)

    assert found.interval is None
    assert found.ratio == pytest.approx(2.0)


def test_pairs_need_a_partner_each() -> None:
    with pytest.raises(ValueError, match="no pairs"):
        log_ratio_interval([1.0, 2.0], [1.0], paired=True)
    with pytest.raises(ValueError, match="no pairs"):
        hierarchical_log_ratio_interval([[1.0], [2.0]], [[1.0]], paired=True)
    with pytest.raises(ValueError, match="no pairs"):
        geometric_mean_interval([([1.0, 2.0], [1.0])], paired=True)


class TestHierarchical:
    @staticmethod
    def _processes(
        chance: np.random.Generator, centre: float, between: float, within: float
    ) -> list[list[float]]:
        return [_noisy(chance, m, 20, within) for m in _noisy(chance, centre, 8, between)]

    def test_more_samples_in_a_process_do_not_hide_the_noise_between_processes(self) -> None:
        chance = np.random.default_rng(5)
        above = self._processes(chance, 1.0, 0.02, 0.001)
        below = self._processes(chance, 1.0, 0.02, 0.001)

        nested = hierarchical_log_ratio_interval(above, below)
        flat = log_ratio_interval(list(chain(*above)), list(chain(*below)))

        assert nested.interval is not None
        assert flat.interval is not None
        nested_width = nested.interval.high - nested.interval.low
        assert nested_width > 1.5 * (flat.interval.high - flat.interval.low)
        assert nested == hierarchical_log_ratio_interval(above, below)

    def test_it_covers_about_as_often_as_it_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(module, "_HIERARCHICAL_RESAMPLES", 799)
        chance = np.random.default_rng(11)
        held = 0
        for _ in range(60):
            above = self._processes(chance, 1.05, 0.02, 0.01)
            below = self._processes(chance, 1.0, 0.02, 0.01)
            interval = hierarchical_log_ratio_interval(above, below).ratio_interval
            assert interval is not None
            held += interval.low <= 1.05 <= interval.high

        assert held >= 51  # 85 % of 60: three standard errors below what eight processes give

    @pytest.mark.parametrize("within", [0.001, 0.02])
    def test_pairs_of_processes_cover_as_often_as_they_say(self, within: float) -> None:
        chance = np.random.default_rng(13)
        tops, bottoms = _pairs(chance, 600, 6, 0.05)
        missed = 0
        for above, below in zip(tops, bottoms, strict=True):
            sides = (
                np.exp(chance.normal(0.0, within, (6, 20))) * s[:, None] for s in (above, below)
            )
            found = hierarchical_log_ratio_interval(*(s.tolist() for s in sides), paired=True)
            missed += found.holds_one is False

        assert missed / 600 == pytest.approx(2 / 64, abs=0.022)

    def test_pairs_within_processes_stay_pairs(self) -> None:
        chance = np.random.default_rng(2)
        below = self._processes(chance, 1.0, 0.2, 0.2)
        above = [[1.01 * v * f for v, f in zip(each, _noisy(chance, 1.0, 20, 1e-4), strict=True)]
                 for each in below]  # fmt: skip

        as_pairs = hierarchical_log_ratio_interval(above, below, paired=True)

        assert as_pairs.interval is not None
        assert as_pairs.interval.high - as_pairs.interval.low < 0.005
        assert as_pairs.ratio == pytest.approx(1.01, rel=1e-3)


class TestGeometricMean:
    def test_it_is_the_mean_of_the_logarithms(self) -> None:
        chance = np.random.default_rng(4)
        factors = [1.1, 2.0, 0.9, 1.5, 3.0, 1.0, 1.2]
        sides = [(_noisy(chance, f, 8, 1e-4), _noisy(chance, 1.0, 8, 1e-4)) for f in factors]

        found = geometric_mean_interval(sides)

        expected = math.prod(factors) ** (1 / len(factors))
        assert found.ratio == pytest.approx(expected, rel=1e-3)
        interval = found.ratio_interval
        assert interval is not None
        assert interval.low < expected < interval.high
        # the configurations differ far more than their repeats do, and the interval says so
        assert interval.high / interval.low > 1.3

    def test_few_configurations_do_not_tell(self) -> None:
        chance = np.random.default_rng(4)
        side = (_noisy(chance, 1.0, 8), _noisy(chance, 1.0, 8))

        found = geometric_mean_interval([side] * 5)

        assert found.interval is None
        assert "5 configurations" in found.reason
        assert found.ratio == pytest.approx(np.median(side[0]) / np.median(side[1]))

    def test_none_at_all(self) -> None:
        assert geometric_mean_interval([]) == LogRatio(None, reason="there are no samples")


class TestEquivalence:
    def _sides(self, factor: float, n: int = 10) -> tuple[list[float], list[float]]:
        chance = np.random.default_rng(9)
        return _noisy(chance, factor, n, 0.005), _noisy(chance, 1.0, n, 0.005)

    def test_equal_things_are_equivalent(self) -> None:
        found = equivalent(*self._sides(1.0), 0.03)

        assert found.equivalent is True
        assert found.found.interval is not None
        assert found.found.interval.coverage == 0.90

    @pytest.mark.parametrize("factor", [1.05, 0.95, 1.03])
    def test_what_lies_beyond_or_on_the_margin_is_not(self, factor: float) -> None:
        assert equivalent(*self._sides(factor), 0.03).equivalent is False

    def test_not_different_is_not_equivalent(self) -> None:
        chance = np.random.default_rng(9)
        above, below = _noisy(chance, 1.0, 8, 0.2), _noisy(chance, 1.0, 8, 0.2)

        assert log_ratio_interval(above, below).holds_one is True
        assert equivalent(above, below, 0.03).equivalent is False

    def test_too_few_say_neither(self) -> None:
        found = equivalent([1.0, 1.0], [1.0, 1.0], 0.03)

        assert found.equivalent is None
        assert "2 repeats" in found.found.reason

    @pytest.mark.parametrize("shared", [0.0, 0.05])
    @pytest.mark.parametrize("n", [5, 6, 10])
    @pytest.mark.parametrize("ratio", [1.03, 1 / 1.03])
    def test_pairs_on_the_margin_are_seldom_called_equivalent(
        self, n: int, shared: float, ratio: float
    ) -> None:
        tops, bottoms = _pairs(np.random.default_rng(n), 800, n, shared, ratio)

        wrong = [
            equivalent(above, below, 0.03, paired=True).equivalent
            for above, below in zip(tops.tolist(), bottoms.tolist(), strict=True)
        ]

        assert None not in wrong
        assert np.mean(wrong) <= 0.05

    def test_pairs_that_are_equal_are_equivalent(self) -> None:
        tops, bottoms = _pairs(np.random.default_rng(4), 1, 10, 0.2)

        assert equivalent(tops[0].tolist(), bottoms[0].tolist(), 0.03, paired=True).equivalent

    def test_the_margin_is_the_same_both_ways(self) -> None:
        above, below = self._sides(1.02)

        one, other = equivalent(above, below, 0.03), equivalent(below, above, 0.03)

        assert one.equivalent is other.equivalent is True

    @pytest.mark.parametrize("margin", [0.0, -0.1, math.nan])
    def test_a_margin_of_nothing_is_refused(self, margin: float) -> None:
        with pytest.raises(ValueError, match="margin"):
            equivalent([1.0], [1.0], margin)


class TestConfigurations:
    def _found(self, tmp_path, scale: float) -> Sequence[Configuration]:  # type: ignore[no-untyped-def]
        folder = Store(tmp_path).new_run(job(precision=["fp32", "bf16"]))
        return configurations(record_of(folder, scale=scale).rows)

    def test_the_same_repeats_are_pairs(self, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:  # type: ignore[no-untyped-def]
        seen = []

        def spy(above: list[float], below: list[float], *, paired: bool = False) -> LogRatio:
            seen.append((tuple(above), tuple(below), paired))
            return LogRatio(0.0)

        monkeypatch.setattr(module, "log_ratio_interval", spy)
        one, other = self._found(tmp_path, 1.0)
        fewer = Configuration(other.parameters, other.rows[:2])
        twice = Configuration(other.parameters, other.rows * 2)

        for below in (other, fewer, twice):
            ratio_of(one, below, "accuracy")

        assert [paired for _, _, paired in seen] == [True, False, False]
        assert seen[0][0] == one.figures("accuracy")
        assert len(seen[2][1]) == 6

    def test_repeats_in_another_order_are_the_same_pairs(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        one, other = self._found(tmp_path, 1.0)
        mixed = Configuration(other.parameters, tuple(reversed(other.rows)))

        assert mixed.by_repeat("accuracy") == other.by_repeat("accuracy")
        assert ratio_of(one, mixed, "accuracy") == ratio_of(one, other, "accuracy")
