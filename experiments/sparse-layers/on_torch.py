"""torch's own dense convolution, as it comes and as fast as it goes.

On a CPU torch has oneDNN rearrange the weight at each call, which ours has done beforehand: beside
the plain call stand the one with pixels' channels next to each other, and the one whose weight
oneDNN was given in its own order.
"""

from __future__ import annotations

from typing import Any, List

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import NotApplicableError

from .looking import Call, glance
from .problem import Peer, Problem

__all__ = ["torch_last", "torch_packed", "torch_plain"]


def torch_plain(problem: Problem) -> Peer:
    """With channels last where tensor cores want it, as whoever wants it fast has it."""
    last = _tensor_cores(problem)
    return Peer("torch", _conv(problem, last), {"channels_last": last})


def torch_last(problem: Problem) -> Peer:
    """Raises NotApplicableError where `torch` is this already."""
    if _tensor_cores(problem):
        raise NotApplicableError("the peer 'torch' has channels last here already")
    return Peer("torch_last", _conv(problem, True), {"channels_last": True})


def torch_packed(problem: Problem) -> Peer:
    """oneDNN's convolution of a weight that it has rearranged beforehand. The map goes into its
    order and comes back in the call: what is timed begins and ends with tensors of torch. Raises
    NotApplicableError where this torch has none."""
    if problem.x.device.type != "cpu":
        raise NotApplicableError("oneDNN is a CPU's")
    if not torch.backends.mkldnn.is_available():
        raise NotApplicableError("this torch was built without oneDNN")
    x, (stride, padding) = problem.x, problem.window
    try:
        weight = _packed(problem)
    except (AttributeError, RuntimeError) as error:
        raise NotApplicableError("torch packs no weight for oneDNN here", why=str(error)) from error

    def before() -> torch.Tensor:
        given = torch.relu(x).to_mkldnn()
        return F.conv2d(given, weight, None, stride, padding).to_dense()

    def behind() -> torch.Tensor:
        given = torch.relu(x.to_mkldnn())
        return F.conv2d(given, weight, None, stride, padding).to_dense()

    times: List[float] = [glance(call, x.device) for call in (before, behind)]
    first = times[0] <= times[1]
    return Peer(
        "torch_packed", before if first else behind, {"relu": "torch's" if first else "oneDNN's"}
    )


def _packed(problem: Problem) -> torch.Tensor:
    stride, padding = problem.window
    sizes = ((padding, padding), (stride, stride), (1, 1), 1)
    reorder: Any = torch._C._nn.mkldnn_reorder_conv2d_weight
    weight = problem.weight.to_mkldnn()
    try:
        # Since torch 2 it packs for a map of this size.
        packed: torch.Tensor = reorder(weight, *sizes, list(problem.x.shape))
    except TypeError:
        packed = reorder(weight, *sizes)
    return packed


def _tensor_cores(problem: Problem) -> bool:
    return problem.x.is_cuda and problem.precision in ("tf32", "fp16")


def _conv(problem: Problem, last: bool) -> Call:
    x, weight, (stride, padding) = problem.x, problem.weight, problem.window
    if last:
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    return lambda: F.conv2d(torch.relu(x), weight, None, stride, padding)
