"""What is measured beside a sparse convolution, on the same map, with its ReLU: dense and sparse.

| peer           | what it is                                                                    |
|----------------|-------------------------------------------------------------------------------|
| `torch`        | torch's ReLU and convolution: cuDNN by its own search, or oneDNN               |
| `t1`,`t2`,`t3` | cuDNN's IMPLICIT_GEMM, IMPLICIT_PRECOMP_GEMM and GEMM (fp32), as in the paper  |
| `cudnn`        | the fastest of all engines and configurations that cudnn-frontend enumerates   |
| `cudnn_alone`  | the same without its ReLU: what a network that fuses it into the layer before  |
|                | would see, and how much of a ratio is that ReLU's                              |
| `torch_sparse` | torch's own sparse product (COO) of the windows and the weight, lists included |
| `spconv`       | spconv's submanifold convolution, where whole pixels are zero (`pixel` maps)   |
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.cudnn import ConvPlan, ConvProblem
from narrowgauge_lab.measure import TimingPlan, measure_time
from narrowgauge_lab.networks.layer_shapes import LayerShape

from .gemm import ALGORITHMS, all_of
from .maps import Layer
from .ours import DTYPES, Call

__all__ = ["PEERS", "Found", "Peer", "Problem", "peers_of", "problem_of"]

#: In the order of a record.
PEERS = ("torch", *ALGORITHMS, "cudnn", "cudnn_alone", "torch_sparse", "spconv")
#: What cuDNN's plans call the precisions.
_PLAN_DTYPES = {"fp32": "float32", "tf32": "tf32", "fp16": "float16"}
#: Elements of unfolded windows, at most, that torch's sparse product is given.
_MOST_WINDOWS = 1 << 25
#: Samples of each engine when the fastest is looked for; it is measured again beside ours.
_LOOK_SAMPLES, _LOOK_S = 5, 0.02


@dataclasses.dataclass(frozen=True, eq=False)
class Problem:
    """A layer's operands on the device, in the precision's dtype. `x` before its ReLU."""

    shape: LayerShape
    x: torch.Tensor
    weight: torch.Tensor
    precision: str

    @property
    def window(self) -> Tuple[int, int]:
        return (self.shape.stride, self.shape.padding)


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """`call` gives [B, N, H', W'] in whichever order of memory."""

    name: str
    call: Call
    about: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Found:
    """`engines`: every plan of cuDNN's that was tried, with its seconds, the fastest first.
    `missing`: why peers are not among `peers`."""

    peers: Tuple[Peer, ...]
    missing: Dict[str, str]
    engines: Tuple[Dict[str, Any], ...] = ()


def problem_of(layer: Layer, device: torch.device, precision: str) -> Problem:
    """The layer's operands where and as a row wants them."""
    dtype = DTYPES[precision]
    return Problem(
        layer.shape, layer.x.to(device, dtype), layer.weight.to(device, dtype), precision
    )


def peers_of(problem: Problem, asked: Sequence[str], plans: int, seconds: float) -> Found:
    """Those of `asked` (names of PEERS) that this device has. `plans`, `seconds`: how many of
    cuDNN's configurations are built at most, and for how long."""
    found: List[Peer] = []
    missing: Dict[str, str] = {}
    engines: List[Dict[str, Any]] = []
    makers: Dict[str, Callable[[], List[Peer]]] = {
        "torch": lambda: [Peer("torch", _torch(problem))],
        "cudnn": lambda: _cudnn(problem, plans, seconds, engines),
        "torch_sparse": lambda: [Peer("torch_sparse", _torch_sparse(problem))],
        "spconv": lambda: [_spconv(problem)],
    }
    for name, make in makers.items():
        if name in asked:
            try:
                found += make()
            except NotApplicableError as error:
                missing[name] = f"{error.what}: {error.why}" if error.why else error.what
    trio = [name for name in ALGORITHMS if name in asked]
    if trio:
        peers, lacking = _trio(problem)
        found += [each for each in peers if each.name in trio]
        missing.update({name: why for name, why in lacking.items() if name in trio})
    if "cudnn_alone" not in asked:
        found = [each for each in found if each.name != "cudnn_alone"]
    found.sort(key=lambda each: PEERS.index(each.name))
    return Found(tuple(found), missing, tuple(engines))


def _torch(problem: Problem) -> Call:
    x, weight = problem.x, problem.weight
    stride, padding = problem.window
    if x.is_cuda and x.dtype == torch.float16:
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    return lambda: F.conv2d(torch.relu(x), weight, None, stride, padding)


def _trio(problem: Problem) -> Tuple[List[Peer], Dict[str, str]]:
    if not problem.x.is_cuda or problem.precision != "fp32":
        why = "they are cuDNN's, in float32"
        return [], dict.fromkeys(ALGORITHMS, why)
    stride, padding = problem.window
    given = torch.relu(problem.x)
    found, missing = all_of(given, problem.weight, (stride, stride), (padding, padding))
    peers = []
    for name, algorithm in found.items():
        x = problem.x.contiguous(
            memory_format=torch.channels_last
            if algorithm.layout == "NHWC"
            else torch.contiguous_format
        )
        about = {"algorithm": ALGORITHMS[name][0], "layout": algorithm.layout}
        peers.append(Peer(name, _after_relu(x, algorithm.x, algorithm), about))
    return peers, missing


def _after_relu(x: torch.Tensor, into: torch.Tensor, call: Callable[[], Any]) -> Call:
    """ReLU of x into the memory that `call` reads, then `call`."""

    def both() -> torch.Tensor:
        torch.clamp(x, min=0, out=into)
        return call()

    return both


