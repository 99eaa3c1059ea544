"""The edge to the compiled operators: one product of a layer, as its `Problem` says."""

from __future__ import annotations

import functools
from typing import Optional

import torch

from narrowgauge_kernels import codes as code_kernels
from narrowgauge_kernels import manual as float_kernels
from narrowgauge_kernels.codes import CodeMac
from narrowgauge_kernels.library import require
from narrowgauge_kernels.mac import Mac
from narrowgauge_lab.layers.passes import Problem

__all__ = ["code_sums", "float_layer", "product_instructions"]


def float_layer(
    problem: Problem,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: Optional[torch.Tensor],
    mac: Mac,
) -> torch.Tensor:
    """The layer's result by the policy's float32 products."""
    if problem.kind == "linear":
        return float_kernels.linear(x, weight, bias, mac)
    return float_kernels.conv2d(
        x, weight, bias, mac, problem.stride, problem.padding, problem.dilation, problem.groups
    )


@functools.lru_cache(maxsize=None)
def product_instructions() -> str:
    """The instruction set by which this processor forms exact products of codes, as the operators
    name it. Raises KernelsNotBuiltError."""
    require("cpu")
    return str(torch.ops.narrowgauge.codes_instruction_sets(False)[-1])


def code_sums(
    problem: Problem, x: torch.Tensor, weight: torch.Tensor, mac: CodeMac, x_zero: int
) -> torch.Tensor:
    """The sums of products of codes, int32; padding pixels have the code `x_zero`."""
    if problem.kind == "linear":
        return code_kernels.linear_codes(x, weight, mac)
    return code_kernels.conv2d_codes(
        x, weight, mac, problem.stride, problem.padding, problem.dilation, problem.groups, x_zero
    )
