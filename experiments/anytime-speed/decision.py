"""What one decision to go on costs: by a conditional graph node, and by a host read."""

from __future__ import annotations

import statistics
from typing import List, Optional, Sequence, Tuple

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_contract.order_statistics import median_bounds
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab.anytime.device_exit import (
    CapturedStages,
    ConditionalExits,
    SteppedExits,
    all_stages,
)
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.graphs import CaptureError
from narrowgauge_lab.measure import Comparison, interleave
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily

from .nets import Subject, nobody
from .shares import plan_of

__all__ = ["decision", "least_median", "per_decision"]


def decision(ctx: RowContext, subject: Subject) -> None:
    """Record `decision_device` and `decision_host`, the seconds that each of them adds to the same
    captured work without decisions, for each exit but the last; `decision_times` is host over
    device. Nobody leaves, so all of them do the same. Raises SkippedError where there is no such
    node, or the network cannot be captured; INVALID unless the device's decision takes more than
    nothing for sure: the 95 % interval of its median lies above 0."""
    if ctx.device.type != "cuda":
        raise SkippedError(
            "there is no decision on a device to time",
            why=f"the {ctx.device.type} is the host itself",
            next_step="a GPU, with a driver of CUDA 12.4 and torch 2.8 or later",
        )
    net, images, costs = subject.net, subject.images, subject.costs
    policy = nobody(ctx.parameters["policy"])
    try:
        device = ConditionalExits(CapturedStages(net, images, policy, costs))
        stages = CapturedStages(net, images, policy, costs)
        straight = all_stages(stages)
    except (CaptureError, KernelsError, NotApplicableError) as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    host = SteppedExits(stages)

    def without() -> None:
        stages.load(images)
        straight.launch()

    def both() -> Tuple[Comparison, Comparison]:
        plan, pairs = plan_of(ctx), ctx.parameters["pairs"]
        return (
            interleave(without, lambda: device(images), ctx.device, plan, pairs),
            interleave(without, lambda: host(images), ctx.device, plan, pairs),
        )

    by_device, by_host = steadily(ctx, both, ctx.device)
    decisions = net.exits - 1
    ctx.fact("way", device.description)
    ctx.fact("decisions", decisions)
    record_samples(ctx, "seconds_without", by_device.first)
    record_samples(ctx, "seconds_device", by_device.second)
    record_samples(ctx, "seconds_host", by_host.second)
    of_device, of_host = per_decision(by_device, decisions), per_decision(by_host, decisions)
    record_samples(ctx, "decision_device", by_device.second, of_device)
    record_samples(ctx, "decision_host", by_host.second, of_host)
    least = least_median(of_device)
    ctx.fact("decision_device_least", least)
    if least is None or least <= 0:
        ctx.invalid(
            f"{len(of_device)} pairs are too few for an interval of the device's decisions"
            if least is None
            else f"the device's decisions may take no time: the interval begins at {least:.3g} s"
        )
        return
    typical = statistics.median(of_device)
    times = [seconds / typical for seconds in of_host]
    record_samples(ctx, "decision_times", by_host.second, times, "1")


def least_median(values: Sequence[float]) -> Optional[float]:
    """The lower end of the 95 % interval of the median, by order statistics; None of too few."""
    bounds = median_bounds(values)
    return None if bounds is None else bounds[0]


def per_decision(beside: Comparison, decisions: int) -> List[float]:
    """Seconds that each decision adds, pair by pair."""
    pairs = zip(beside.first.seconds, beside.second.seconds)
    return [(second - first) / decisions for first, second in pairs]
