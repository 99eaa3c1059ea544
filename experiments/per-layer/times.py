"""The times of one row: the layer's passes and the whole step, with no ledger beside them."""

from __future__ import annotations

from typing import Any, Callable, Dict

import torch

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.measure.timing import Samples, TimingPlan, measure_time

from .subject import Training

__all__ = ["PARTS", "plan_for", "record_times"]

PARTS = ("forward", "backward", "step")
#: A warm-up that does not become steady ends after so many times the limit of samples.
_WARM_UP_LIMITS = 2.0


def plan_for(ctx: RowContext, share: float = 1.0) -> TimingPlan:
    """`share` of the row's limit for one measurement."""
    limit = ctx.parameters["limit_s"] * share
    return TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)


def record_times(ctx: RowContext, training: Training) -> Dict[str, Samples]:
    """Record `forward` and `backward` of the layer alone, and `step` with loss and optimiser.

    Where the home is the CPU a call is done when it returns, and the host's clock times it; on a
    GPU calls are queued back to back, as in training, and the GPU's clock does. Measured again
    where something held the device back.
    """
    plan = plan_for(ctx)

    def measure() -> Dict[str, Samples]:
        # Made anew each time: steps change the weights that its backward pass needs.
        images = training.batches[0]
        outputs = training.model(images)
        above = training.above(outputs)
        calls: Dict[str, Callable[[], Any]] = {
            "forward": training.forward,
            "backward": lambda: training.backward_of(outputs, images, above),
            "step": training.step,
        }
        return {name: measure_time(call, training.home, plan) for name, call in calls.items()}

    times: Dict[str, Samples] = steadily(ctx, measure, ctx.device)
    for name, samples in times.items():
        record_samples(ctx, name, samples)
    ctx.fact("peak_memory_bytes", _peak(training))
    return times


def _peak(training: Training) -> int:
    """What a step takes on the accelerator at most, as torch counts; 0 on a CPU."""
    if training.device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(training.device)
    training.step()
    training.finish()
    return int(torch.cuda.max_memory_allocated(training.device))
