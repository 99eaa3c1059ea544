"""Fake quantisation by the fused operator: a tensor's values as its integers stand for them."""

from __future__ import annotations

from typing import Callable

import torch
from torch import nn

from narrowgauge_kernels import fake_quantize as kernels
from narrowgauge_lab.quant.parameters import QuantParams

__all__ = ["FakeQuantizer", "fake_quantize"]


def fake_quantize(x: torch.Tensor, params: QuantParams) -> torch.Tensor:
    """Quantise and dequantise `x` (float32, float64, float16 or bfloat16, on the device of params).

    Straight-through: the gradient passes where x was not saturated and is 0 where it was. NaN stays
    NaN. One compiled pass over memory each way; raises KernelsNotBuiltError where there is none.
    """
    return kernels.fake_quantize(
        x, params.scale, params.zero_point, params.axis, params.quant_min, params.quant_max
    )


class FakeQuantizer(nn.Module):
    """`fake_quantize` as a module: its scale and zero point are buffers and move with it."""

    def __init__(self, params: QuantParams) -> None:
        super().__init__()
        self.format = (params.bits, params.axis, params.symmetric, params.narrow)
        self.register_buffer("scale", params.scale.clone())
        self.register_buffer("zero_point", params.zero_point.clone())

    @property
    def params(self) -> QuantParams:
        return QuantParams(self.scale, self.zero_point, *self.format)

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], *rest: bool) -> FakeQuantizer:
        """Move with the model, but stay float32: half the digits of a scale would shift values."""
        exact = self.scale
        super()._apply(fn, *rest)
        self.scale = exact.to(self.scale.device)
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return fake_quantize(x, self.params)

    def extra_repr(self) -> str:
        bits, axis, symmetric, narrow = self.format
        kind = "symmetric" if symmetric else "affine"
        where = "per tensor" if axis is None else f"along axis {axis}"
        return f"{bits} bits, {kind}{', narrow' if narrow else ''}, {where}"
