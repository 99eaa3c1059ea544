"""What one decision to go on costs: by a conditional graph node, and by a host read."""

from __future__ import annotations

import statistics
from typing import List, Tuple

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab.anytime.device_exit import (
    CapturedStages,
    ConditionalExits,
    SteppedExits,
    all_stages,
)
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import Comparison, interleave
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily

from .nets import Subject, nobody
from .shares import plan_of

__all__ = ["decision", "per_decision"]


# unverified: decisions of captured stages, timed | no GPU here | anytime-speed -p measure=decision
def decision(ctx: RowContext, subject: Subject) -> None:
    """Record `decision_device` and `decision_host`, the seconds that each of them adds to the same
    captured work without decisions, for each exit but the last; `decision_times` is host over
    device. Nobody leaves, so all of them do the same. Raises SkippedError where there is no such
    node; INVALID where the device's decision is less than can be told."""
    if ctx.device.type != "cuda":
        raise SkippedError(
            "there is no decision on a device to time",
            why=f"the {ctx.device.type} is the host itself",
            next_step="a GPU, with a driver of CUDA 12.4 and torch 2.8 or later",
        )
    net, images, costs = subject.net, subject.images, subject.costs
    policy = nobody(ctx.parameters["policy"])
    try:
        stages = CapturedStages(net, images, policy, costs)
        device, straight = ConditionalExits(stages), all_stages(stages)
    except (KernelsError, NotApplicableError) as error:
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
    typical = statistics.median(of_device)
    if typical <= 0:
        ctx.invalid("the device's decisions take less time than the clock can tell")
        return
    times = [seconds / typical for seconds in of_host]
    record_samples(ctx, "decision_times", by_host.second, times, "1")


def per_decision(beside: Comparison, decisions: int) -> List[float]:
    """Seconds that each decision adds, pair by pair."""
    pairs = zip(beside.first.seconds, beside.second.seconds)
    return [(second - first) / decisions for first, second in pairs]
