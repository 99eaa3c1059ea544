"""The linear operator with a plain multiply-accumulate: reference, autograd and public function.

| name   | shape    | meaning                                                      |
|--------|----------|--------------------------------------------------------------|
| x      | [..., K] | inputs, any strides                                          |
| weight | [N, K]   | one row per output feature, any strides                      |
| bias   | [N]      | optional                                                     |
| result | [..., N] | result[..., n] = Σₖ x[..., k] · weight[n, k] + bias[n]       |

All are of one dtype (float32, float64, float16, bfloat16) on one device; K, N and the leading
dimensions may be 0.

Each result has one accumulator (float32; float64 for float64) that starts at zero and takes
k = 0, 1, … in that order, one fused multiply-add each; the bias is added last and the sum rounded
to the dtype. So the bits depend neither on threads, nor on the CPU's instruction set, nor on the
device. The gradients are the same sums: over n for x, over the leading dimensions for weight, and
over the leading dimensions with factor 1 for bias.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from narrowgauge_kernels.library import require

__all__ = ["LinearMac", "linear_mac", "linear_mac_example", "linear_mac_ref"]


def linear_mac_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """What `linear_mac` should give: summed in float64 and rounded once, to the dtype of x.

    Shapes as in the module's table. Differentiable by autograd. Give it float64 tensors to see the
    sum unrounded.
    """
    leading = x.shape[:-1]
    # Flattened by hand: torch 1.8's matmul fails on some empty batches.
    rows = x.double().reshape(leading.numel(), x.shape[-1])
    result = torch.mm(rows, weight.double().t())
    if bias is not None:
        result = result + bias.double()
    return result.reshape(*leading, weight.shape[0]).to(x.dtype)


class LinearMac(torch.autograd.Function):
    """`linear_mac` with its three gradients, each by the same compiled multiply-accumulate."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        require(x.device.type)
        ctx.save_for_backward(x, weight)
        return torch.ops.narrowgauge.linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        x, weight = ctx.saved_tensors
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        ops = torch.ops.narrowgauge
        return (
            ops.linear_grad_input(grad, weight) if wants_x else None,
            ops.linear_grad_weight(grad, x) if wants_weight else None,
            ops.linear_grad_bias(grad) if wants_bias else None,
        )


def linear_mac(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """The linear layer by our own multiply-accumulate, differentiable once.

    Shapes, dtypes and arithmetic as in the module's table. Raises RuntimeError naming both sides
    when shapes, dtypes or devices disagree, and KernelsNotBuiltError, with the command that builds,
    when there are no kernels for this torch and device.
    """
    return LinearMac.apply(x, weight, bias)


def linear_mac_example(generator: torch.Generator) -> Tuple[torch.Tensor, ...]:
    """Inputs for the self-check: float32, of a size that leaves remainders in every blocking."""
    shapes = ((5, 37), (11, 37), (11,))
    return tuple(torch.randn(shape, generator=generator) for shape in shapes)
