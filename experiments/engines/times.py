"""The times of one row: latency call by call, and throughput back to back."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

__all__ = ["Times", "measure_times", "record_times"]

Call = Callable[[], Any]

#: A warm-up that does not become steady ends after so many seconds, or times the limit of samples.
_WARM_UP_S, _WARM_UP_LIMITS = 5.0, 10.0


@dataclasses.dataclass(frozen=True)
class Times:
    """Both measured in one window without faults. `alone`: each call waited for before the next."""

    alone: Samples
    back_to_back: Samples


def measure_times(ctx: RowContext, call: Call) -> Times:
    """Measure, again where something held the device back, until the row is INVALID for it."""
    limit, device = ctx.parameters["limit_s"], ctx.device
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=min(_WARM_UP_S, _WARM_UP_LIMITS * limit))

    def waited_for() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def measure() -> Times:
        alone = measure_time(waited_for, device, dataclasses.replace(plan, calls=1))
        return Times(alone, measure_time(call, device, plan))

    times: Times = steadily(ctx, measure, device)
    return times


def record_times(ctx: RowContext, times: Times, batch: int) -> None:
    """Record `latency`, `images_per_second`; on a GPU also `enqueue`."""
    record_samples(ctx, "latency", times.alone)
    steady = times.back_to_back
    rates = [batch / seconds for seconds in steady.seconds]
    record_samples(ctx, "images_per_second", steady, rates, "image/s")
    if steady.source != "monotonic":  # on a CPU what queues is what computes
        record_samples(ctx, "enqueue", steady, steady.host_seconds, source="monotonic")
