"""Which order statistics hold the median: against exact arithmetic, and against simulation."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from typing import Tuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.order_statistics import (
    fewer_heads,
    median_bounds,
    median_coverage,
    median_rank,
)


def exactly_fewer_heads(n: int, k: int) -> Fraction:
    ways, fewer = 1, 0
    for i in range(k):  # each from the one before: all at once take a second
        fewer += ways
        ways = ways * (n - i) // (i + 1)
    return Fraction(fewer, 2**n)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1200), st.sampled_from([0.5, 0.9, 0.95, 0.99]))
def test_the_rank_is_the_largest_that_covers(n: int, coverage: float) -> None:
    rank = median_rank(n, coverage)

    tail = (1.0 - coverage) / 2.0
    # 1e-9: what logarithms of binomial coefficients are good for.
    assert exactly_fewer_heads(n, rank) <= tail * (1 + 1e-9)
    if rank < n // 2:
        assert exactly_fewer_heads(n, rank + 1) > tail * (1 - 1e-9)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 1200).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n + 1))))
def test_the_binomial_tail_is_exact(case: Tuple[int, int]) -> None:
    n, k = case

    assert fewer_heads(n, k) == pytest.approx(float(exactly_fewer_heads(n, k)), rel=1e-8, abs=0)


@pytest.mark.parametrize("n", [0, 1, 5])
def test_few_samples_have_no_interval(n: int) -> None:
    assert median_rank(n) == 0


def test_the_bounds_are_as_many_values_from_each_end() -> None:
    values = [float(each) for each in random.Random(0).sample(range(100), 25)]
    ordered, rank = sorted(values), median_rank(25)

    assert median_bounds(values) == (ordered[rank - 1], ordered[25 - rank])
    assert median_bounds([3.0, 1.0, 2.0, 6.0, 5.0, 4.0]) == (1.0, 6.0)
    assert median_bounds(values[:5]) is None


def test_a_million_samples_take_no_time() -> None:
    """The normal approximation is good to a rank there."""
    assert median_rank(10**6) == pytest.approx(10**6 / 2 - 1.959964 * 1000 / 2, abs=1)
    assert median_coverage(10**6, median_rank(10**6)) == pytest.approx(0.95, abs=1e-3)


def test_the_interval_covers_as_often_as_it_says() -> None:
    chance = random.Random(0)
    n = 41
    rank = median_rank(n)
    held = 0
    for _ in range(1000):
        ordered = sorted(chance.expovariate(1.0) for _ in range(n))
        held += ordered[rank - 1] <= math.log(2.0) <= ordered[n - rank]

    assert held / 1000 >= median_coverage(n, rank) - 0.02
