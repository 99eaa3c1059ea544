"""Convolutions, their operands and what they should give, for the tests of cuDNN's plans."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import torch
from torch.nn import functional as F

from narrowgauge_lab.engines.own.cudnn import ConvPlan, ConvProblem

__all__ = ["beside", "convolution", "error", "expected", "operands"]


def convolution(batch: int, channels: int, size: int, count: int, **changed: Any) -> ConvProblem:
    """3x3 with padding and a bias, float16 and ReLU where not `changed`; pixels without gaps.
    `kernel`, `step` and `edge` set both sides."""
    kernel, step = changed.pop("kernel", 3), changed.pop("step", 1)
    edge = changed.pop("edge", kernel // 2)
    fields: Dict[str, Any] = {
        "batch": batch, "channels": channels, "height": size, "width": size, "count": count,
        "rows": kernel, "columns": kernel, "stride": (step, step), "padding": (edge, edge),
        "dilation": (1, 1), "groups": 1, "dtype": "float16", "bias": True, "residual": False,
        "activation": "relu", "x_pixel": channels, "y_pixel": count, "residual_pixel": count,
    }  # fmt: skip
    return ConvProblem(**{**fields, **changed})


def operands(
    problem: ConvProblem, plan: ConvPlan, offset: int = 0, fill: float = float("nan")
) -> Dict[str, Any]:
    """What `plan.start` takes, on its device: random values of order one and a y of `fill`. Slices
    begin at channel `offset` of pixels that hold `fill` elsewhere."""
    made: Dict[str, Any] = {"bias": None, "residual": None}
    generator = torch.Generator().manual_seed(7)
    for name in ("x", "w", "y", "bias", "residual"):
        if not getattr(problem, name, True):
            continue
        dtype = plan.bias_dtype if name == "bias" else problem.torch_dtype
        shape, strides = problem.shape(name), problem.strides(name)
        memory = torch.full((shape[0] * strides[0] + offset,), fill, dtype=dtype)
        here = offset if strides[3] != shape[1] else 0
        seen = memory.to(plan.device)[here:].as_strided(shape, strides)
        if name != "y":
            scale = (shape[1] * shape[2] * shape[3]) ** -0.5 if name == "w" else 1.0
            seen.copy_(torch.randn(shape, generator=generator) * scale)
        made[name] = seen
    return made


def expected(problem: ConvProblem, tensors: Dict[str, Any]) -> torch.Tensor:
    """In float64, of the operands as they are."""
    y = F.conv2d(
        tensors["x"].double(), tensors["w"].double(), None, problem.stride, problem.padding,
        problem.dilation, problem.groups,
    )  # fmt: skip
    for addend in ("bias", "residual"):
        if tensors[addend] is not None:
            y = y + tensors[addend].double()
    if problem.activation == "none":
        return y
    return y.clamp(0.0, 6.0 if problem.activation == "relu6" else float("inf"))


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative, in the Frobenius norm; NaN where there is one."""
    return float((found.double() - wanted).norm() / wanted.norm())


def beside(problem: ConvProblem, name: str, tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """What lies between the channels of a slice's pixels: [pixels, pixel - channels]."""
    shape, strides = problem.shape(name), problem.strides(name)
    size: Tuple[int, int] = (shape[0] * shape[2] * shape[3], strides[3])
    start = tensor.storage_offset() - offset
    wide = tensor.as_strided(size, (strides[3], 1), start)
    return torch.cat([wide[:, :offset], wide[:, offset + shape[1] :]], dim=1)
