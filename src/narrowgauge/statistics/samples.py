"""What samples say of themselves. Intervals of a median come from order statistics: no distribution
is assumed. With fewer than six samples there is no 95 % interval, and none is made up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge_contract.order_statistics import median_coverage, median_rank

__all__ = ["COVERAGE", "Interval", "Summary", "median_interval", "summarize"]

COVERAGE = 0.95


@dataclass(frozen=True)
class Interval:
    """`low` to `high`, which holds the true median with at least `coverage`."""

    low: float
    high: float
    coverage: float


@dataclass(frozen=True)
class Summary:
    """Statistics of samples in their order. NaN among them makes NaN of everything but `last`."""

    n: int
    median: float
    mean: float
    low: float
    high: float
    last: float
    interval: Interval | None


def summarize(values: Sequence[float]) -> Summary | None:
    """Statistics of `values` in their order; None where there are none."""
    if not values:
        return None
    if any(math.isnan(value) for value in values):
        nan = math.nan
        return Summary(len(values), nan, nan, nan, nan, values[-1], None)
    return Summary(
        n=len(values),
        median=statistics.median(values),
        mean=statistics.fmean(values),
        low=min(values),
        high=max(values),
        last=values[-1],
        interval=median_interval(values),
    )


def median_interval(values: Sequence[float], coverage: float = COVERAGE) -> Interval | None:
    """The narrowest pair of order statistics, as many from each end, that covers the median.

    None where even smallest and largest do not reach `coverage`.
    """
    n = len(values)
    rank = median_rank(n, coverage)
    if rank == 0:
        return None
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[n - rank], median_coverage(n, rank))
