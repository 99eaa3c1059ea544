"""What is measured beside a sparse convolution, on the same map, with its ReLU: dense and sparse.

| peer           | what it is                                                                    |
|----------------|-------------------------------------------------------------------------------|
| `torch`        | torch's ReLU and convolution: cuDNN by its own search, or oneDNN               |
| `torch_last`   | the same with channels last, where `torch` has not                             |
| `torch_packed` | oneDNN's convolution of a weight that it has rearranged beforehand (CPU)       |
| `t1`,`t2`,`t3` | cuDNN's IMPLICIT_GEMM, IMPLICIT_PRECOMP_GEMM and GEMM (fp32), as in the paper  |
| `cudnn`        | the fastest of cuDNN's NHWC plans that were found within `plans` and `plan_s`  |
| `cudnn_alone`  | the same without its ReLU: what a network that fuses it into the layer before  |
|                | would see, and how much of a ratio is that ReLU's                              |
| `own_dense`    | our kernel of the same design that jumps over no zero: what of a ratio is not  |
|                | the zeros' (a GPU; fp32 and fp16)                                              |
| `torch_sparse` | torch's own sparse product (COO) of the windows and the weight, lists included |
| `spconv`       | spconv's submanifold convolution, where whole pixels are zero (`pixel` maps)   |
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import NotApplicableError

from .gemm import ALGORITHMS, all_of
from .looking import Call
from .on_torch import torch_last, torch_packed, torch_plain
from .ours import dense_of
from .plans import Searched, after_relu, search
from .problem import Peer, Problem, problem_of

__all__ = ["PEERS", "Found", "Peer", "Problem", "peers_of", "problem_of"]

#: In the order of a record.
PEERS = (
    "torch", "torch_last", "torch_packed", *ALGORITHMS, "cudnn", "cudnn_alone", "own_dense",
    "torch_sparse", "spconv",
)  # fmt: skip
#: Elements of unfolded windows, at most, that torch's sparse product is given.
_MOST_WINDOWS = 1 << 25


@dataclasses.dataclass(frozen=True)
class Found:
    """`engines`: every plan of cuDNN's that was tried, with its seconds, the fastest first.
    `missing`: why peers are not among `peers`, and, as `cudnn_plans`, what the searches of cuDNN's
    plans left out."""

    peers: Tuple[Peer, ...]
    missing: Dict[str, str]
    engines: Tuple[Dict[str, Any], ...] = ()


def peers_of(
    problem: Problem, asked: Sequence[str], plans: int, seconds: float, tune_s: float
) -> Found:
    """Those of `asked` (names of PEERS) that this device has. `plans`, `seconds`: how many of
    cuDNN's configurations are built at most, and for how long. `tune_s`: how long a tile of our own
    is looked for, where none is stored."""
    found: List[Peer] = []
    missing: Dict[str, str] = {}
    searched: List[Searched] = []

    def cudnn_plans() -> List[Peer]:
        searched.append(search(problem, plans, seconds))
        return list(searched[0].peers)

    makers: Dict[str, Callable[[], List[Peer]]] = {
        "torch": lambda: [torch_plain(problem)],
        "torch_last": lambda: [torch_last(problem)],
        "torch_packed": lambda: [torch_packed(problem)],
        "cudnn": cudnn_plans,
        "own_dense": lambda: [_own_dense(problem, tune_s)],
        "torch_sparse": lambda: [Peer("torch_sparse", _torch_sparse(problem), waits=True)],
        "spconv": lambda: [_spconv(problem)],
    }
    for name, make in makers.items():
        if name in asked:
            try:
                found += make()
            except NotApplicableError as error:
                missing[name] = f"{error.what}: {error.why}" if error.why else error.what
    for each in searched:
        missing["cudnn_plans"] = each.note
    trio = [name for name in ALGORITHMS if name in asked]
    if trio:
        peers, lacking = _trio(problem)
        found += [each for each in peers if each.name in trio]
        missing.update({name: why for name, why in lacking.items() if name in trio})
    if "cudnn_alone" not in asked:
        found = [each for each in found if each.name != "cudnn_alone"]
    found.sort(key=lambda each: PEERS.index(each.name))
    return Found(tuple(found), missing, searched[0].engines if searched else ())


def _trio(problem: Problem) -> Tuple[List[Peer], Dict[str, str]]:
    if not problem.x.is_cuda or problem.precision != "fp32":
        why = "they are cuDNN's, in float32"
        return [], dict.fromkeys(ALGORITHMS, why)
    stride, padding = problem.window
    given = torch.relu(problem.x)
    found, missing = all_of(given, problem.weight, (stride, stride), (padding, padding))
    peers = []
    for name, kept in found.items():
        algorithm = kept.gemm
        x = problem.x.contiguous(memory_format=algorithm.memory)
        about = {
            "algorithm": ALGORITHMS[name][0], "layout": algorithm.layout, "layouts": kept.tried,
        }  # fmt: skip
        peers.append(Peer(name, after_relu(x, algorithm.x, algorithm), about))
    return peers, missing


def _own_dense(problem: Problem, tune_s: float) -> Peer:
    made = dense_of(problem.shape, problem.x, problem.weight, problem.precision, tune_s)
    return Peer("own_dense", made.call, made.about)


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
    except Exception as error:
        # A wheel for another torch or CUDA raises whatever its parts do.
        why = f"{type(error).__name__}: {error}"
        raise NotApplicableError("spconv cannot be imported", why=why) from error
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

    return Peer("spconv", call, {"only_at": "pixels with a nonzero"}, waits=True)


def _on_gpu(tensor: torch.Tensor) -> bool:
    return bool(tensor.is_cuda)