def _cudnn(
    problem: Problem, limit: int, seconds: float, engines: List[Dict[str, Any]]
) -> List[Peer]:
    """The fastest plan, with its ReLU and without; `engines` gets every one that was tried."""
    if not problem.x.is_cuda:
        raise NotApplicableError("cuDNN is for NVIDIA GPUs")
    reason = cudnn.missing()
    if reason:
        raise NotApplicableError("cudnn-frontend is not usable here", why=reason)
    device = problem.x.device
    survey = cudnn.survey(_conv_problem(problem), device, limit=limit, seconds=seconds)
    if not survey.plans:
        raise NotApplicableError("cuDNN has no engine for this problem", why=survey.note)
    look = TimingPlan(
        least_samples=_LOOK_SAMPLES, limit_s=_LOOK_S, warm_up_limit_s=_LOOK_S, hide_launches=True
    )
    timed = []
    for plan in survey.plans:
        into, call = _bound(problem, plan)
        both = _after_relu(_last(problem.x), into, call)
        taken = statistics.median(measure_time(both, device, look).seconds)
        timed.append((taken, plan, both, call))
    timed.sort(key=lambda each: each[0])
    engines += [
        {"engine": plan.name, "from": plan.source, "seconds": taken} for taken, plan, _, _ in timed
    ]
    _, best, both, call = timed[0]
    about = {"engine": best.name, "engines": len(timed), "note": survey.note}
    return [Peer("cudnn", both, about), Peer("cudnn_alone", call, about)]


def _conv_problem(problem: Problem) -> ConvProblem:
    shape, batch = problem.shape, len(problem.x)
    stride, padding = problem.window
    return ConvProblem(
        batch=batch, channels=shape.channels, height=shape.size, width=shape.size,
        count=shape.filters, rows=shape.kernel, columns=shape.kernel, stride=(stride, stride),
        padding=(padding, padding), dilation=(1, 1), groups=1,
        dtype=_PLAN_DTYPES[problem.precision], bias=True, residual=False, activation="none",
        x_pixel=shape.channels, y_pixel=shape.filters, residual_pixel=shape.filters,
    )  # fmt: skip


def _bound(problem: Problem, plan: ConvPlan) -> Tuple[torch.Tensor, Call]:
    """Memory for what the plan reads, filled once, and the plan on it. Its bias is of zeros: with
    one, cuDNN has more engines than without."""
    into = torch.relu(_last(problem.x))
    y = torch.empty(
        plan.problem.shape("y"), dtype=into.dtype, device=into.device,
        memory_format=torch.channels_last,
    )  # fmt: skip
    bias = torch.zeros(plan.problem.shape("bias"), dtype=plan.bias_dtype, device=into.device)
    start = plan.bind(into, _last(problem.weight), bias, None, y, plan.own_workspace())

    def call() -> torch.Tensor:
        start()
        return y

    return into, call


def _last(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


def _torch_sparse(problem: Problem) -> Call:
    """Nonzeros of the unfolded windows as a sparse matrix times the weight: what torch has for a
    convolution of a sparse map. The lists are made in the call."""
    if problem.precision != "fp32":
        raise NotApplicableError("torch's sparse product is measured in float32 only")
    x, shape = problem.x, problem.shape
    stride, padding = problem.window
    side = (shape.size + 2 * padding - shape.kernel) // stride + 1
    rows = len(x) * side * side
    if rows * shape.channels * shape.kernel**2 > _MOST_WINDOWS:
        raise NotApplicableError(
            "the windows would take too much memory", why=f"more than {_MOST_WINDOWS} elements"
        )
    columns = problem.weight.flatten(1).t().contiguous()

    def call() -> torch.Tensor:
        windows = F.unfold(torch.relu(x), shape.kernel, padding=padding, stride=stride)
        lists = windows.transpose(1, 2).reshape(rows, -1).to_sparse()
        found = torch.sparse.mm(lists, columns)
        return found.reshape(len(x), side, side, -1).permute(0, 3, 1, 2)

    return call


def _spconv(problem: Problem) -> Peer:
    # unverified: spconv as a peer | no GPU where it was written | pip install spconv-cu126, a GPU
    try:
        import spconv.pytorch as spconv
    except ImportError as error:
        raise NotApplicableError("spconv is not installed", why=str(error)) from error
    if not _on_gpu(problem.x):
        raise NotApplicableError("spconv's kernels are for NVIDIA GPUs")
    shape, x = problem.shape, problem.x
    if shape.stride != 1 or 2 * shape.padding + 1 != shape.kernel:
        raise NotApplicableError("a submanifold convolution has as many pixels behind as before")
    layer = spconv.SubMConv2d(
        shape.channels, shape.filters, shape.kernel, padding=shape.padding, bias=False
    ).to(x.device, x.dtype)
    # Its weight is [filters, height, width, channels].
    layer.weight.data.copy_(problem.weight.permute(0, 2, 3, 1))

    def call() -> torch.Tensor:
        given = torch.relu(x).permute(0, 2, 3, 1).contiguous()
        places = (given != 0).any(dim=3).nonzero().int()
        values = given[tuple(places.long().t())]
        sparse = spconv.SparseConvTensor(values, places, list(x.shape[2:]), len(x))
        return layer(sparse).dense()

    return Peer("spconv", call, {"only_at": "pixels with a nonzero"})


def _on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)
