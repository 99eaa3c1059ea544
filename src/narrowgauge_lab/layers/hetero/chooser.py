"""Small copies: by the copy engine, or by a kernel that reads and writes page-locked memory itself.

The copy engine is faster at large ones and takes longer to start. Where they meet depends on the
card and the bus, so it is measured when a `mapped` bus opens, per size and direction.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Callable, Dict, List, Tuple

import torch

from narrowgauge_kernels import wire
from narrowgauge_lab.measure import samplers

__all__ = ["DIRECTIONS", "SIZES", "Choice", "Chooser"]

DIRECTIONS = ("up", "down")
#: Bytes: powers of two around where the two ways meet.
SIZES = tuple(1 << power for power in range(12, 23))
#: Copies in a row per timing, so that an event's 0.5 us are little; and timings, of which the
#: median counts.
_COPIES, _TIMINGS = 20, 9


@dataclasses.dataclass(frozen=True)
class Choice:
    """Seconds of one copy of `size` bytes, each way."""

    direction: str
    size: int
    copied: float
    mapped: float


class Chooser:
    """Picks by what was measured at the nearest size; beyond the largest by the largest."""

    def __init__(self, choices: Tuple[Choice, ...]) -> None:
        self.choices = choices
        self._mapped: Dict[str, List[bool]] = {
            direction: [
                each.mapped < each.copied
                for each in sorted(choices, key=lambda choice: choice.size)
                if each.direction == direction
            ]
            for direction in DIRECTIONS
        }
        self._first = min((each.size for each in choices), default=1).bit_length() - 1

    def maps(self, direction: str, size: int) -> bool:
        """Whether a copy of `size` bytes should be a kernel's."""
        found = self._mapped[direction]
        # The nearest power of two by ratio: from 1.5 times one on it is the next.
        at = (max(1, size * 4 // 3)).bit_length() - 1 - self._first
        return bool(found) and found[min(max(0, at), len(found) - 1)]

    def document(self) -> List[Dict[str, Any]]:
        """What was measured, for the record."""
        return [dataclasses.asdict(each) for each in self.choices]

    @classmethod
    def measured(cls, device: torch.device) -> Chooser:
        """Measure on a CUDA device; takes some 50 ms. Raises KernelsNotBuiltError."""
        found = []
        with torch.cuda.device(device):
            stream = torch.cuda.Stream(device)
            for size in SIZES:
                near = torch.empty(size // 4, pin_memory=True)
                far = torch.empty(size // 4, device=device)
                for direction, into, source in (("up", far, near), ("down", near, far)):
                    copied = _seconds(stream, _queued(into, source))
                    mapped = _seconds(stream, _kernel(into, source))
                    found.append(Choice(direction, size, copied, mapped))
        return cls(tuple(found))


def _queued(into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        into.copy_(source, non_blocking=True)

    return run


def _kernel(into: torch.Tensor, source: torch.Tensor) -> Callable[[], None]:
    def run() -> None:
        wire.mapped_copy(into, source)

    return run


def _seconds(stream: Any, run: Callable[[], None]) -> float:
    """Of one run among others in a row on a stream, all queued before the first begins: the median
    of some timings, the first left out."""
    taken = []
    with torch.cuda.stream(stream):
        # A kernel is loaded at its first launch, which may wait for the device, and that is held.
        run()
        stream.synchronize()
        for _ in range(_TIMINGS + 1):
            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            with samplers.hold(stream.device):
                began.record(stream)
                for _ in range(_COPIES):
                    run()
                ended.record(stream)
            ended.synchronize()
            taken.append(began.elapsed_time(ended) / 1e3 / _COPIES)
    return statistics.median(taken[1:])
