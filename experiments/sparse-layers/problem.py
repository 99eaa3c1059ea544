"""A layer's operands on a device, and what a peer of ours is."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Tuple

import torch

from narrowgauge_lab.networks.layer_shapes import LayerShape

from .looking import Call
from .maps import Layer
from .ours import DTYPES

__all__ = ["Peer", "Problem", "problem_of"]


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A layer's operands on the device, in the precision's dtype. `x` before its ReLU."""

    shape: LayerShape
    x: torch.Tensor
    weight: torch.Tensor
    precision: str

    @property
    def window(self) -> Tuple[int, int]:
        """Stride and padding."""
        return (self.shape.stride, self.shape.padding)


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """`call` gives [B, N, H', W'] in whichever order of memory. `waits`: it waits for the device
    itself, so that its launches cannot be hidden."""

    name: str
    call: Call
    about: Dict[str, Any] = dataclasses.field(default_factory=dict)
    waits: bool = False


def problem_of(layer: Layer, device: torch.device, precision: str) -> Problem:
    """The layer's operands where and as a row wants them."""
    dtype = DTYPES[precision]
    return Problem(
        layer.shape, layer.x.to(device, dtype), layer.weight.to(device, dtype), precision
    )
