"""8-bit passes as matrix products, of images whose windows are written out (im2col).

Sums of int8 products are exact, in whatever way they are made: by `torch._int_mm` in int32, in
slices that cannot overflow; or in float64, of whose 53 bits they need few. fp8 is summed by
`torch._scaled_mm` as the card does it.
"""

from __future__ import annotations

from typing import Callable, Dict, Optional, Sequence, Tuple

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.passes.eight_bit import EightBitPasses
from narrowgauge_lab.layers.passes.problem import Problem, Quantised
from narrowgauge_lab.layers.passes.quantise import folded

__all__ = ["DEEPEST", "MULTIPLY", "MatrixPasses"]

#: Products of int8 that surely fit into an int32 sum: 131,072 · 127² < 2^31.
DEEPEST = 1 << 17
#: What CUDA's libraries want of the sides of 8-bit matrices: multiples of this.
_STEP = 16
#: cuBLAS takes no int8 matrix of fewer rows.
_LEAST_ROWS = 32

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class MatrixPasses(EightBitPasses):
    """`product` names what multiplies, one of MULTIPLY."""

    def __init__(
        self,
        precision: str,
        device: torch.device,
        problem: Problem,
        result_dtype: Optional[torch.dtype] = None,
        *,
        product: str,
    ) -> None:
        super().__init__(precision, device, problem, result_dtype)
        self.product = product
        self._multiply = MULTIPLY[product]

    def _forward(
        self, x: Quantised, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        problem = self.problem
        kernel, scale = folded(weight, x.scale, problem.groups, self.inputs, transposed=False)
        shape = problem.output_shape(x.shape, weight.shape)
        sums = self._products(_windows(x.values, problem, weight.shape, shape), kernel)
        result = sums * scale if bias is None else sums * scale + bias.detach().float()
        return _image(result, shape).to(self.result_dtype)

    def _input_grad(
        self, grad: Quantised, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor:
        """The gradient spread out by the stride, convolved with the weight turned around."""
        problem = self.problem
        kernel, scale = folded(weight, grad.scale, problem.groups, self.inputs, transposed=True)
        if problem.kind == "linear":
            return (self._products([grad.values], kernel) * scale).to(self.result_dtype)
        turned = (weight.shape[1] * problem.groups, weight.shape[0] // problem.groups)
        windows = _windows(
            _spread(grad.values, problem, weight.shape, input_shape),
            Problem("conv2d", dilation=problem.dilation, groups=problem.groups),
            (*turned, *weight.shape[2:]),
            tuple(input_shape),
        )
        sums = self._products(windows, _bytes(kernel).flip(-1).view(kernel.dtype))
        return _image(sums * scale, tuple(input_shape)).to(self.result_dtype)

    def _weight_grad(
        self, grad: Quantised, x: Quantised, weight_shape: Sequence[int]
    ) -> torch.Tensor:
        problem = self.problem
        windows = _windows(x.values, problem, weight_shape, grad.shape)
        above = _rows(grad.values).chunk(problem.groups, dim=1)
        parts = [self._multiply(one.t(), many) for one, many in zip(above, windows)]
        sums = torch.stack(parts).view(problem.groups, parts[0].shape[0], weight_shape[1], -1)
        outside = grad.scale.view(problem.groups, -1, 1, 1)
        inside = x.scale.view(problem.groups, 1, -1, 1)
        return (sums.float() * outside * inside).reshape(tuple(weight_shape))

    def _products(self, windows: Sequence[torch.Tensor], kernel: torch.Tensor) -> torch.Tensor:
        """[P, all results] of each group's windows [P, N] and kernel [G, results, C, R · S]."""
        rows = kernel.reshape(kernel.shape[0], kernel.shape[1], -1)
        pairs = zip(windows, rows.unbind(0))
        return torch.cat([self._multiply(many, one.t()).float() for many, one in pairs], 1)


def _windows(
    values: torch.Tensor, problem: Problem, weight_shape: Sequence[int], result: Sequence[int]
) -> Sequence[torch.Tensor]:
    """Of each group [B · Ho · Wo, C / G · R · S]: what each pixel of `result` is summed from."""
    if problem.kind == "linear":
        return [values]
    padded = _padded(values, problem.padding)
    batch, channels = padded.shape[:2]
    b, c, h, w = padded.stride()
    (down, right), (step_h, step_w) = problem.stride, problem.dilation
    views = padded.as_strided(
        (batch, result[2], result[3], channels, weight_shape[2], weight_shape[3]),
        (b, h * down, w * right, c, h * step_h, w * step_w),
    )
    pixels = batch * result[2] * result[3]
    return [part.reshape(pixels, -1) for part in views.chunk(problem.groups, dim=3)]


def _padded(values: torch.Tensor, padding: Tuple[int, int]) -> torch.Tensor:
    """With zeros around; zeros of all 8-bit formats are bytes of zeros."""
    if padding == (0, 0):
        return values
    batch, channels, height, width = values.shape
    high, wide = padding
    larger = _zeros(values, (batch, channels, height + 2 * high, width + 2 * wide))
    _bytes(larger)[:, :, high : high + height, wide : wide + width] = _bytes(values)
    return larger


def _spread(
    values: torch.Tensor, problem: Problem, weight_shape: Sequence[int], image: Sequence[int]
) -> torch.Tensor:
    """The gradient with stride - 1 zeros between its pixels, where the window reaches all of them:
    on each side what the window has beyond the padding."""
    sizes, first, places = [], [], []
    for at in range(2):
        reach = problem.dilation[at] * (weight_shape[2 + at] - 1)
        sizes.append(image[2 + at] + reach)
        first.append(reach - problem.padding[at])
    larger = _zeros(values, (*values.shape[:2], sizes[0], sizes[1]))
    kept = []
    for at in range(2):
        stride, count = problem.stride[at], values.shape[2 + at]
        # Padding wider than the window's reach: the outermost pixels saw only zeros.
        lost = max(0, -(first[at] // stride))
        held = min(count, (sizes[at] - 1 - first[at]) // stride + 1)
        places.append(slice(first[at] + lost * stride, first[at] + (held - 1) * stride + 1, stride))
        kept.append(slice(lost, held))
    _bytes(larger)[:, :, places[0], places[1]] = _bytes(values)[:, :, kept[0], kept[1]]
    return larger


def _zeros(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    return torch.zeros(tuple(shape), dtype=torch.int8, device=like.device).view(like.dtype)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values if values.dtype == torch.int8 else values.view(torch.int8)


def _rows(values: torch.Tensor) -> torch.Tensor:
    """[B, C, …] as [B · …, C]."""
    return values if values.dim() == 2 else values.permute(0, 2, 3, 1).reshape(-1, values.shape[1])


def _image(rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    if len(shape) == 2:
        return rows
    return rows.view(shape[0], shape[2], shape[3], shape[1]).permute(0, 3, 1, 2)


def _by_float64(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Exact: a sum of products of int8 stays below 2^53 up to 5 · 10^11 of them."""
    return one.double().matmul(other.double())


def _by_int_mm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Exact: int32 where that holds the sum; else int64, of slices that int32 holds."""
    depth = one.shape[1]
    if depth <= DEEPEST:
        return _int_mm(one, other)
    slices = range(0, depth, DEEPEST)
    parts = (_int_mm(one[:, at : at + DEEPEST], other[at : at + DEEPEST]) for at in slices)
    total = torch.zeros(one.shape[0], other.shape[1], dtype=torch.int64, device=one.device)
    for part in parts:
        total += part
    return total


def _int_mm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if one.device.type != "cuda":
        # One row counts as contiguous whatever its stride is, and torch 2.13 hands that stride on:
        # some processors' kernels then read what is not there.
        left = one.clone(memory_format=torch.contiguous_format) if len(one) == 1 else one
        return torch.ops.aten._int_mm(left.contiguous(), other)
    rows, columns = one.shape[0], other.shape[1]
    left, right = _whole(one, least=_LEAST_ROWS), _whole(other.t(), least=_STEP)
    return torch.ops.aten._int_mm(left, right.t())[:rows, :columns]


def _by_scaled_mm(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    rows, columns = one.shape[0], other.shape[1]
    left, right = _whole(one, least=_STEP), _whole(other.t(), least=_STEP)
    return torch_compat.scaled_sum(left, right.t())[:rows, :columns]


def _whole(rows: torch.Tensor, *, least: int) -> torch.Tensor:
    """Contiguous, with both sides filled up to whole steps by zeros."""
    high, wide = (-(-size // _STEP) * _STEP for size in rows.shape)
    high = max(high, least)
    if (high, wide) == tuple(rows.shape):
        return rows.contiguous()
    larger = _zeros(rows, (high, wide))
    _bytes(larger)[: rows.shape[0], : rows.shape[1]] = _bytes(rows)
    return larger


#: By `Passes.product`: [M, K] times [K, N], in whatever type holds the sums.
MULTIPLY: Dict[str, Multiply] = {
    "float64": _by_float64,
    "torch._int_mm": _by_int_mm,
    "torch._scaled_mm": _by_scaled_mm,
}
