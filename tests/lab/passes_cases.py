"""Layers for the tests of the passes, and their products by autograd in float64."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

import torch
from torch.nn import functional

from narrowgauge_kernels.wire import pack_int8_ref
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.layers.passes.quantise import FORMATS, folded


def packed(x: torch.Tensor, seed: Optional[int]) -> Tuple[torch.Tensor, torch.Tensor]:
    """(values, scale) as passes quantise: an input by channel; a gradient, which has a seed, by one
    scale."""
    if seed is None:
        return pack_int8_ref(x)
    values, scale = pack_int8_ref(x.reshape(x.shape[0], 1, -1), seed)
    return values.reshape(x.shape), scale.expand(x.shape[1])


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer, and the batch that it gets: [B, C, H, W] and [K, C / G, R, S]; or [B, C], [K, C]."""

    name: str
    image: Tuple[int, ...]
    weight: Tuple[int, ...]
    problem: Problem

    def __str__(self) -> str:
        return self.name


def conv(name: str, image: Tuple[int, ...], weight: Tuple[int, ...], *sizes: Any) -> Case:
    return Case(name, image, weight, Problem("conv2d", *sizes))


CASES = (
    conv("3x3", (2, 16, 8, 8), (8, 16, 3, 3), (1, 1), (1, 1)),
    conv("stride 2", (2, 8, 8, 8), (16, 8, 3, 3), (2, 2), (1, 1)),
    conv("stride 2, odd", (2, 8, 9, 7), (8, 8, 3, 3), (2, 2), (1, 1)),
    conv("stride 3 and 2, not square", (2, 40, 11, 9), (8, 40, 3, 2), (3, 2), (4, 1), (2, 1)),
    conv("dilation 2 and 3, stride 2", (2, 8, 13, 12), (8, 8, 3, 3), (2, 2), (2, 1), (2, 3)),
    conv("groups", (2, 16, 7, 6), (32, 8, 3, 3), (2, 1), (1, 0), (1, 2), 2),
    conv("1x1", (3, 16, 5, 4), (24, 16, 1, 1)),
    conv("1x1, stride 2", (2, 16, 7, 8), (8, 16, 1, 1), (2, 2)),
    conv("1x1, stride 2, padding", (2, 8, 8, 9), (8, 8, 1, 1), (2, 2), (1, 1)),
    conv("1x1, groups", (2, 16, 5, 5), (16, 8, 1, 1), (1, 1), (0, 0), (1, 1), 2),
    conv("5x1, padding beyond its reach", (2, 3, 6, 5), (5, 3, 5, 1), (1, 1), (2, 2)),
    conv("one pixel", (1, 8, 3, 3), (8, 8, 3, 3)),
    conv("batch 1", (1, 3, 18, 5), (4, 3, 3, 3), (1, 1), (1, 1)),
    conv("rows longer than 16", (1, 8, 3, 21), (8, 8, 2, 3), (1, 1), (0, 1)),
    Case("linear", (5, 37), (11, 37), Problem("linear")),
    Case("linear, batch 1", (1, 16), (3, 16), Problem("linear")),
)
DEPTHWISE = conv("depthwise", (2, 8, 6, 6), (8, 1, 3, 3), (2, 2), (1, 1), (1, 1), 8)


@dataclasses.dataclass(frozen=True)
class Layer:
    """Operands in float32 on a device, and what autograd makes of them in float64."""

    x: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor
    grad: torch.Tensor
    forward: torch.Tensor
    input_grad: torch.Tensor
    weight_grad: torch.Tensor


def layer(case: Case, device: Optional[torch.device] = None, seed: int = 0) -> Layer:
    generator = torch.Generator().manual_seed(seed)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device or "cpu")

    x, weight, bias = drawn(*case.image), drawn(*case.weight), drawn(case.weight[0])
    shape = case.problem.output_shape(case.image, case.weight)
    grad = drawn(*shape)
    return Layer(x, weight, bias, grad, *by_autograd(case.problem, x, weight, bias, grad))


def by_autograd(
    problem: Problem,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    grad: torch.Tensor,
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The three products in float64."""
    image, kernel = x.double().requires_grad_(True), weight.double().requires_grad_(True)
    added = None if bias is None else bias.double()
    if problem.kind == "linear":
        result = functional.linear(image, kernel, added)
    else:
        result = functional.conv2d(
            image, kernel, added, problem.stride, problem.padding, problem.dilation, problem.groups
        )
    return (result.detach(), *torch.autograd.grad(result, (image, kernel), grad.double()))


def exact_int8(passes: Any, made: Layer, seed: int = 0) -> Dict[str, torch.Tensor]:
    """The three products of what int8 makes of the operands: whole numbers, summed in float64,
    times their scales."""
    problem, groups = passes.problem, passes.problem.groups
    image, above = passes.prepared_input(made.x), passes.prepared_grad(made.grad, seed)
    x, grad = image.values, above.values
    form = FORMATS["int8"]
    kernel, scale = folded(made.weight, image.scale, groups, form, transposed=False)
    turned, other = folded(made.weight, above.scale, groups, form, transposed=True)
    weight = kernel.reshape(made.weight.shape)
    back = turned.transpose(1, 2).reshape(made.weight.shape)
    ones = (1,) * (x.dim() - 2)
    sums, _, by_weight = by_autograd(problem, x, weight, None, grad)
    _, by_input, _ = by_autograd(problem, x, back, None, grad)
    inside = image.scale.double().view(groups, 1, -1, 1)
    outside = above.scale.double().view(groups, -1, 1, 1)
    parts = by_weight.reshape(groups, grad.shape[1] // groups, made.weight.shape[1], -1)
    return {
        "forward": sums * scale.double().view(1, -1, *ones) + made.bias.double().view(1, -1, *ones),
        "input_grad": by_input * other.double().view(1, -1, *ones),
        "weight_grad": (parts * inside * outside).reshape(made.weight.shape),
    }


def products(passes: Any, made: Layer, seed: int = 0) -> Dict[str, torch.Tensor]:
    """All three, of operands that are prepared once."""
    image, above = passes.prepared_input(made.x), passes.prepared_grad(made.grad, seed)
    return {
        "forward": passes.forward(image, made.weight, made.bias),
        "input_grad": passes.input_grad(above, made.weight, made.x.shape),
        "weight_grad": passes.weight_grad(above, image, made.weight.shape),
    }


def errors(passes: Any, made: Layer) -> Dict[str, float]:
    """Of each product against float64: |difference| / |product|, Euclidean."""
    found = products(passes, made)
    return {name: distance(each, getattr(made, name)) for name, each in found.items()}


def distance(result: torch.Tensor, exact: torch.Tensor) -> float:
    assert result.shape == exact.shape
    return float((result.double() - exact).norm() / exact.norm())


def differently_laid(x: torch.Tensor) -> Dict[str, torch.Tensor]:
    """The same values in other orders of memory."""
    wide = torch.zeros(*x.shape[:-1], 2 * x.shape[-1], dtype=x.dtype, device=x.device)
    wide[..., ::2] = x
    found = {"with gaps": wide[..., ::2], "turned": x.transpose(0, 1).contiguous().transpose(0, 1)}
    if x.dim() == 4:
        found["channels_last"] = x.contiguous(memory_format=torch.channels_last)
    return found
