"""What one row says of one metric: which statistic of its samples a line or a table shows.

In the contract because the lab's last lines and the host's tables must show the same number.
Everything else that is statistics is the host's.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Sequence, Tuple

if TYPE_CHECKING:
    from narrowgauge_contract.outcome import Metric

__all__ = ["COST_UNITS", "Figure", "figure", "fitting", "is_rate", "is_time", "median"]

_TIME_UNITS = ("s", "ms", "us")
#: Largest first, and how many of each are a second.
_OF_A_SECOND = (("s", 1.0), ("ms", 1e3), ("µs", 1e6), ("ns", 1e9))
#: Units of what a user waits for or pays: the first of a series holds the warm-up.
COST_UNITS = (*_TIME_UNITS, "J", "W")


@dataclasses.dataclass(frozen=True)
class Figure:
    """One row's figure of a metric; `how` says which statistic of its samples it is."""

    value: float
    how: str


def figure(metric: Metric) -> Figure:
    """What one row says of a metric that has samples.

    Repeated samples (no index): their median. Along an index: the last, as with accuracy per epoch,
    and never the best; of rates and costs the median after the first, which holds the warm-up.
    """
    if not metric.index:
        return Figure(median(metric.values), "median")
    if is_rate(metric.unit) or metric.unit in COST_UNITS:
        if len(metric.values) > 1:
            return Figure(median(metric.values[1:]), f"median without the first {metric.index}")
        return Figure(metric.values[0], f"the first {metric.index}, warm-up included")
    return Figure(metric.values[-1], f"last {metric.index}")


def median(values: Sequence[float]) -> float:
    """The median; NaN where there are no values, or one of them is NaN."""
    if not values or any(map(math.isnan, values)):
        return math.nan
    return statistics.median(values)


def is_rate(unit: str) -> bool:
    """Whether more of it is faster: `image/s`."""
    return unit.endswith("/s")


def is_time(unit: str) -> bool:
    """Whether it comes from a clock, so that the clock's noise is in it: times and rates."""
    return unit in _TIME_UNITS or is_rate(unit)


def fitting(value: float, unit: str) -> Tuple[float, str]:
    """How many of the unit in which to show it one of `unit` is, and that unit: of seconds the
    largest of which `value` has a tenth or more, of everything else the unit that it has."""
    if unit != "s" or not value:
        return 1.0, unit
    fits = (each for each in _OF_A_SECOND if not abs(value) * each[1] < 0.1)
    name, factor = next(fits, _OF_A_SECOND[-1])
    return factor, name
