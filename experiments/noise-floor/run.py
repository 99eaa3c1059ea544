"""One row of `noise-floor`: compare an operation with itself, several times, in one process."""

from __future__ import annotations

import dataclasses
from typing import List

import torch

from narrowgauge_lab import precision
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure import Comparison, TimingPlan, interleave
from narrowgauge_lab.measure.state import steadily

from .workloads import repeated, second_iterations, workload

#: The time of a comparison is limited by its pairs; this only ends one that has gone astray.
# unverified: claims and minutes of profile paper | no GPU here | narrowgauge run --profile paper
_PLAN = TimingPlan(limit_s=120.0)
#: Of the other workloads the device's own time counts: the host's noise in launching is its.
_LAUNCH = "launch"


def run(ctx: RowContext) -> None:
    """Compare as `ctx.parameters` say. Raises BadValueError for a slowdown that is not exact."""
    parameters = ctx.parameters
    iterations = parameters["iterations"]
    slowed = second_iterations(iterations, parameters["planted"])
    precision.enter("fp32", ctx.device)
    operation = workload(parameters["workload"], parameters["size"], ctx.device)
    plan = dataclasses.replace(_PLAN, hide_launches=parameters["workload"] != _LAUNCH)

    def compare() -> List[Comparison]:
        found = []
        with torch.no_grad():
            for number in range(parameters["comparisons"]):
                first, second = repeated(operation, iterations), repeated(operation, slowed)
                found.append(interleave(first, second, ctx.device, plan, parameters["pairs"]))
                ctx.progress(number + 1, parameters["comparisons"], "comparisons")
        return found

    comparisons = steadily(ctx, compare, ctx.device)
    _record(ctx, comparisons)
    ctx.fact("iterations", [iterations, slowed])
    ended_early = sum(c.first.stopped == "time limit" for c in comparisons)
    if ended_early:
        ctx.invalid(f"{ended_early} comparisons did not end within {_PLAN.limit_s:g} s")


def _record(ctx: RowContext, comparisons: List[Comparison]) -> None:
    """All samples in order; how many pairs each comparison has tells them apart again."""
    ctx.fact("pairs", [len(c.ratios) for c in comparisons])
    ctx.fact("steady", [c.first.steady and c.second.steady for c in comparisons])
    for each in comparisons:
        first, second = each.first, each.second
        both = {"first": first.conditions(), "second": second.conditions()}
        ctx.metric("ratio", each.ratios, unit="1", source=first.source, conditions=both)
        for name, side in (("latency_first", first), ("latency_second", second)):
            conditions = side.conditions()
            ctx.metric(name, side.seconds, unit="s", source=side.source, conditions=conditions)
