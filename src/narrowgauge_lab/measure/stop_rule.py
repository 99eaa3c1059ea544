"""When a measurement has enough samples: the interval of its median is narrow enough."""

from __future__ import annotations

import math
from typing import Iterable, List

from narrowgauge_contract.order_statistics import median_rank

__all__ = ["StopRule"]

#: The interval is worked out anew when there are so many more samples; a wait of 2 % costs less
#: than looking at every sample, and fewer looks mean fewer chances to stop by luck.
_GROWTH = 1.02


class StopRule:
    """Whether the 95 % order-statistic interval of the median is narrower than a share of it.

    Stopping by looking at the samples makes the true coverage a little less than 95 %; statistics
    on the host are computed from all samples anyway.
    """

    def __init__(self, interval: float, least_samples: int) -> None:
        self._interval = interval
        self._ordered: List[float] = []
        self._due = max(1, least_samples)

    def add(self, values: Iterable[float]) -> None:
        """Take more samples, in any order."""
        self._ordered += values

    def is_met(self) -> bool:
        """True only if all samples so far, and at least `least_samples`, give the interval."""
        if len(self._ordered) < self._due:
            return False
        self._due = math.ceil(len(self._ordered) * _GROWTH)
        return self.width() < self._interval

    def width(self) -> float:
        """The whole width of the interval, as a share of the median; infinity where there is
        none."""
        # Sorted but for what came last, which is what this sort is quick at.
        self._ordered.sort()
        n = len(self._ordered)
        rank = median_rank(n)
        if rank == 0:
            return math.inf
        median = (self._ordered[(n - 1) // 2] + self._ordered[n // 2]) / 2.0
        return (self._ordered[n - rank] - self._ordered[rank - 1]) / median
