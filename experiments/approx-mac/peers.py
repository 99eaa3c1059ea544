"""What is measured beside a kernel, on the same operands: other ways to compute the same layer.

| peer      | what it is                                                                         |
|-----------|------------------------------------------------------------------------------------|
| `exact`   | our own kernel of exact products, float32 or 8-bit, as the policy's operands are    |
| `torch`   | torch's float32 layer, TF32 off: cuDNN with its own choice of algorithm, or oneDNN  |
| `lowered` | torch's convolution without cuDNN or oneDNN: im2col and a product, so no Winograd   |
| `int_mm`  | torch._int_mm, the vendor's exact 8-bit product, on windows unfolded beforehand     |
| `untiled` | a kernel of the original's design (`untiled`)                                       |
| `torchapprox`, `adapt` | published kernels, where the user has placed them (`published`)        |
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Callable, ContextManager, Dict, Iterator, List, Tuple

import torch
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_kernels.codes import CodeMac, linear_codes_ref

from . import published
from .operands import Operands
from .subject import Call, Subject
from .untiled import unfolded, untiled_codes, untiled_float

__all__ = ["PEERS", "Peer", "peers_of"]

#: In the order of a record.
LIBRARIES = ("exact", "torch", "lowered", "int_mm")
PEERS = (*LIBRARIES, "untiled", "torchapprox", "adapt")
#: torch._int_mm takes sizes of these multiples on a GPU, and more rows than this.
_MULTIPLE, _LEAST_ROWS = 8, 17


@dataclasses.dataclass(frozen=True, eq=False)
class Peer:
    """`sampled`: where its results are looked at, from what `call` gives; `wanted`: what they
    should be there, in float64 or int64."""

    name: str
    call: Call
    sampled: Callable[[torch.Tensor], torch.Tensor]
    wanted: torch.Tensor


def peers_of(subject: Subject, asked: str) -> Tuple[List[Peer], Dict[str, str]]:
    """Those that a layer has here, and why it lacks the others. `asked`: `none`, `libraries` (no
    other design of the same thing) or `all`."""
    makers: Dict[str, Callable[[Subject], Peer]] = {
        "exact": _exact,
        "torch": _torch,
        "lowered": _lowered,
        "int_mm": _int_mm,
        "untiled": _untiled,
        "torchapprox": _torchapprox,
        "adapt": _adapt,
    }
    wanted = {"none": (), "libraries": LIBRARIES, "all": PEERS}[asked]
    found, missing = [], {}
    for name in wanted:
        try:
            found.append(makers[name](subject))
        except NotApplicableError as error:
            missing[name] = f"{error.what}: {error.why}" if error.why else error.what
    return found, missing


def _exact(subject: Subject) -> Peer:
    if subject.exact:
        raise NotApplicableError("the policy is exact itself")
    return _peer("exact", subject, subject.exact_call())


def _torch(subject: Subject) -> Peer:
    operands = subject.operands.as_float()
    return _peer("torch", subject, _native(operands))


def _lowered(subject: Subject) -> Peer:
    operands = subject.operands.as_float()
    if operands.problem.kind == "linear":
        raise NotApplicableError("a product is not lowered")
    native, without = _native(operands), _without_library(operands.x.device)

    def call() -> torch.Tensor:
        with without():
            return native()

    return _peer("lowered", subject, call)


def _native(operands: Operands) -> Call:
    x, weight, problem = operands.x, operands.weight, operands.problem
    if problem.kind == "linear":
        return lambda: functional.linear(x, weight)
    return lambda: functional.conv2d(x, weight, None, problem.stride, problem.padding)


def _without_library(device: torch.device) -> Callable[[], ContextManager[None]]:
    library = torch.backends.cudnn if device.type == "cuda" else torch.backends.mkldnn

    @contextlib.contextmanager
    def disabled() -> Iterator[None]:
        """Not torch's own context: that sets what float32 products may be made of, too."""
        before = library.enabled
        library.enabled = False
        try:
            yield
        finally:
            library.enabled = before

    return disabled


def _int_mm(subject: Subject) -> Peer:
    """Codes that are unsigned are halved for it: it takes signed ones, and as many."""
    operands = subject.operands
    if not subject.codes:
        raise NotApplicableError("the operands are no 8-bit codes")
    if not hasattr(torch, "_int_mm"):
        raise NotApplicableError(f"torch {torch.__version__} has no 8-bit product")
    rows = _signed(unfolded(operands).flatten(0, 1), operands.x.dtype)
    weights = _signed(operands.weight.reshape(len(operands.weight), -1), operands.weight.dtype)
    left, turned = _filled(rows, _LEAST_ROWS), _filled(weights, 1).t()
    at, filters = _rows_at(operands), list(operands.sample.filters)
    wanted = rows[at].cpu().double() @ weights[filters].cpu().double().t()

    def call() -> torch.Tensor:
        return torch._int_mm(left, turned)

    try:
        call()
    except RuntimeError as error:
        raise NotApplicableError(
            "torch._int_mm does not take this product", why=str(error).splitlines()[0]
        ) from error
    return Peer("int_mm", call, _sampled_rows(operands), wanted.long())


def _rows_at(operands: Operands) -> List[int]:
    """Rows that are looked at of a product of unfolded windows."""
    every = operands.results // len(operands.sample.positions)
    return sorted({*range(0, operands.results, max(1, every)), operands.results - 1})


def _sampled_rows(operands: Operands) -> Callable[[torch.Tensor], torch.Tensor]:
    at, filters = _rows_at(operands), list(operands.sample.filters)
    return lambda result: result[at].cpu()[:, filters]


def _signed(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    values = codes.to(torch.int16)
    return (values if dtype == torch.int8 else values // 2).to(torch.int8)


def _filled(rows: torch.Tensor, least: int) -> torch.Tensor:
    """With zeros below and behind, to the multiples that the library takes."""
    count, depth = rows.shape
    sizes = [-(-size // _MULTIPLE) * _MULTIPLE for size in (max(count, least), depth)]
    filled = rows.new_zeros(sizes)
    filled[:count, :depth] = rows
    return filled


def _untiled(subject: Subject) -> Peer:
    if not subject.codes:
        return _peer("untiled", subject, untiled_float(subject.operands))
    assert subject.table is not None
    call = untiled_codes(subject.operands, subject.table)
    return Peer("untiled", call, subject.operands.sample.of, subject.wanted)


def _torchapprox(subject: Subject) -> Peer:
    table, operands = _table(subject), subject.operands
    call = published.torchapprox(operands, table)
    rows = unfolded(operands).flatten(0, 1)[_rows_at(operands)].to(operands.x.dtype).cpu()
    weights = operands.weight.reshape(len(operands.weight), -1)[list(operands.sample.filters)].cpu()
    mac = CodeMac("lut8x8", table, rows.dtype == torch.int8, weights.dtype == torch.int8)
    return Peer("torchapprox", call, _sampled_rows(operands), linear_codes_ref(rows, weights, mac))


def _adapt(subject: Subject) -> Peer:
    call = published.adapt(subject.operands, _table(subject))
    return Peer("adapt", call, subject.operands.sample.of, subject.wanted)


def _table(subject: Subject) -> torch.Tensor:
    if subject.table is None:
        raise NotApplicableError("the operands are no 8-bit codes")
    return subject.table


def _peer(name: str, subject: Subject, call: Call) -> Peer:
    """One whose products are exact."""
    sample = subject.operands.sample
    wanted = sample.windows.double() @ sample.weights.double().t()
    return Peer(name, call, sample.of, wanted.long() if subject.codes else wanted)
