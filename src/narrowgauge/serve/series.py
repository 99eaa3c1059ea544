"""The values of a run's metrics by row, as they come, and which of them a page has room for."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

__all__ = ["SeriesStore"]

#: More metrics, and more values of one in a row, are not kept.
_MOST_METRICS, _MOST_VALUES = 32, 5_000


class SeriesStore:
    """Metric -> row -> its values so far."""

    def __init__(self) -> None:
        self._values: dict[str, dict[int, list[float]]] = {}
        #: When each metric came last, and the time before: the newest event has the highest number.
        self._came: dict[str, tuple[int, int]] = {}
        self._events = 0

    def add(self, name: str, row: int, values: Sequence[float]) -> None:
        if name not in self._values and len(self._values) >= _MOST_METRICS:
            return
        self._events += 1
        self._came[name] = (self._events, self._came.get(name, (0, 0))[0])
        kept = self._values.setdefault(name, {}).setdefault(row, [])
        kept.extend(values[: _MOST_VALUES - len(kept)])

    def chosen(self, first: Collection[str], most: int) -> dict[str, dict[int, list[float]]]:
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
            curve = len(rows) > 1 or any(len(values) > 1 for values in rows.values())
            return (not curve, self._came[name][0] < over, name not in first)

        return {name: drawn[name] for name in sorted(drawn, key=order)[:most]}


def _finite(rows: dict[int, list[float]]) -> dict[int, list[float]]:
    return {row: values for row, values in rows.items() if any(map(math.isfinite, values))}
