"""The time of a step: by the instrument in one process, in step with each other in several."""

from __future__ import annotations

import math
import time
from typing import Any, List

import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import Group
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import faults_between, read_state, steadily
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

from .setups import Training

__all__ = ["record_times"]

#: Of several processes: seconds of a sample at least, samples at least and at most.
_SAMPLE_S, _LEAST, _MOST = 0.1, 5, 200
_WARM_UP = 5


def record_times(ctx: RowContext, training: Training, group: Group, batch: int) -> None:
    """Record `step` and `images_per_second`, of all processes together; `batch` is of each."""
    if group.size > 1:
        _record_shared(ctx, training, group, batch)
        return
    limit = ctx.parameters["limit_s"]
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=2.0 * limit)
    samples: Samples = steadily(
        ctx, lambda: measure_time(training, training.home, plan), ctx.device
    )
    record_samples(ctx, "step", samples)
    rates = [batch / seconds for seconds in samples.seconds]
    record_samples(ctx, "images_per_second", samples, rates, "image/s")


def _record_shared(ctx: RowContext, training: Training, group: Group, batch: int) -> None:
    """Samples of several steps, from all processes at rest to all at rest again; each counts as
    long as the slowest process took. All agree on how many, or one would wait for ever."""
    for _ in range(_WARM_UP):
        training()
    once = _sample(training, group, 1)
    calls = max(1, math.ceil(_SAMPLE_S / once))
    count = int(ctx.parameters["limit_s"] / (calls * once))
    before = read_state(ctx.device)
    seconds: List[float] = []
    for _ in range(min(_MOST, max(_LEAST, count))):
        seconds.append(_sample(training, group, calls))
    faults = faults_between(before, read_state(ctx.device), ctx.device)
    held = group.sum([1.0 if faults else 0.0])[0]
    if held:
        ctx.invalid(f"{held:.0f} of {group.size} devices were held back: {'; '.join(faults)}")
    conditions: Any = {"calls_per_sample": calls, "warm_up_calls": _WARM_UP + 1}
    source = "monotonic, slowest rank"
    ctx.metric("step", seconds, unit="s", source=source, conditions=conditions)
    rates = [batch * group.size / each for each in seconds]
    ctx.metric("images_per_second", rates, unit="image/s", source=source, conditions=conditions)


def _sample(training: Training, group: Group, calls: int) -> float:
    group.wait()
    began = time.perf_counter()
    for _ in range(calls):
        training()
    if training.device.type == "cuda":
        torch.cuda.synchronize(training.device)
    return group.largest((time.perf_counter() - began) / calls)
