"""Statistics of raw samples: what they say, and that they never say more than the samples do."""

from __future__ import annotations

import math
import random
import statistics as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_cases import job, record_of

from narrowgauge.statistics import (
    configurations,
    figure,
    median_interval,
    summarize,
    varying,
)
from narrowgauge.store import Store
from narrowgauge_contract.outcome import Metric, Validity

SAMPLES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60)


@given(SAMPLES)
def test_a_summary_agrees_with_the_standard_library(values: list[float]) -> None:
    summary = summarize(values)

    assert summary is not None
    assert summary.n == len(values)
    assert summary.median == standard.median(values)
    assert (summary.low, summary.high) == (min(values), max(values))
    assert summary.last == values[-1]


def test_no_samples_are_no_summary() -> None:
    assert summarize([]) is None


def test_one_nan_is_not_averaged_away() -> None:
    summary = summarize([1.0, math.nan, 3.0])

    assert summary is not None
    assert math.isnan(summary.median)
    assert math.isnan(summary.mean)
    assert summary.interval is None


@given(SAMPLES)
def test_an_interval_holds_the_median_and_keeps_its_coverage(values: list[float]) -> None:
    interval = median_interval(values)

    if len(values) < 6:
        assert interval is None
    else:
        assert interval is not None
        assert interval.low <= standard.median(values) <= interval.high
        assert interval.coverage >= 0.95


@pytest.mark.parametrize(("n", "rank"), [(6, 1), (8, 1), (9, 2), (20, 6), (100, 40)])
def test_the_ranks_are_those_of_the_tables(n: int, rank: int) -> None:
    """The sign test's critical values at 5 %, two-sided (Conover, Practical Nonparametric
    Statistics, table A3)."""
    interval = median_interval([float(i) for i in range(1, n + 1)])

    assert interval is not None
    assert (interval.low, interval.high) == (rank, n + 1 - rank)


def test_large_samples_take_the_same_rule() -> None:
    exact, quick = (median_interval([float(i) for i in range(n)]) for n in (1000, 1001))

    assert exact is not None
    assert quick is not None
    assert abs(exact.low - quick.low) <= 1


def test_the_interval_covers_as_often_as_it_says() -> None:
    chance = random.Random(1)
    held = 0
    for _ in range(1000):
        interval = median_interval([chance.gauss(5.0, 1.0) for _ in range(15)])
        assert interval is not None
        held += interval.low <= 5.0 <= interval.high

    assert held >= 940


class TestFigure:
    @pytest.mark.parametrize(
        ("unit", "index", "values", "value", "how"),
        [
            ("ms", "", (3.0, 1.0, 2.0), 2.0, "median"),
            ("%", "epoch", (1.0, 9.0, 5.0), 5.0, "last epoch"),
            ("images/s", "epoch", (1.0, 8.0, 6.0), 7.0, "median without the first epoch"),
            ("s", "epoch", (9.0, 2.0, 4.0), 3.0, "median without the first epoch"),
            ("images/s", "epoch", (5.0,), 5.0, "the first epoch, warm-up included"),
        ],
    )
    def test_it_fits_what_was_measured(
        self, unit: str, index: str, values: tuple[float, ...], value: float, how: str
    ) -> None:
        found = figure(Metric("m", unit, "x", values, index))

        assert (found.value, found.how) == (value, how)

    def test_accuracy_is_never_the_best_epoch(self) -> None:
        assert figure(Metric("a", "%", "count", (99.0, 42.0), "epoch")).value == 42.0


class TestConfigurations:
    def test_repeats_belong_together_and_only_valid_rows_count(self, tmp_path) -> None:  # type: ignore[no-untyped-def]
        rows = list(record_of(Store(tmp_path).new_run(job())).rows)
        object.__setattr__(rows[1], "validity", Validity(False, ("hot",)))

        found = configurations(rows)

        assert [each.parameters["precision"] for each in found] == ["fp32", "bf16"]
        assert [len(each.rows) for each in found] == [3, 3]
        assert [len(each.figures("accuracy")) for each in found] == [3, 2]
        assert varying(found) == ("precision",)
        assert found[0].label(varying(found)) == "precision=fp32"
        assert found[0].figures("nothing") == ()
