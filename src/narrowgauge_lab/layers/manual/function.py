"""The autograd function of a manual layer."""

from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch.autograd.function import once_differentiable

from narrowgauge_lab.layers.manual.codes import CodeLayer
from narrowgauge_lab.layers.manual.floats import FloatLayer
from narrowgauge_lab.layers.manual.gradients import over_channels

__all__ = ["run"]

Layer = Union[CodeLayer, FloatLayer]


def run(
    layer: Layer, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    """The layer's result: x [B, C, H, W] for a convolution, [B, C] for a linear layer. Float32 on
    one device; any part may be empty. Differentiable once."""
    tensors = (x, weight, bias)
    if torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors):
        result: torch.Tensor = _Manual.apply(x, weight, bias, layer)
        return result
    with torch.no_grad():
        return _forward(layer, x, weight, bias, (False, False))[0]


class _Manual(torch.autograd.Function):
    """Keeps what `layer` asks for: codes of a byte under 8-bit policies."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        layer: Layer,
    ) -> torch.Tensor:
        wanted = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        result, saved = _forward(layer, x, weight, bias, wanted)
        ctx.layer, ctx.shapes = layer, (tuple(x.shape), tuple(weight.shape))
        ctx.save_for_backward(*saved)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        (grad,) = grads
        by_x, by_weight, by_bias, _ = ctx.needs_input_grad
        found: Tuple[Optional[torch.Tensor], Optional[torch.Tensor]] = (None, None)
        if ctx.saved_tensors and (by_x or by_weight):
            layer, saved = ctx.layer, ctx.saved_tensors
            found = layer.backward(grad, saved, (by_x, by_weight), ctx.shapes)
        elif by_x or by_weight:
            # Of an empty layer nothing was kept.
            wanted = zip((by_x, by_weight), ctx.shapes)
            zeros = [grad.new_zeros(shape) if by else None for by, shape in wanted]
            found = (zeros[0], zeros[1])
        return (*found, over_channels(grad) if by_bias else None, None)


def _forward(
    layer: Layer,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    wanted: Tuple[bool, bool],
) -> Tuple[torch.Tensor, Tuple[Optional[torch.Tensor], ...]]:
    shape = layer.problem.output_shape(x.shape, weight.shape)
    if x.numel() and weight.numel():
        result, saved = layer.forward(x, weight, bias, wanted)
        return result, tuple(saved)
    result = x.new_zeros(shape)
    if bias is not None:
        result += bias.reshape(-1, *[1] * (len(shape) - 2))
    return result, ()
