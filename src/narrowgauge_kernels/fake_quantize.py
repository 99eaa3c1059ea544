"""Fake quantisation: reference, autograd with the straight-through gradient, and public function.

| name       | shape          | meaning                                                           |
|------------|----------------|-------------------------------------------------------------------|
| x          | any            | float32, float64, float16 or bfloat16; any strides                |
| scale      | [] or [C]      | float32, positive, normal; one per index of dimension `axis`      |
| zero_point | like scale     | int32, within [quant_min, quant_max]                              |
| axis       | –              | None: one scale for the whole tensor                              |
| result     | of x           | (q - zero_point) · scale                                          |

with q = round_half_even(x / scale) + zero_point, saturated at quant_min and quant_max. x / scale is
x times the rounded reciprocal, in float32 (float64 for float64), as in torch's own operators, whose
bits these are for finite float32. NaN stays NaN; no result is -0. A tensor without gaps keeps its
strides, channels_last among them; one with gaps is gathered first.

The gradient by x is the incoming one where q did not saturate, and 0 where it did; NaN does not
saturate. scale and zero_point get none. The backward pass reads x again and keeps no mask.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from narrowgauge_kernels.library import require

__all__ = ["FakeQuantize", "fake_quantize", "fake_quantize_example", "fake_quantize_ref"]


def fake_quantize_ref(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: Optional[int],
    quant_min: int,
    quant_max: int,
) -> torch.Tensor:
    """What `fake_quantize` should give: in float64 and rounded once, to the dtype of x.

    Differentiable by autograd, with the same straight-through gradient. Where x / scale is next to
    a tie, float32 and float64 may fall on different sides of it.
    """
    if axis is not None:
        shape = [1] * x.dim()
        shape[axis] = -1
        scale, zero_point = scale.reshape(shape), zero_point.reshape(shape)
    wide, step, zero = x.double(), scale.detach().double(), zero_point.double()
    rounded = torch.round(wide.detach() / step) + zero
    saturated = (rounded < quant_min) | (rounded > quant_max)
    # max and min of torch 1.8 do not all keep NaN; comparisons do.
    kept = torch.where(rounded < quant_min, torch.full_like(rounded, quant_min), rounded)
    kept = torch.where(rounded > quant_max, torch.full_like(rounded, quant_max), kept)
    passing = torch.where(saturated, torch.zeros_like(wide), wide)
    return ((kept - zero) * step + (passing - passing.detach())).to(x.dtype)


class FakeQuantize(torch.autograd.Function):
    """`fake_quantize` with its gradient, by compiled code both ways."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor,
        axis: Optional[int],
        quant_min: int,
        quant_max: int,
    ) -> torch.Tensor:
        require(x.device.type)
        ctx.save_for_backward(x, scale, zero_point)
        ctx.format = (axis, quant_min, quant_max)
        return torch.ops.narrowgauge.fake_quantize(x, scale, zero_point, axis, quant_min, quant_max)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        x, scale, zero_point = ctx.saved_tensors
        gradient = torch.ops.narrowgauge.fake_quantize_grad(grad, x, scale, zero_point, *ctx.format)
        return (gradient, None, None, None, None, None)


def fake_quantize(
    x: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    axis: Optional[int],
    quant_min: int,
    quant_max: int,
) -> torch.Tensor:
    """Round x to the values that integers from quant_min to quant_max stand for.

    Shapes, dtypes and arithmetic as in the module's table. Raises RuntimeError naming both sides
    when shapes, dtypes or devices disagree, and KernelsNotBuiltError, with the command that builds,
    when there are no kernels for this torch and device.
    """
    return FakeQuantize.apply(x, scale, zero_point, axis, quant_min, quant_max)


def fake_quantize_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: per channel, some saturated, none next to a tie, where a rounding
    error may rightly cost a whole step."""
    channels, count = 5, 37
    scale = torch.rand(channels, generator=generator) * 0.1 + 0.01
    zero_point = torch.arange(channels, dtype=torch.int32) - 2
    steps = torch.randint(-200, 200, (channels, count), generator=generator)
    offsets = torch.rand((channels, count), generator=generator) * 0.8 - 0.4
    return (steps + offsets) * scale[:, None], scale, zero_point, 0, -128, 127
