"""One row of `per-layer`: a layer trains by a placement plan, and says where its time goes."""

from __future__ import annotations

import dataclasses

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_contract.placement import PlacementPlan, plan_document
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.seeding import seed_everything
from narrowgauge_lab.spans import RecordedSpans

from .accounts import record_stages, trace_steps
from .bounds import record_bounds
from .correctness import check_layer, check_sweep
from .shapes import GROUPS
from .subject import Training
from .times import record_times
from .traffic import check_bytes

#: The value of `policy` that leaves a plan as it is.
_OWN = "own"


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    seed_everything(ctx.seed)
    shape, batch = GROUPS[ctx.parameters["group"]], int(ctx.parameters["batch"])
    plan = _plan(ctx)
    ctx.fact("shape", f"{batch}x {shape.text()}, stride {shape.stride}")
    ctx.fact("plan", plan_document(plan))
    try:
        training = Training(ctx, shape, batch, plan)
    except NotApplicableError as error:  # a precision that this device or torch has not, say
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    try:
        _measure(ctx, training)
    finally:
        training.close()


def _measure(ctx: RowContext, training: Training) -> None:
    mode = ctx.parameters["mode"]
    facts = training.converted.facts()
    ctx.fact("placed", facts)
    ctx.fact("accelerator", facts["accelerator"])
    if isinstance(ctx.spans, RecordedSpans):
        trace_steps(training, mode, ctx.spans)
    with ctx.span("correctness"):
        check_layer(ctx, training)
        if ctx.repeat == 0:  # the same small layers in each; at 8 bits their kernels are tuned anew
            check_sweep(ctx, training)
    with ctx.span("stages"):
        stages = record_stages(ctx, training, mode, ctx.parameters["iterations"])
    times = record_times(ctx, training)
    if mode == "overlapped":
        record_bounds(ctx, training, stages, times)
    check_bytes(ctx, training)


def _plan(ctx: RowContext) -> PlacementPlan:
    """The row's plan, with the row's policy. Raises SkippedError where no copy of the plan
    would be made by it."""
    plan, policy = ctx.plan(ctx.parameters["plan"]), ctx.parameters["policy"]
    if policy == _OWN:
        return plan
    reason = ""
    if plan.elsewhere != "cpu":
        reason = "everything is on the accelerator, and nothing travels"
    elif all(each.backend == "faithful" for each in plan.passes()):
        reason = "backend faithful copies as the original did"
    elif all(each.device == "cpu" for each in plan.passes()):
        reason = "everything is on the CPU, and nothing travels"
    if reason:
        raise SkippedError(
            f"the plan '{plan.name}' has no transfer policy {policy}",
            why=reason,
            next_step=f"-p policy={_OWN}",
        )
    return dataclasses.replace(plan, transfers=dataclasses.replace(plan.transfers, policy=policy))
