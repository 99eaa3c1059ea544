"""Batch normalisation of training on a CPU, with what often follows it: reference, autograd, and
public function.

| name     | shape       | meaning                                                             |
|----------|-------------|---------------------------------------------------------------------|
| x        | [N, C, ...] | float32, at least one value for each channel; any strides           |
| weight   | [C] or None | float32; None: 1                                                    |
| bias     | [C] or None | float32; None: 0                                                    |
| eps      | –           | added to the variance                                               |
| residual | of x, None  | float32; added to what is normalised                                |
| rectify  | –           | whether what is negative then becomes 0; NaN stays                  |
| y        | of x        | (x - mean) / sqrt(variance + eps) · weight + bias, contiguous        |
| mean     | [C]         | of the values of the channel, N and ... alike                       |
| variance | [C]         | the biased one, by the number of values                             |

What `torch.nn.functional.batch_norm(training=True)` computes, an addition and `relu`, in one pass
over the threads each way where torch makes two or three for the first alone, and with sums in
float32 of some 4096 values where torch makes them in float64. Results have the same bits on every
instruction set. NaN and infinity make their channel NaN. Gradients are by x, weight, bias and
residual, once: mean and variance are for running averages.
"""

from __future__ import annotations

from typing import Any, Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from narrowgauge_kernels.library import require

__all__ = ["DEVICES", "BatchNorm", "batch_norm", "batch_norm_example", "batch_norm_ref"]

#: Where there are kernels: a GPU has torch's own, which are not slow.
DEVICES = ("cpu",)

Result = Tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def batch_norm_ref(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    residual: Optional[torch.Tensor] = None,
    rectify: bool = False,
) -> Result:
    """What `batch_norm` should give: in float64 and rounded once, to the dtype of x.
    Differentiable by autograd."""
    wide = x.double()
    others = [number for number in range(x.dim()) if number != 1]
    shape = [1, -1] + [1] * (x.dim() - 2)
    mean = wide.mean(others)
    variance = (wide - mean.reshape(shape)).pow(2).mean(others)
    y = (wide - mean.reshape(shape)) / torch.sqrt(variance + eps).reshape(shape)
    if weight is not None:
        y = y * weight.double().reshape(shape)
    if bias is not None:
        y = y + bias.double().reshape(shape)
    if residual is not None:
        y = y + residual.double()
    y = torch.relu(y) if rectify else y
    return y.to(x.dtype), mean.detach().to(x.dtype), variance.detach().to(x.dtype)


class BatchNorm(torch.autograd.Function):
    """`batch_norm` with its gradients, by compiled code both ways."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: Optional[torch.Tensor],
        bias: Optional[torch.Tensor],
        eps: float,
        residual: Optional[torch.Tensor],
        rectify: bool,
    ) -> Result:
        require(x.device.type)
        y, mean, variance = torch.ops.narrowgauge.batch_norm(
            x, weight, bias, eps, residual, rectify
        )
        ctx.save_for_backward(x, weight, mean, variance, y if rectify else None)
        ctx.eps = eps
        ctx.mark_non_differentiable(mean, variance)
        return y, mean, variance

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> Tuple[Any, ...]:
        x, weight, mean, variance, rectified = ctx.saved_tensors
        wanted = ctx.needs_input_grad
        keep = bool(wanted[4]) and rectified is not None
        *found, passed = torch.ops.narrowgauge.batch_norm_grad(
            grad, x, weight, mean, variance, ctx.eps, rectified, keep
        )
        first = [each if needed else None for each, needed in zip(found, wanted)]
        return (*first, None, (passed if keep else grad) if wanted[4] else None, None)


def batch_norm(
    x: torch.Tensor,
    weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    eps: float,
    residual: Optional[torch.Tensor] = None,
    rectify: bool = False,
) -> Result:
    """y, mean and variance, as in the module's table.

    Raises RuntimeError naming what shapes, dtypes or devices do not fit, and KernelsNotBuiltError,
    with the command that builds, when there are no kernels for this torch.
    """
    result: Result = BatchNorm.apply(x, weight, bias, eps, residual, rectify)
    return result


def batch_norm_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: channels of several means, with a part of a vector left over."""
    x = torch.randn((3, 5, 7, 11), generator=generator)
    x = x + torch.arange(5.0).reshape(5, 1, 1)
    weight = torch.rand(5, generator=generator) + 0.5
    bias, residual = torch.randn(5, generator=generator), torch.randn(x.shape, generator=generator)
    return x, weight, bias, 1e-5, residual, True
