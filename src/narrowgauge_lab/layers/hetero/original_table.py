"""A layer's steps in the columns of the original's stage tables, in seconds, one row per step.

The original had two tables, one for each of its variants. What our stages are there:

| ours                 | TensorRT variant      | PyTorch variant |
|----------------------|-----------------------|-----------------|
| quantise, to_device  | load                  | to              |
| refit                | refit                 | to              |
| compute              | compute               | comp            |
| from_device, wait    | sync                  | back            |
| reshape              | reshape, or pre/post  | in the pass     |

The places agree and the times in them cannot: the original took the time of asynchronous calls, so
that its "compute" is that of queueing, and the products themselves are in its "sync" and "back",
which wait for them. The ledger's serial mode ends each stage when the device has done it.

`fwd` and `bwd` are whole calls, `total` is both; in-grad and w-grad are the sums of their stages.
"""

from __future__ import annotations

from typing import Dict, List, Sequence, Tuple

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.layers.hetero.ledger import Call, Interval

__all__ = ["COLUMNS", "VARIANTS", "headings", "original_table"]

VARIANTS = ("tensorrt", "pytorch")
_BACKWARD = ("input_grad", "weight_grad")
_Stages = Tuple[str, ...]

#: Stages by the original's words for them.
_TENSORRT: Dict[str, _Stages] = {
    "load": ("quantise", "to_device"), "refit": ("refit",), "compute": ("compute",),
    "sync": ("from_device", "wait"), "reshape": ("reshape",),
}  # fmt: skip
_PYTORCH: Dict[str, _Stages] = {
    "to": ("quantise", "to_device", "refit"), "comp": ("compute",), "back": ("from_device", "wait"),
}  # fmt: skip
_ALL: _Stages = tuple(stage for stages in _TENSORRT.values() for stage in stages)

#: Column -> (passes, stages) whose seconds it sums; of the columns that are not whole calls.
_Sums = Dict[str, Tuple[Tuple[str, ...], _Stages]]


def _tensorrt() -> _Sums:
    backward = {**_TENSORRT, "pre/post": _TENSORRT["reshape"]}
    del backward["reshape"]
    return {
        **{f"fwd {word}": (("forward",), stages) for word, stages in _TENSORRT.items()},
        "in-grad": (("input_grad",), _ALL),
        "w-grad": (("weight_grad",), _ALL),
        **{f"bwd {word}": (_BACKWARD, stages) for word, stages in backward.items()},
    }


def _pytorch() -> _Sums:
    sums: _Sums = {}
    for word, pass_ in (("fwd", "forward"), ("in-grad", "input_grad"), ("w-grad", "weight_grad")):
        if pass_ != "forward":
            sums[word] = ((pass_,), _ALL)
        sums.update({f"{word} {each}": ((pass_,), stages) for each, stages in _PYTORCH.items()})
    return sums


_SUMS = {"tensorrt": _tensorrt(), "pytorch": _pytorch()}


def _ordered(sums: _Sums) -> Tuple[str, ...]:
    forward = [name for name in sums if name.startswith("fwd ")]
    return ("fwd", *forward, "bwd", *(name for name in sums if name not in forward), "total")


#: The columns of each variant, in the original's order.
COLUMNS: Dict[str, Tuple[str, ...]] = {name: _ordered(sums) for name, sums in _SUMS.items()}


def headings(variant: str) -> Tuple[str, ...]:
    """The columns as the original printed them: a stage without the pass that it belongs to."""
    _require(variant)
    return tuple(name.rpartition(" ")[2] for name in COLUMNS[variant])


def original_table(
    calls: Sequence[Call], intervals: Sequence[Interval], layer: str, variant: str
) -> List[Dict[str, float]]:
    """One row per step of `layer`, by column, from a ledger in serial mode.

    A step is a forward call and the backward call that follows it; a forward call that none
    follows, as in an evaluation, is no step. Raises UnknownNameError for no such variant.
    """
    _require(variant)
    mine = [each for each in intervals if each.layer == layer]
    return [
        _row(forward, backward, mine, _SUMS[variant])
        for forward, backward in _steps(calls, layer)
    ]  # fmt: skip


def _require(variant: str) -> None:
    if variant not in VARIANTS:
        raise UnknownNameError("variant of the original", variant, VARIANTS)


def _steps(calls: Sequence[Call], layer: str) -> List[Tuple[Call, Call]]:
    ordered = sorted((each for each in calls if each.layer == layer), key=lambda each: each.start)
    return [
        (first, second)
        for first, second in zip(ordered, ordered[1:])
        if (first.direction, second.direction) == ("forward", "backward")
    ]


def _row(
    forward: Call, backward: Call, intervals: Sequence[Interval], sums: _Sums
) -> Dict[str, float]:
    during = [each for call in (forward, backward) for each in intervals if _is_in(each, call)]
    row = {
        name: sum(e.seconds for e in during if e.pass_ in passes and e.stage in stages)
        for name, (passes, stages) in sums.items()
    }
    row.update(fwd=forward.seconds, bwd=backward.seconds)
    row["total"] = forward.seconds + backward.seconds
    return {name: row[name] for name in _ordered(sums)}


def _is_in(interval: Interval, call: Call) -> bool:
    # The backward call may begin where the forward call ends.
    return call.start <= interval.start < call.start + call.seconds
