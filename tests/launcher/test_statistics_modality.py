"""Two modes: the dip against its definition and published values; and what is no second mode."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge.statistics import modes_of
from narrowgauge.statistics.modality import _CRITICAL, dip, dip_p_value, null_quantiles


def _two(chance: np.random.Generator, n: int, apart: float, share: float = 0.5) -> list[float]:
    upper = round(n * share)
    parts = (chance.normal(10.0, 0.05, n - upper), chance.normal(10.0 + apart, 0.05, upper))
    mixed = np.concatenate(parts)
    chance.shuffle(mixed)
    return mixed.tolist()  # type: ignore[no-any-return]


class TestDip:
    @pytest.mark.parametrize("n", [4, 10, 101])
    def test_evenly_spaced_values_have_the_least_there_is(self, n: int) -> None:
        assert dip(np.linspace(0, 1, n)) == pytest.approx(1 / (2 * n))

    def test_two_far_points_of_mass_have_the_most_there_is(self) -> None:
        values = np.sort(np.concatenate([np.linspace(0, 1e-6, 500), np.linspace(1, 1 + 1e-6, 500)]))

        assert dip(values) == pytest.approx(0.25, abs=0.002)

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.floats(0, 1e3), min_size=4, max_size=40, unique=True), st.floats(0.1, 100))
    def test_it_knows_neither_scale_nor_direction(self, values: list[float], scale: float) -> None:
        x = np.sort(np.asarray(values))
        if np.diff(x).min() < 1e-6:
            return

        assert dip(np.sort(-x)) == pytest.approx(dip(x), rel=1e-6)
        assert dip(scale * x + 7) == pytest.approx(dip(x), rel=1e-6)
        assert 1 / (2 * len(x)) <= dip(x) <= 0.25 + 1e-9


def _brute(values: np.ndarray) -> float:
    """The dip by definition, for few values: the least distance to a distribution whose density
    rises up to some value and falls after it, over a grid of such densities."""
    from scipy.optimize import linprog

    x = np.asarray(values)
    n = len(x)
    best = 1.0
    for mode in range(n - 1):
        # Unknowns: G at every x, and the distance t. G is convex up to x[mode], linear or not
        # between mode and mode + 1, concave after; the steps of F bound it from both sides.
        rows, bounds = [], []
        for i in range(n):
            above, below = np.zeros(n + 1), np.zeros(n + 1)
            above[i], above[n] = -1.0, -1.0  # F(x) - G(x) <= t
            below[i], below[n] = 1.0, -1.0  # G(x) - F(x-) <= t
            rows += [above, below]
            bounds += [-(i + 1) / n, i / n]
        slope = 1.0 / np.diff(x)
        for i in range(n - 2):
            bend = np.zeros(n + 1)
            bend[i], bend[i + 1], bend[i + 2] = slope[i], -slope[i] - slope[i + 1], slope[i + 1]
            convex = i + 1 <= mode
            rows.append(-bend if convex else bend)
            bounds.append(0.0)
        for i in range(n - 1):
            rises = np.zeros(n + 1)
            rises[i], rises[i + 1] = 1.0, -1.0
            rows.append(rises)
            bounds.append(0.0)
        cost = np.zeros(n + 1)
        cost[n] = 1.0
        found = linprog(cost, np.asarray(rows), np.asarray(bounds), bounds=[(None, None)] * (n + 1))
        best = min(best, found.fun)
    return float(best)


@pytest.mark.parametrize("seed", range(4))
def test_the_dip_is_what_its_definition_says(seed: int) -> None:
    chance = np.random.default_rng(seed)
    values = np.sort(np.concatenate([chance.uniform(0, 1, 5), chance.uniform(2, 3, 4 + seed)]))

    assert dip(values) == pytest.approx(_brute(values), abs=1e-6)


class TestChance:
    @pytest.mark.parametrize("n", [20, 64])
    def test_the_table_is_what_it_says_it_is(self, n: int) -> None:
        again = null_quantiles(n, 1500, seed=1)

        # the median, 20, 10, 5 and 2 %: further out 1500 samples say little
        assert again[:5] == pytest.approx(_CRITICAL[n][:5], rel=0.06)

    @pytest.mark.parametrize(
        ("n", "value", "chance"),
        [(50, 0.0703, 0.05), (50, 0.0812, 0.01), (200, 0.0368, 0.05), (200, 0.0497, 0.001)],
    )
    def test_it_agrees_with_the_published_table(self, n: int, value: float, chance: float) -> None:
        """qDiptab of Maechler's R package diptest, which goes back to Hartigan's."""
        assert math.log(dip_p_value(value, n)) == pytest.approx(math.log(chance), abs=0.15)

    @pytest.mark.parametrize("n", [20, 37, 200, 1024])
    def test_it_falls_with_the_dip_and_stays_a_chance(self, n: int) -> None:
        found = [dip_p_value(d / math.sqrt(n), n) for d in np.linspace(0.1, 1.5, 30)]

        assert found == sorted(found, reverse=True)
        assert (found[0], found[-1]) == (pytest.approx(0.5), pytest.approx(0.001))


class TestModes:
    @pytest.mark.parametrize(("n", "share"), [(40, 0.5), (200, 0.3), (5000, 0.2)])
    def test_two_are_found_with_their_places_and_shares(self, n: int, share: float) -> None:
        found = modes_of(_two(np.random.default_rng(n), n, 1.0, share))

        assert found is not None
        assert (found.low, found.high) == (pytest.approx(10.0, 0.01), pytest.approx(11.0, 0.01))
        assert found.share == pytest.approx(share, abs=0.02)
        assert found.p <= 0.01

    def test_one_is_one_and_seldom_taken_for_two(self) -> None:
        chance = np.random.default_rng(6)
        wrong = sum(
            modes_of(sample.tolist()) is not None
            for _ in range(60)
            for sample in (
                chance.normal(10.0, 1.0, 100),
                chance.uniform(5.0, 10.0, 100),
                np.exp(chance.normal(0.0, 1.0, 100)),
            )
        )

        assert wrong <= 5

    def test_the_ticks_of_a_clock_are_no_modes(self) -> None:
        chance = np.random.default_rng(8)
        ticks = np.round(chance.normal(20.0, 0.6, 400) / 0.5) * 0.5

        assert len(set(ticks.tolist())) < 10
        assert modes_of(ticks.tolist()) is None

    def test_a_rate_of_ticks_has_no_modes_either(self) -> None:
        chance = np.random.default_rng(8)
        ticks = np.round(chance.normal(20.0, 0.6, 400) / 0.5) * 0.5

        assert modes_of((128 / ticks).tolist()) is None

    def test_outliers_are_no_mode_and_hide_none(self) -> None:
        chance = np.random.default_rng(3)
        far = (50.0 * chance.uniform(1, 20, 6)).tolist()

        two = modes_of(_two(chance, 200, 1.0) + far)

        assert two is not None
        assert (two.low, two.high) == (pytest.approx(10.0, 0.01), pytest.approx(11.0, 0.01))
        assert modes_of(chance.normal(10.0, 0.1, 200).tolist() + far) is None
        few = [*chance.normal(10.0, 1e-3, 93).tolist(), *chance.normal(20.0, 1e-3, 7).tolist()]
        assert modes_of(few) is None

    def test_modes_that_lie_together_move_no_figure(self) -> None:
        chance = np.random.default_rng(8)
        near = np.concatenate([chance.normal(10.0, 1e-4, 100), chance.normal(10.01, 1e-4, 100)])

        assert modes_of(near.tolist()) is None

    @pytest.mark.parametrize(
        "samples", [[], [1.0], [1.0, 9.0] * 9, [3.0] * 50, [*[1.0, 2.0] * 20, math.nan]]
    )
    def test_what_cannot_be_told_is_not(self, samples: list[float]) -> None:
        assert modes_of(samples) is None
