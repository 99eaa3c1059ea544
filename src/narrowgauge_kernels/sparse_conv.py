"""ReLU and convolution that skip the zeros of the map: reference, autograd, public function.

| name   | shape          | meaning                                                             |
|--------|----------------|---------------------------------------------------------------------|
| x      | [B, C, H, W]   | the map, any strides                                                |
| weight | [F, C, kh, kw] | any strides                                                         |
| bias   | [F]            | optional, added last                                                |
| result | [B, F, H', W'] | channels_last where x is, else contiguous                           |

    result = relu_output(conv2d(relu_input(x), weight) + bias)

where `relu_input` and `relu_output` say whether the one and the other ReLU are there. No dilation
and no groups. On the CPU float32, any batch, kernel, stride and padding; on CUDA what
`narrowgauge_kernels.sparse` generates: float32 and float16, and the windows of its `Shape`.

A zero, of either sign, is not multiplied, and neither are pixels of the padding: an infinite weight
beside a zero gives no NaN here. NaN is not a zero, and ReLU keeps it, so it reaches every result
whose window it is in. The work is that of the nonzeros: nonzeros · kh · kw · F products at most.

CPU: per pixel of the map the list of its nonzero channels, and for every pixel of the result the
lists of its window times rows of the weight, vectorised over filters (after the algorithm of cuSNN,
L. Xiang et al., PACT 2022, whose lists are per channel and whose threads are the filters). Bits
depend neither on threads nor on the instruction set. Gradients are torch's own dense ones.
"""

from __future__ import annotations

from typing import Any, Callable, Optional, Tuple, Union

import torch
from torch.autograd.function import once_differentiable
from torch.nn import functional
from torch.nn.grad import conv2d_input, conv2d_weight

from narrowgauge_kernels.library import require

__all__ = [
    "SparseConv2dFunction",
    "packed",
    "run_packed",
    "sparse_conv2d",
    "sparse_conv2d_example",
    "sparse_conv2d_ref",
    "zeros_in",
]

#: One number for both directions, or (height, width).
Pair = Union[int, Tuple[int, int]]
_Two = Tuple[int, int]


def sparse_conv2d_ref(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    stride: Pair = 1,
    padding: Pair = 0,
    relu_input: bool = True,
    relu_output: bool = False,
) -> torch.Tensor:
    """What `sparse_conv2d` should give, by torch's dense operators in the dtype of x.

    Differentiable by autograd. Differs where a weight is infinite or NaN beside a zero.
    """
    given = torch.relu(x) if relu_input else x
    result = functional.conv2d(given, weight, bias, _pair(stride), _pair(padding))
    return torch.relu(result) if relu_output else result


class SparseConv2dFunction(torch.autograd.Function):
    """`sparse_conv2d` with its gradients. `run(x, weight, bias)` computes the result: whoever calls
    this knows by what, and may keep what it needs for that."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        stride: _Two,
        padding: _Two,
        relu_input: bool,
        relu_output: bool,
        run: Callable[..., torch.Tensor],
    ) -> torch.Tensor:
        result = run(x, weight, bias)
        ctx.save_for_backward(x, weight, result if relu_output else None)
        ctx.window = (stride, padding)
        ctx.relu_input = relu_input
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> Tuple[Optional[torch.Tensor], ...]:
        x, weight, result = ctx.saved_tensors
        if result is not None:
            grad = _passed(grad, result)
        by_x = by_weight = by_bias = None
        if ctx.needs_input_grad[0]:
            by_x = conv2d_input(x.shape, weight, grad, *ctx.window)
            by_x = _passed(by_x, x) if ctx.relu_input else by_x
        if ctx.needs_input_grad[1]:
            given = torch.relu(x) if ctx.relu_input else x
            by_weight = conv2d_weight(given, weight.shape, grad, *ctx.window)
        if ctx.needs_input_grad[2]:
            by_bias = grad.sum(dim=(0, 2, 3))
        return (by_x, by_weight, by_bias, None, None, None, None, None)


def sparse_conv2d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    stride: Pair = 1,
    padding: Pair = 0,
    relu_input: bool = True,
    relu_output: bool = False,
) -> torch.Tensor:
    """ReLU, convolution and bias of the nonzeros of x; shapes as in the module's table.

    Raises RuntimeError naming both sides when shapes, dtypes or devices disagree, and
    KernelsNotBuiltError, with the command that builds, when there are no kernels for this torch and
    device.
    """
    stride, padding = _pair(stride), _pair(padding)

    def run(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> torch.Tensor:
        if x.is_cuda:
            from narrowgauge_kernels.sparse_generated import run_generated

            return run_generated(x, weight, bias, stride, padding, relu_input, relu_output)
        return run_packed(x, weight, None, bias, stride, padding, relu_input, relu_output)

    return SparseConv2dFunction.apply(
        x, weight, bias, stride, padding, relu_input, relu_output, run
    )


def packed(weight: torch.Tensor) -> torch.Tensor:
    """The weight in the order in which the CPU reads it, one-dimensional: to be made once where a
    weight is used often. Raises as `sparse_conv2d`."""
    require(weight.device.type)
    return torch.ops.narrowgauge.sparse_pack(weight.detach())


def run_packed(
    x: torch.Tensor,
    weight: torch.Tensor,
    packed_weight: Optional[torch.Tensor],
    bias: Optional[torch.Tensor],
    stride: _Two,
    padding: _Two,
    relu_input: bool,
    relu_output: bool,
) -> torch.Tensor:
    """The result on the CPU, without a gradient. `packed_weight`: what `packed` gives for `weight`,
    of which then only the shape is read; None: it is packed in this call. Raises as
    `sparse_conv2d`."""
    require(x.device.type)
    return torch.ops.narrowgauge.sparse_conv2d(
        x, weight, bias, stride, padding, relu_input, relu_output, packed=packed_weight
    )


def zeros_in(x: torch.Tensor, relu: bool = True) -> int:
    """How many elements of a float32 tensor on the CPU are zeros, or with `relu` become zeros by
    it. NaN is none. Raises as `sparse_conv2d`."""
    require(x.device.type)
    return int(torch.ops.narrowgauge.sparse_zeros(x.detach(), relu))


def _passed(grad: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """`grad` where ReLU let `value` through; NaN it does."""
    return torch.where(value <= 0, torch.zeros_like(grad), grad)


def _pair(value: Pair) -> Tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[1]))


def sparse_conv2d_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: every remainder, both ReLUs, half of the map zeros."""
    x = torch.randn((2, 19, 9, 11), generator=generator)
    weight = torch.randn((21, 19, 3, 3), generator=generator) * 0.1
    return x, weight, torch.randn(21, generator=generator), 2, 1, True, True
