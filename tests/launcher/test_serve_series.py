"""Which of a run's series a page draws."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.serve.series import Series, SeriesStore


def trained(store: SeriesStore, names: list[str], epochs: int, row: int = 0) -> None:
    for epoch in range(epochs):
        for name in names:
            store.add(name, row, [float(epoch)])


def test_all_values_of_all_rows_are_drawn_in_the_order_they_came() -> None:
    store = SeriesStore()
    trained(store, ["loss", "accuracy"], 2)
    trained(store, ["loss", "accuracy"], 1, row=1)

    chosen = store.chosen((), 8)

    both, one = [(0, 0.0), (1, 1.0)], [(0, 0.0)]
    drawn = {
        name: {row: each.points() for row, each in rows.items()} for name, rows in chosen.items()
    }
    assert drawn == {"loss": {0: both, 1: one}, "accuracy": {0: both, 1: one}}
    assert [*chosen] == ["loss", "accuracy"]


def test_what_a_run_says_first_of_itself_is_drawn_first() -> None:
    store = SeriesStore()
    trained(store, ["loss", "rate", "accuracy"], 3)

    assert [*store.chosen(("accuracy",), 2)] == ["accuracy", "loss"]


def test_a_training_that_goes_on_is_drawn_before_one_that_is_over() -> None:
    store = SeriesStore()
    trained(store, ["trunk_loss", "trunk_accuracy"], 3)
    trained(store, ["loss", "accuracy"], 2)

    assert [*store.chosen((), 2)] == ["loss", "accuracy"]
    assert [*store.chosen((), 8)] == ["loss", "accuracy", "trunk_loss", "trunk_accuracy"]


def test_single_figures_at_the_end_do_not_push_curves_out() -> None:
    store = SeriesStore()
    trained(store, ["loss"], 3)
    trained(store, [f"exit{k}_accuracy" for k in range(12)], 1)

    assert [*store.chosen(("exit3_accuracy",), 2)] == ["loss", "exit3_accuracy"]


def test_rows_without_a_finite_value_are_not_drawn() -> None:
    store = SeriesStore()
    store.add("loss", 0, [math.nan])
    store.add("loss", 1, [1.0, math.nan])
    store.add("auroc", 0, [math.nan])
    store.add("none", 0, [])

    assert [*store.chosen((), 8)] == ["loss"]
    assert [*store.chosen((), 8)["loss"]] == [1]


def test_what_is_kept_has_an_end() -> None:
    store = SeriesStore()
    for number in range(100):
        store.add(f"metric{number}", 0, [1.0, 2.0])
    store.add("metric0", 0, [0.0] * 100_000)

    chosen = store.chosen((), 1000)
    assert len(chosen) == 32
    assert len(chosen["metric0"][0].points()) < 257


def test_a_long_series_is_drawn_to_its_end() -> None:
    series = Series()
    for step in range(1_000_000):
        series.extend([float(step)])

    points = series.points()
    assert (series.count, series.newest) == (1_000_000, 999_999.0)
    assert points[0] == (0, 0.0)
    assert points[-1] == (999_999, 999_999.0)
    assert all(place == value for place, value in points)
    gaps = {b - a for (a, _), (b, _) in itertools.pairwise(points[:-1])}
    assert len(gaps) == 1, "unevenly thinned"
    assert len(points) >= 128


@given(st.lists(st.floats(), max_size=600), st.integers(1, 97))
def test_what_is_said_of_a_series_is_of_all_its_values(values: list[float], piece: int) -> None:
    series = Series()
    for begin in range(0, len(values), piece):
        series.extend(values[begin : begin + piece])
    finite = [value for value in values if math.isfinite(value)]

    assert series.count == len(values)
    assert (series.low, series.high) == (
        min(finite, default=math.inf),
        max(finite, default=-math.inf),
    )
    assert [series.newest] == pytest.approx(values[-1:] or [math.nan], nan_ok=True)
    points = series.points()
    assert all(values[place] == value for place, value in points)
    assert points == Series(values).points(), "it matters in what pieces they come"
    if len(values) < 256:
        assert points == [(k, value) for k, value in enumerate(values) if math.isfinite(value)]
