"""Places for buffers in one block of memory, by when they live: freed places are used again.

Reuse keeps what a step wrote within reach of the cache for the step that reads it.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Sequence, Tuple

__all__ = ["Need", "assign"]

#: Addresses are multiples of this many bytes.
ALIGNMENT = 256


@dataclasses.dataclass(frozen=True)
class Need:
    """A buffer of `size` bytes that step `first` writes and step `last` is the last to read."""

    name: str
    size: int
    first: int
    last: int


def assign(needs: Sequence[Need]) -> Tuple[Dict[str, int], int]:
    """An offset per buffer and the size of the whole: first fit, in order of first use.

    Buffers that live at the same step never overlap.
    """
    placed: List[Tuple[Need, int]] = []
    for need in sorted(needs, key=lambda each: (each.first, -each.size)):
        taken = sorted(
            (offset, offset + other.size)
            for other, offset in placed
            if other.last >= need.first and need.last >= other.first
        )
        place = 0
        for begin, end in taken:
            if begin - place >= need.size:
                break
            place = max(place, -(-end // ALIGNMENT) * ALIGNMENT)
        placed.append((need, place))
    total = max((offset + need.size for need, offset in placed), default=0)
    return {need.name: offset for need, offset in placed}, total
