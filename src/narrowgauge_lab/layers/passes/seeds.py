"""Seeds of what is rounded stochastically, by the host or on the device.

A step that is captured in a CUDA graph has its numbers baked in, a seed among them: it would round
alike for ever. So such a step has one seed on the device, drawn anew before each replay, and each
of its roundings a place under it.
"""

from __future__ import annotations

import dataclasses
from typing import Union

import torch

__all__ = ["Seed", "SeedAt", "seed_under"]

#: Odd, so that places under a seed never meet; not the constant by which `wire` steps.
_STEP = 0xD1342543DE82EF95
_M64 = (1 << 64) - 1


def seed_under(base: int, place: int) -> int:
    """The seed at a place under another one, in the range of an int64."""
    return signed(base + _STEP * (place + 1))


def signed(number: int) -> int:
    """The int64 of the same 64 bits."""
    number &= _M64
    return number - (1 << 64) if number >> 63 else number


@dataclasses.dataclass(frozen=True)
class SeedAt:
    """`seed_under(base, place)`, which the kernel works out. `base`: int64 [1] on the device."""

    base: torch.Tensor
    place: int

    @property
    def offset(self) -> int:
        """What is added to the base, wrapping."""
        return signed(_STEP * (self.place + 1))

    def value(self) -> int:
        """The seed by itself; waits for the device."""
        return seed_under(int(self.base), self.place)


#: What a pass takes: a number of 64 bits, or where one will be.
Seed = Union[int, SeedAt]
