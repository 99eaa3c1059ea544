"""The times of one row: the seconds of the original's loop, latency in samples, and what binds."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Optional, Tuple

import torch

from narrowgauge_kernels.errors import KernelsNotBuiltError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.measure import Window, window
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

from .evidence import bound_by
from .setups import LEVELS

__all__ = ["Loop", "Times", "measure_times", "record_times", "run_unsynchronised", "synchronise"]

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Loop:
    """The original's measurement: so many calls, and what its seconds are said to be for
    ("3000 images"). No calls: it is left out."""

    calls: int
    timed: str


@dataclasses.dataclass(frozen=True)
class Times:
    """Everything measured in one window without faults."""

    loop: Optional[Window]
    latency: Samples
    #: With launches hidden; None where that was not asked for, or could not be, which `why` says.
    busy: Optional[Samples]
    why_no_busy: str


def measure_times(ctx: RowContext, call: Call, loop: Loop, *, eager: bool) -> Times:
    """Measure, again where something held the device back, until the row is INVALID for it.

    For an `eager` call on a GPU, the device's own time is measured too.
    """
    plan, device = TimingPlan(limit_s=ctx.parameters["limit_s"]), ctx.device

    def measure() -> Times:
        latency = measure_time(call, device, plan)  # first: it warms up until steady
        busy, why = _busy(call, device, plan) if eager and device.type == "cuda" else (None, "")
        return Times(_run(call, loop.calls, device), latency, busy, why)

    times: Times = steadily(ctx, measure, device)
    return times


def _busy(call: Call, device: torch.device, plan: TimingPlan) -> Tuple[Optional[Samples], str]:
    """The device's time with launches hidden. There is no such figure, and a reason instead, where
    a network has more launches than a stream queues or waits in between, and where nobody compiled
    the kernel that holds the stream."""
    try:
        return measure_time(call, device, dataclasses.replace(plan, hide_launches=True)), ""
    except (HeldTooLongError, KernelsNotBuiltError) as error:
        return None, f"{error.what}: {error.why}"


def _run(call: Call, calls: int, device: torch.device) -> Optional[Window]:
    if calls == 0:
        return None
    with window(device) as taken:
        for _ in range(calls):
            call()
    return taken


def record_times(ctx: RowContext, times: Times, batch: int, loop: Loop) -> None:
    """Record `seconds`, `latency`, `images_per_second`; on a GPU also `enqueue`, `gpu_busy` and
    what the row is bound by."""
    if times.loop is not None:
        ctx.metric("seconds", times.loop.seconds, unit="s", source=times.loop.source)
        ctx.fact("timed", loop.timed)
        ctx.log(f"{_line(ctx.parameters['mode'])}: {times.loop.seconds:.2f} seconds")
    latency = times.latency
    record_samples(ctx, "latency", latency)
    rates = [batch / seconds for seconds in latency.seconds]
    record_samples(ctx, "images_per_second", latency, rates, "image/s")
    if latency.source == "monotonic":
        return  # a CPU: what queues is what computes
    record_samples(ctx, "enqueue", latency, latency.host_seconds, source="monotonic")
    if times.busy is not None:
        record_samples(ctx, "gpu_busy", times.busy)
    elif times.why_no_busy:
        ctx.fact("gpu_busy_missing", times.why_no_busy)
    busy = None if times.busy is None else times.busy.seconds
    bound = bound_by(latency.seconds, latency.host_seconds, busy)
    ctx.fact("bound_by", bound.by)
    ctx.fact("bound_by_proof", bound.proof)


def _line(mode: str) -> str:
    """What the original prints when a level is done: "AMP (opt level O3)", "Float32"."""
    name = LEVELS.get(mode, mode)
    return f"AMP (opt level {mode})" if name.startswith("AMP ") else name


def run_unsynchronised(call: Call, calls: int) -> float:
    """Seconds by the original's clock: nothing is waited for, neither before nor after."""
    began = time.perf_counter()
    for _ in range(calls):
        call()
    return time.perf_counter() - began


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
