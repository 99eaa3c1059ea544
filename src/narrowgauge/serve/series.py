"""The values of a run's metrics by row, as they come, and which of them a page has room for."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

__all__ = ["Series", "SeriesStore"]

#: More metrics are not kept, and no more points of one in a row than a picture has room for.
_MOST_METRICS, _MOST_POINTS = 32, 256


class Series:
    """The values of one metric in one row, thinned evenly however many come.

    `count`, `low`, `high` and `newest` are of all values; low and high of the finite ones, infinite
    the other way round where none is.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self.count, self.newest = 0, math.nan
        self.low, self.high = math.inf, -math.inf
        self._kept: list[float] = []  # every so many-th value from the first on
        self._every = 1
        self.extend(values)

    def extend(self, values: Iterable[float]) -> None:
        """Add values that came after those before."""
        for value in values:
            if self.count % self._every == 0:
                self._kept.append(value)
            self.count, self.newest = self.count + 1, value
            if math.isfinite(value):
                self.low, self.high = min(self.low, value), max(self.high, value)
            if len(self._kept) == _MOST_POINTS:
                del self._kept[1::2]
                self._every *= 2

    def points(self) -> list[tuple[int, float]]:
        """Places (from 0) and finite values, evenly spaced; the newest value is the last."""
        places = dict(zip(range(0, self.count, self._every), self._kept, strict=True))
        if self.count:
            places[self.count - 1] = self.newest
        return [(place, value) for place, value in places.items() if math.isfinite(value)]


class SeriesStore:
    """Metric -> row -> its values so far."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, Series]] = {}
        #: When each metric came last, and the time before: the newest event has the highest number.
        self._came: dict[str, tuple[int, int]] = {}
        self._events = 0

    def add(self, name: str, row: int, values: Iterable[float]) -> None:
        if name not in self._values and len(self._values) >= _MOST_METRICS:
            return
        self._events += 1
        self._came[name] = (self._events, self._came.get(name, (0, 0))[0])
        self._values.setdefault(name, {}).setdefault(row, Series()).extend(values)

    def chosen(self, first: Collection[str], most: int) -> dict[str, dict[int, Series]]:
        """At most so many metrics with the rows that have a finite value.

        Those that make a curve come before single values, those that still come before those of a
        stretch of work that is over (a trunk's training), and `first` before others.
        """
        # What another metric has come twice after is over: all of a stretch come once an epoch.
        over = max((before for _, before in self._came.values()), default=0)
        drawn = {
            name: rows for name, all_rows in self._values.items() if (rows := _finite(all_rows))
        }

        def order(name: str) -> tuple[bool, bool, bool]:
            rows = drawn[name]
            curve = len(rows) > 1 or any(series.count > 1 for series in rows.values())
            return (not curve, self._came[name][0] < over, name not in first)

        return {name: drawn[name] for name in sorted(drawn, key=order)[:most]}


def _finite(rows: dict[int, Series]) -> dict[int, Series]:
    return {row: series for row, series in rows.items() if series.low <= series.high}
