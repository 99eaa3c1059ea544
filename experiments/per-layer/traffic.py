"""The bytes that a step moves, as torch's profiler saw the copies, against our own count."""

from __future__ import annotations

from typing import Dict

from narrowgauge_lab import torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.kineto import KinetoProfiler

from .subject import Training

__all__ = ["check_bytes"]

#: How far the two counts may be apart.
_TOLERANCE = 1e-3
_STEPS = 5
_LANES = {"to_device": "H2D", "from_device": "D2H"}


def check_bytes(ctx: RowContext, training: Training) -> None:
    """Record the fact `bytes_profiled`: per step, by the profiler and by count. The row is INVALID
    where they are more than 0.1 % apart. Only on CUDA, and once: the profiler takes seconds to
    begin; `bytes_profiled_missing` says why else there is none."""
    missing = _missing(ctx, training)
    if missing:
        ctx.fact("bytes_profiled_missing", missing)
        return
    ledger = training.account("bytes")
    training.step()
    training.finish()
    ledger.clear()
    profiler = KinetoProfiler(training.device)
    profiler.start()
    for _ in range(_STEPS):
        training.step()
    profiler.stop()
    counted = dict(zip(_LANES, ledger.bytes_moved()))
    training.account("off")
    ctx.folder.mkdir(parents=True, exist_ok=True)
    copies = [each for each in profiler.events(ctx.folder) if each.kind == "copy"]
    seen: Dict[str, int] = {}
    for name, lane in _LANES.items():
        bytes_of = [int(each.args.get("bytes", 0)) for each in copies if each.lane.endswith(lane)]
        seen[name] = sum(bytes_of)
    ctx.fact(
        "bytes_profiled",
        {
            name: {"profiler": seen[name] / _STEPS, "count": counted[name] / _STEPS}
            for name in _LANES
        },
    )
    for name in _LANES:
        if abs(seen[name] - counted[name]) > _TOLERANCE * max(seen[name], counted[name]):
            ctx.invalid(
                f"bytes {name.replace('_', ' ')}: we count {counted[name]} in {_STEPS} steps, and "
                f"torch's profiler saw {seen[name]}; within {_TOLERANCE:.1%} was asked for"
            )


def _missing(ctx: RowContext, training: Training) -> str:
    if training.device.type != "cuda":
        return "copies between buffers of one CPU are none of a bus"
    if ctx.repeat != 0:
        return "only the first repeat is profiled"
    if not torch_compat.profiler_available():
        return "this torch has no profiler"
    if torch_compat.profiling():
        return "the row is profiled already, and torch has one profiler per thread"
    chooser = training.converted.bus.chooser
    if chooser is not None:
        mapped = [each for each in chooser.choices if each.mapped < each.copied]
        if mapped:
            return "policy mapped: small copies are made by a kernel, which moves no counted bytes"
    return ""
