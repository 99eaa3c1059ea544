"""Seeds for the passes of one model."""

from __future__ import annotations

import contextlib
from typing import Iterator, Optional

import torch

from narrowgauge_lab.layers.passes.seeds import Seed, SeedAt, seed_under

__all__ = ["Draws", "drawn_seed"]


def drawn_seed() -> int:
    """From torch's generator of the CPU, whose state checkpoints keep."""
    return int(torch.randint(0, 1 << 62, (1,)))


class Draws:
    """What passes beside everything else are seeded by.

    Each by a draw of its own, until a training announces its steps (`begin`): from then on by its
    place in the step, under one seed drawn for that. So a step takes one draw however it is run:
    launched, or captured and replayed, where nothing of the host runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._base: Optional[int] = None
        self._far: Optional[torch.Tensor] = None
        self._place = 0

    def begin(self) -> None:
        """The next step begins. Outside of what is captured."""
        self._base, self._place = drawn_seed(), 0
        if self._device.type == "cuda":
            if self._far is None:
                self._far = torch.zeros(1, dtype=torch.int64, device=self._device)
            self._far.fill_(self._base)

    def next(self, *, on_device: bool) -> Seed:
        """A seed; `on_device`: for a kernel that works it out there, where steps are announced."""
        if self._base is None:
            return drawn_seed()
        place, self._place = self._place, self._place + 1
        if on_device and self._far is not None:
            return SeedAt(self._far, place)
        return seed_under(self._base, place)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """What runs within is no step: places of steps do not depend on it, nor it on them."""
        kept, self._base = (self._base, self._place), None
        try:
            yield
        finally:
            self._base, self._place = kept
