"""Timing windows: synchronise first, at both ends, then read the clock."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Optional, Type

import torch

__all__ = ["MEASUREMENT_VERSION", "Window", "window"]

#: Rises whenever a change here makes new numbers incomparable with old ones.
MEASUREMENT_VERSION = 1


class Window:
    """The duration of a `with` block on a device, in `seconds`, read by `source`.

    On a GPU: CUDA events on the current stream, after the device was synchronised, so neither work
    queued before nor work still running after is missed. On a CPU: the monotonic clock.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.source = "cuda-event" if device.type == "cuda" else "monotonic"
        self.seconds = float("nan")
        self._started: Any = None

    def __enter__(self) -> Window:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            self._started = torch.cuda.Event(enable_timing=True)
            self._started.record()
        else:
            self._started = time.perf_counter()
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        if kind is not None:
            return
        if self.device.type == "cuda":
            ended = torch.cuda.Event(enable_timing=True)
            # Work on side streams belongs to the block too: wait for all of it before the mark.
            torch.cuda.synchronize(self.device)
            ended.record()
            ended.synchronize()
            self.seconds = self._started.elapsed_time(ended) / 1e3
        else:
            self.seconds = time.perf_counter() - self._started


def window(device: torch.device) -> Window:
    """A timing window on `device`, as a context manager; `seconds` is NaN until it has ended."""
    return Window(device)
