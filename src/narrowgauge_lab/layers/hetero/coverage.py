"""Stages that overlap, against the time that passed."""

from __future__ import annotations

import dataclasses
from typing import Sequence

from narrowgauge_lab.layers.hetero.ledger import Interval

__all__ = ["Coverage", "coverage"]


@dataclasses.dataclass(frozen=True)
class Coverage:
    """Stages against a window of the host's clock, in seconds.

    `union`: some stage ran; `idle`: within the window none did. They add up to `wall` where the
    clocks agree, and to more by what they put outside.
    """

    wall: float
    union: float
    idle: float

    @property
    def ratio(self) -> float:
        """1 where union and idle make up the wall time."""
        return (self.union + self.idle) / self.wall


def coverage(
    intervals: Sequence[Interval], start: float, end: float, margin: float = 0.0
) -> Coverage:
    """Stages against the window from `start` to `end`; all of them belong to it.

    `margin`: seconds by which a stage may lie outside and be cut, the clocks being that uncertain.
    """
    spans = sorted((each.start, each.end) for each in intervals)
    union, idle, seen = 0.0, 0.0, start
    reach = min((first for first, _ in spans), default=start)
    for first, last in spans:
        if start - margin <= first < start:
            first = start
        if end < last <= end + margin:
            last = end
        union += max(0.0, last - max(first, reach))
        reach = max(reach, last)
        idle += max(0.0, min(first, end) - seen)
        seen = max(seen, last)
    idle += max(0.0, end - seen)
    return Coverage(end - start, union, idle)
