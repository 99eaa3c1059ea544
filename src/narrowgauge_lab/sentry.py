"""Stopping at the update that goes wrong, without asking the device about every one.

Asking stops a GPU's queue, so the answer is fetched while it goes on, and read some updates later.
Where the weights of that moment matter, the device itself holds them: it skips every update from
the first one on whose loss or gradient is not finite.
"""

from __future__ import annotations

from typing import Any, Optional

import torch

__all__ = ["Lookout", "Sentry"]

#: Updates between two looks on CUDA; a copy and an event take a few microseconds of the host.
_EVERY = 50
#: A gradient that overflows at every scale is not a matter of the scale. 65536 halved 26 times.
_LEAST_SCALE = 2.0**-10


class Lookout:
    """Reads a scalar of the device again and again: at once on a CPU, late and without waiting on
    CUDA."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._scalar = scalar
        self._cuda = scalar.device.type == "cuda"
        self._calls = 0
        self._seen = 0.0
        self._near: Optional[torch.Tensor] = None
        self._event: Any = None

    def look(self) -> float:
        """A value that it had some calls ago; 0 until there is one. Call it once an update."""
        if not self._cuda:
            return float(self._scalar)
        if self._event is not None and self._event.query():
            assert self._near is not None
            self._seen, self._event = float(self._near), None
        self._calls += 1
        if self._event is None and self._calls >= _EVERY:
            self._calls = 0
            if self._near is None:
                self._near = torch.zeros_like(self._scalar, device="cpu").pin_memory()
            self._near.copy_(self._scalar, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()
        return self._seen


class Sentry:
    """Finds the first update that must not happen, and holds the weights from then on.

    `first`: a float64 scalar on the device, the number of that update, counted from 1; 0 before.
    """

    def __init__(self, device: torch.device) -> None:
        self.first = torch.zeros((), dtype=torch.float64, device=device)
        #: Updates since `begin`: counted on the device, where a captured step runs no host code.
        self._updates = torch.zeros_like(self.first)

    def begin(self) -> None:
        """Count updates from 1 again."""
        self._updates.zero_()

    def judge(
        self,
        loss: torch.Tensor,
        gradient: torch.Tensor,
        scale: Optional[torch.Tensor] = None,
    ) -> torch.Tensor:
        """Whether to skip the next update: a boolean scalar on the device.

        Under a loss scale an overflown gradient is no accident, unless it is one at every scale.
        """
        bad = torch.isfinite(loss).logical_not()
        if scale is None:
            bad = bad | torch.isfinite(gradient).all().logical_not()
        else:
            bad = bad | (scale < _LEAST_SCALE)
        self._updates.add_(1.0)
        fresh = bad & (self.first == 0)
        self.first.copy_(torch.where(fresh, self._updates, self.first))
        return self.first > 0
