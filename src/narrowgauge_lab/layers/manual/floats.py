"""A layer whose products are of float32 values, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.mac import Mac
from narrowgauge_lab.layers.manual import float_slopes, gradients, kernels
from narrowgauge_lab.layers.passes import Problem

__all__ = ["FloatLayer"]

Saved = Sequence[Optional[torch.Tensor]]


@dataclasses.dataclass(frozen=True, eq=False)
class FloatLayer:
    """`local`: whether gradients are the policy's own slopes."""

    problem: Problem
    mac: Mac
    local: bool = False

    def forward(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        wanted: Tuple[bool, bool],
    ) -> Tuple[torch.Tensor, Saved]:
        """The result, and what `backward` needs for the gradients by input and weight that are
        `wanted`."""
        result = kernels.float_layer(self.problem, x, weight, bias, self.mac)
        by_input, by_weight = wanted
        keeps_x = by_weight or (self.local and by_input)
        keeps_weight = by_input or (self.local and by_weight)
        return result, (x if keeps_x else None, weight if keeps_weight else None)

    def backward(
        self,
        grad: torch.Tensor,
        saved: Saved,
        wanted: Tuple[bool, bool],
        shapes: Tuple[Sequence[int], Sequence[int]],
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The gradients by input and weight, of `shapes`, that are wanted."""
        x, weight = saved
        if self.local:
            assert x is not None
            assert weight is not None
            return float_slopes.gradients(self.problem, self.mac, grad, x, weight, wanted)
        by_input = by_weight = None
        if wanted[0]:
            assert weight is not None
            by_input = gradients.by_input(self.problem, grad, weight, shapes[0])
        if wanted[1]:
            assert x is not None
            by_weight = gradients.by_weight(self.problem, grad, x, shapes[1])
        return by_input, by_weight
