"""What a plan of cuDNN is tried with before it is believed: sums that are known, and values that
are not finite. cuDNN 9.19 has engines that fail each of these."""

from __future__ import annotations

import functools
import math

import torch
from torch.nn import functional as F

from narrowgauge_lab.engines.own.cudnn_graphs import ConvProblem
from narrowgauge_lab.engines.own.cudnn_plans import ConvPlan

__all__ = ["computes", "fault_of"]

#: What no sum here comes to, for memory that a plan has to write; and NaN in every type.
_BEFORE, _NAN_BYTE = 7.0, 0xFF
#: Why a plan that gave something else than the sums is left out, by whether float32 is strict.
_OFF = {
    False: "it was seen to give something else, or to read beside its operands",
    True: "it was seen to round its operands, and float32 is strict",
}


def fault_of(plan: ConvPlan) -> str:
    """Why this plan is not to be used, by runs of it; "" where nothing is wrong."""
    if not computes(plan):
        return _OFF[plan.problem.strict]
    if not _keeps_nan(plan):
        return "it was seen to make numbers of NaN"
    if not _keeps_overflow(plan):
        return "it was seen to make zeros of sums that are too large"
    return ""


def computes(plan: ConvPlan) -> bool:
    """Whether equal operands give their sums, by a run, with NaN wherever the plan has no business:
    between the pixels of a slice, and in the workspace before it was written.

    Operands of strict problems are 1 + 2^-12, which TF32 and the half types round to 1, so that a
    sum of products tells what was multiplied. (eng8 of cuDNN 9.19 reads what lies between.)
    """
    strict = plan.problem.strict
    taps = _taps(plan.problem) * (plan.problem.channels // plan.problem.groups)
    # A power of two is exact, and keeps the sums below the bound of ReLU6.
    shrink = 2.0 ** -math.ceil(math.log2(max(1.0, float(taps.max()))))
    exact = 1 + 2.0**-12 if strict else 1.0
    y = _ran(plan, _filled(plan.problem, "x", exact, plan.device), exact * shrink)
    expected = (taps * (exact * exact * shrink)).to(plan.device)
    ends = torch.cat([y[:1], y[-1:]]).double()
    # One operand rounded changes a sum by 2.4e-4 of it; Winograd in float32 does by some 1e-6.
    near = 5e-5 if strict else 1e-2
    return bool(((ends - expected).abs() <= near * expected + 1e-6).all())


def _keeps_nan(plan: ConvPlan) -> bool:
    """Whether NaN comes out wherever it went in, by a run on nothing else.

    All bits but the sign's are set, as in what GPUs compute: an engine that rounds to TF32 by
    adding to the bits (eng39 of cuDNN 9.19 does) carries into the sign then, and leaves a zero.
    """
    x = _filled(plan.problem, "x", math.nan, plan.device)
    whole = torch.int16 if x.element_size() == 2 else torch.int32
    x.view(whole).fill_(torch.iinfo(whole).max)
    y = _ran(plan, x, 1.0)
    reached = (_taps(plan.problem) > 0).to(plan.device)
    return bool((torch.isnan(y) | ~reached).all())


def _keeps_overflow(plan: ConvPlan) -> bool:
    """Whether sums below all numbers come out as minus infinity, by a run on nothing else.

    What cuDNN 9.19 takes for 16 channels in float16 writes zeros for them. After a ReLU they are.
    """
    if plan.problem.activation != "none":
        return True
    large = 1.25 * math.sqrt(torch.finfo(plan.problem.torch_dtype).max)
    y = _ran(plan, _filled(plan.problem, "x", large, plan.device), -large)
    reached = (_taps(plan.problem) > 0).to(plan.device)
    return bool((torch.isinf(y) | ~reached).all())


@functools.lru_cache(maxsize=1)
def _taps(problem: ConvProblem) -> torch.Tensor:
    """[1, 1, P, Q]: how many pixels of the image each sum is over, without the border. A search
    asks for it with each plan of one problem; nobody writes to it."""
    return F.conv2d(
        torch.ones(1, 1, problem.height, problem.width, dtype=torch.float64),
        torch.ones(1, 1, problem.rows, problem.columns, dtype=torch.float64),
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
    )


def _ran(plan: ConvPlan, x: torch.Tensor, weight: float) -> torch.Tensor:
    """What the plan makes of `x` and equal weights."""
    problem, device = plan.problem, plan.device
    w = _filled(problem, "w", weight, device)
    bias = None
    if problem.bias:
        bias = torch.zeros(problem.shape("bias"), dtype=plan.bias_dtype, device=device)
    residual = _filled(problem, "residual", 0.0, device) if problem.residual else None
    y = _filled(problem, "y", _BEFORE, device)
    plan.start(x, w, bias, residual, y, plan.own_workspace().fill_(_NAN_BYTE))
    return y


def _filled(problem: ConvProblem, name: str, value: float, device: torch.device) -> torch.Tensor:
    """An operand in memory of its own, laid out as the problem says; what lies between is NaN."""
    shape, strides = problem.shape(name), problem.strides(name)
    size = shape[0] * strides[0]
    memory = torch.full((size,), math.nan, dtype=problem.torch_dtype, device=device)
    return memory.as_strided(shape, strides).fill_(value)
