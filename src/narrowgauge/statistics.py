"""Statistics of raw samples, computed on reading, never stored.

Intervals of a median come from order statistics: no distribution is assumed. With fewer than six
samples there is no 95 % interval, and none is made up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge_contract.outcome import Metric, Row

__all__ = [
    "Configuration",
    "Figure",
    "Interval",
    "Summary",
    "configurations",
    "figure",
    "median_interval",
    "ratio_interval",
    "summarize",
    "varying",
    "word",
]

COVERAGE = 0.95
#: Units of what a user waits for or pays: the first of a series holds the warm-up.
_COST_UNITS = ("s", "ms", "us", "J", "W")
_BOOTSTRAP = 4000
_LEAST_FOR_BOOTSTRAP = 5


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


@dataclass(frozen=True)
class Figure:
    """One row's figure of a metric; `how` says which statistic of its samples it is."""

    value: float
    how: str


@dataclass(frozen=True)
class Configuration:
    """The rows that differ in repeat and seed only."""

    parameters: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def valid(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.validity.valid)

    def figures(self, metric: str) -> tuple[float, ...]:
        """One figure per valid row that has the metric, in the order of the rows."""
        found = (row.metric(metric) for row in self.valid)
        return tuple(figure(m).value for m in found if m is not None and m.values)

    def label(self, names: Iterable[str]) -> str:
        """`precision=bf16, batch=64`, for the parameters in `names`."""
        return ", ".join(f"{name}={word(self.parameters[name])}" for name in names)


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

    The chance that the median lies below the k-th smallest of n is that of fewer than k heads in n
    tosses. None where even smallest and largest do not reach `coverage`.
    """
    n = len(values)
    rank = _rank(n, (1.0 - coverage) / 2)
    if rank == 0:
        return None
    ordered = sorted(values)
    return Interval(ordered[rank - 1], ordered[n - rank], 1.0 - 2.0 * _fewer_heads(n, rank))


def _rank(n: int, tail: float) -> int:
    """The largest k with P(fewer than k heads in n tosses) <= tail; 0 where there is none."""
    low, high = 0, n // 2
    while low < high:
        middle = (low + high + 1) // 2
        if _fewer_heads(n, middle) <= tail:
            low = middle
        else:
            high = middle - 1
    return low


def _fewer_heads(n: int, k: int) -> float:
    """P(fewer than k heads in n fair tosses)."""
    if k <= 0:
        return 0.0
    if n <= 1000:
        return sum(math.comb(n, i) for i in range(k)) / (1 << n)
    from scipy.special import bdtr

    return float(bdtr(k - 1, n, 0.5))


def figure(metric: Metric) -> Figure:
    """What one row says of a metric that has samples.

    Repeated samples (no index): their median. Along an index: the last, as with accuracy per epoch,
    and never the best; of rates and costs the median after the first, which holds the warm-up.
    """
    if not metric.index:
        return Figure(_median(metric.values), "median")
    if metric.unit.endswith("/s") or metric.unit in _COST_UNITS:
        if len(metric.values) > 1:
            return Figure(_median(metric.values[1:]), f"median without the first {metric.index}")
        return Figure(metric.values[0], f"the first {metric.index}, warm-up included")
    return Figure(metric.values[-1], f"last {metric.index}")


def _median(values: Sequence[float]) -> float:
    summary = summarize(values)
    return math.nan if summary is None else summary.median


def configurations(rows: Iterable[Row]) -> tuple[Configuration, ...]:
    """Rows grouped by their parameters, in the order in which these first occur."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        key = tuple(sorted((name, repr(value)) for name, value in row.parameters.items()))
        groups.setdefault(key, []).append(row)
    return tuple(Configuration(group[0].parameters, tuple(group)) for group in groups.values())


def word(value: Any) -> str:
    """A parameter's value as a user types it: `true`, `fp32,bf16`."""
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(map(word, value)) if isinstance(value, list) else str(value)


def varying(found: Sequence[Configuration]) -> tuple[str, ...]:
    """The names of the parameters in which configurations differ."""
    names = dict.fromkeys(name for each in found for name in each.parameters)
    return tuple(n for n in names if len({repr(each.parameters.get(n)) for each in found}) > 1)


def ratio_interval(above: Sequence[float], below: Sequence[float]) -> Interval | None:
    """A bootstrap interval of median(above) / median(below), the same for the same samples.

    None where either side has fewer than five samples: so few cannot tell their own spread.
    """
    import numpy as np

    if min(len(above), len(below)) < _LEAST_FOR_BOOTSTRAP:
        return None
    if not all(map(math.isfinite, (*above, *below))) or 0.0 in below:
        return None
    chance = np.random.default_rng(0)
    tops = np.median(chance.choice(np.asarray(above), (_BOOTSTRAP, len(above))), axis=1)
    bottoms = np.median(chance.choice(np.asarray(below), (_BOOTSTRAP, len(below))), axis=1)
    low, high = np.quantile(tops / bottoms, [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2])
    return Interval(float(low), float(high), COVERAGE)
