"""Layers of all kinds for the heterogeneous backends, and their products in float64."""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple

import torch
from torch.nn import functional

from narrowgauge_lab.layers.passes import Problem


@dataclasses.dataclass(frozen=True)
class Case:
    name: str
    problem: Problem
    x: torch.Tensor
    weight: torch.Tensor
    bias: Optional[torch.Tensor]
    grad: torch.Tensor

    def __str__(self) -> str:
        return self.name


def make(
    name: str, problem: Problem, image: Tuple[int, ...], outputs: int, window: Tuple[int, ...] = (),
    bias: bool = False,
) -> Case:  # fmt: skip
    """Random tensors, the same each time; `image` is [B, C, H, W], or [B, ..., C]."""
    linear = problem.kind == "linear"
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    inputs = image[-1] if linear else image[1]

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    weight = random(outputs, inputs // problem.groups, *window)
    grad = random(*problem.output_shape(image, weight.shape))
    return Case(
        name, problem, random(*image), weight, random(outputs) if bias else None, grad
    )  # fmt: skip


def conv(
    stride: Tuple[int, int] = (1, 1),
    padding: Tuple[int, int] = (0, 0),
    dilation: Tuple[int, int] = (1, 1),
    groups: int = 1,
) -> Problem:
    return Problem("conv2d", stride, padding, dilation, groups)


CASES = [
    make("plain", conv((1, 1), (1, 1)), (3, 4, 8, 8), 6, (3, 3)),
    make("bias", conv((1, 1), (1, 1)), (2, 4, 8, 8), 6, (3, 3), bias=True),
    make("stride 2", conv((2, 2), (1, 1)), (3, 4, 8, 8), 6, (3, 3)),
    make("stride 2, odd", conv((2, 2), (1, 1)), (3, 4, 9, 9), 6, (3, 3)),
    make("stride 2, no padding", conv((2, 2), (0, 0)), (2, 3, 8, 8), 4, (3, 3)),
    make("stride 3 beyond the window", conv((3, 3)), (2, 3, 10, 9), 4, (2, 2)),
    make("pointwise", conv(), (3, 5, 6, 6), 7, (1, 1)),
    make("pointwise, stride 2", conv((2, 2)), (3, 5, 8, 8), 7, (1, 1), bias=True),
    make("dilation", conv((1, 1), (2, 2), (2, 2)), (2, 3, 9, 9), 4, (3, 3)),
    make("stride and dilation", conv((2, 2), (2, 1), (2, 2)), (2, 3, 11, 10), 4, (3, 3)),
    make("stride 2, dilation 3", conv((2, 1), (3, 2), (3, 2)), (2, 3, 12, 9), 4, (3, 2)),
    make("groups", conv((1, 1), (1, 1), groups=2), (3, 4, 8, 8), 6, (3, 3)),
    make("groups, stride 2", conv((2, 2), (1, 1), groups=3), (2, 6, 9, 7), 9, (3, 3), bias=True),
    make("depthwise", conv((1, 1), (1, 1), groups=4), (2, 4, 8, 8), 4, (3, 3)),
    make("not square", conv((2, 1), (0, 2), (1, 2)), (2, 3, 11, 7), 5, (2, 3)),
    make("one image", conv((1, 1), (1, 1)), (1, 3, 8, 8), 4, (3, 3)),
    make("padding beyond the window", conv((1, 1), (2, 2)), (2, 3, 5, 5), 4, (1, 1)),
    make("linear", Problem("linear"), (5, 8), 3, bias=True),
    make("linear of three dimensions", Problem("linear"), (2, 3, 8), 4),
]


def gradients(case: Case) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """y, gx and gw by float64 autograd."""
    x = case.x.double().requires_grad_()
    weight = case.weight.double().requires_grad_()
    bias = None if case.bias is None else case.bias.double()
    problem = case.problem
    if problem.kind == "linear":
        y = functional.linear(x, weight, bias)
    else:
        y = functional.conv2d(
            x, weight, bias, problem.stride, problem.padding, problem.dilation, problem.groups
        )
    by_input, by_weight = torch.autograd.grad(y, (x, weight), case.grad.double())
    return y.detach(), by_input, by_weight


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """In L2; NaN where something is not finite."""
    difference = (found.double() - wanted.double()).norm()
    return float(difference / wanted.double().norm())
