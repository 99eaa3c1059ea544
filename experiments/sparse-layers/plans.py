"""The fastest of cuDNN's plans that a search of so many configurations and seconds finds.

Two searches: with a bias of zeros cuDNN has the precompiled fusions, and without one engines that
no fusion has. Maps are NHWC, which is what `own.cudnn` plans for.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.cudnn import ConvPlan, ConvProblem

from .kept_plans import keep, kept
from .looking import Call, glance
from .problem import Peer, Problem

__all__ = ["Searched", "after_relu", "search"]

#: What cuDNN's plans call the precisions.
_PLAN_DTYPES = {"fp32": "float32", "tf32": "tf32", "fp16": "float16"}
#: Seconds for each engine when the fastest is looked for.
_LOOK_S = 0.02


@dataclasses.dataclass(frozen=True)
class Searched:
    """`peers`: `cudnn` and `cudnn_alone`. `engines`: every plan that was tried, with its seconds,
    the fastest first. `note`: what both searches left out, and why."""

    peers: Tuple[Peer, ...]
    engines: Tuple[Dict[str, Any], ...]
    note: str


def search(problem: Problem, limit: int, seconds: float) -> Searched:
    """With its ReLU and without. `limit` and `seconds` are of both searches together; what an
    earlier row found within them is taken, the fastest of it measured anew. Raises
    NotApplicableError, DiskFullError."""
    if not problem.x.is_cuda:
        raise NotApplicableError("cuDNN is for NVIDIA GPUs")
    reason = cudnn.missing()
    if reason:
        raise NotApplicableError("cudnn-frontend is not usable here", why=reason)
    stated, bounds = conv_problem(problem, False), (limit, seconds)
    known = kept(stated, problem.x.device, bounds)
    plans, note = known or surveyed(problem, limit, seconds)
    if not plans:
        raise NotApplicableError("cuDNN has no engine for this problem", why=note)
    timed: List[Tuple[float, ConvPlan, Call, Call]] = []
    for plan in plans:
        into, call = bound(problem, plan)
        both = after_relu(_last(problem.x), into, call)
        taken = glance(both, problem.x.device, _LOOK_S)
        timed.append((taken, plan, both, call))
    timed.sort(key=lambda each: each[0])
    if known is None:
        keep(stated, problem.x.device, bounds, [plan for _, plan, _, _ in timed], note)
    engines = tuple(
        {"engine": plan.name, "from": plan.source, "bias": plan.problem.bias, "seconds": taken}
        for taken, plan, _, _ in timed
    )
    _, best, both, call = timed[0]
    about = {"engine": best.name, "bias": best.problem.bias, "engines": len(timed), "note": note}
    peers = (Peer("cudnn", both, about), Peer("cudnn_alone", call, about))
    return Searched(peers, engines, note)


def surveyed(problem: Problem, limit: int, seconds: float) -> Tuple[List[ConvPlan], str]:
    """The plans of both searches, each of which gets half of the bounds, and their notes."""
    plans: List[ConvPlan] = []
    notes: List[str] = []
    for bias in (True, False):
        survey = cudnn.survey(
            conv_problem(problem, bias), problem.x.device,
            limit=max(1, limit // 2), seconds=seconds / 2,
        )  # fmt: skip
        plans += survey.plans
        notes.append(f"{'with' if bias else 'without'} a bias: {survey.note}")
    return plans, "; ".join(notes)


def conv_problem(problem: Problem, bias: bool) -> ConvProblem:
    """As `own.cudnn` states it, NHWC."""
    shape, batch = problem.shape, len(problem.x)
    stride, padding = problem.window
    return ConvProblem(
        batch=batch, channels=shape.channels, height=shape.size, width=shape.size,
        count=shape.filters, rows=shape.kernel, columns=shape.kernel, stride=(stride, stride),
        padding=(padding, padding), dilation=(1, 1), groups=1,
        dtype=_PLAN_DTYPES[problem.precision], bias=bias, residual=False, activation="none",
        x_pixel=shape.channels, y_pixel=shape.filters, residual_pixel=shape.filters,
    )  # fmt: skip


def bound(problem: Problem, plan: ConvPlan) -> Tuple[torch.Tensor, Call]:
    """Memory for what the plan reads, filled once, and the plan on it. Its bias, where it has one,
    is of zeros."""
    into = torch.relu(_last(problem.x))
    y = torch.empty(
        plan.problem.shape("y"), dtype=into.dtype, device=into.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    bias = None
    if plan.bias_dtype is not None:
        bias = torch.zeros(plan.problem.shape("bias"), dtype=plan.bias_dtype, device=into.device)
    start = plan.bind(into, _last(problem.weight), bias, None, y, plan.own_workspace())

    def call() -> torch.Tensor:
        start()
        return y

    return into, call


def after_relu(x: torch.Tensor, into: torch.Tensor, call: Callable[[], Any]) -> Call:
    """ReLU of x into the memory that `call` reads, then `call`."""

    def both() -> torch.Tensor:
        torch.clamp(x, min=0, out=into)
        made: torch.Tensor = call()
        return made

    return both


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)
