"""The numbers that kernels multiply and bound by, in the units of what is stored."""

from __future__ import annotations

import dataclasses
from typing import Mapping, Optional, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.memory import Memory
from narrowgauge_lab.engines.own.gpu.packing import PackedWeight
from narrowgauge_lab.engines.own.gpu.steps import ACTIVATIONS, Prologue

__all__ = ["Before", "Epilogue", "Numbers"]


@dataclasses.dataclass(frozen=True)
class Before:
    """What becomes of x as it is read: clamp(x · scale[c] + shift[c], low, high)."""

    scale: torch.Tensor
    shift: torch.Tensor
    low: float
    high: float


@dataclasses.dataclass(frozen=True)
class Epilogue:
    """What becomes of a sum: clamp(sum · scale[k] + bias[k], low, high)."""

    scale: torch.Tensor
    bias: torch.Tensor
    low: float
    high: float


class Numbers:
    """`scales`: what one unit of each stored value is worth, empty where the format stores values
    as they are. `affines`: (s, b) of each batch norm that is left, by module."""

    def __init__(
        self,
        memory: Memory,
        affines: Mapping[str, Tuple[torch.Tensor, torch.Tensor]],
        scales: Mapping[str, float],
    ) -> None:
        self._memory, self._affines, self._scales = memory, affines, scales
        self.nothing = torch.zeros(1, dtype=torch.float32, device=memory.device)

    def scale(self, name: str) -> float:
        """What one unit of a stored value is worth; "" is float32."""
        return self._scales[name] if self._memory.form.scaled and name else 1.0

    def before(self, prologue: Optional[Prologue], source: str, *, real: bool = False) -> Before:
        """Of a prologue, into the format's units, or into real ones."""
        if prologue is None:
            return Before(self.nothing, self.nothing, 0.0, 0.0)
        if prologue.module:
            scale, shift = self._affines[prologue.module]
        else:
            channels = self._memory.place(source).channels
            scale = torch.ones(channels, dtype=torch.float32, device=self._memory.device)
            shift = torch.zeros_like(scale)
        unit = 1.0 if real else self.scale(prologue.value)
        low, high = ACTIVATIONS[prologue.activation]
        return Before(scale * (self.scale(source) / unit), shift / unit, low / unit, high / unit)

    def epilogue(
        self,
        packed: PackedWeight,
        activation: str,
        source: str,
        target: str,
        prologue: Optional[Prologue] = None,
    ) -> Epilogue:
        """Of a product with these weights; `target` "" is float32."""
        unit = self.scale(target)
        read = self.scale(prologue.value if prologue is not None else source)
        low, high = (bound / unit for bound in ACTIVATIONS[activation])
        return Epilogue(packed.scale * (read / unit), packed.bias / unit, low, high)
