"""One row of `hetero-tax`: a whole network trains by one setup, and says why it takes so long."""

from __future__ import annotations

import functools
from typing import Optional

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab import distributed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.hetero.locking import lock_pages
from narrowgauge_lab.measure import probe
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.seeding import seed_everything

from .agreement import check_training, strict_training
from .reasons import record_bytes, record_memory, record_reason
from .setups import Training, asked_plan, require_here
from .subjects import subject
from .times import record_times


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say, in as many processes."""
    plan = asked_plan(ctx)
    require_here(ctx, plan)
    distributed.spread(ctx, ctx.parameters["nproc"], functools.partial(_measure, plan))


def _measure(plan: Optional[PlacementPlan], ctx: RowContext, group: distributed.Group) -> None:
    seed_everything(ctx.seed)
    name, batch = ctx.parameters["network"], int(ctx.parameters["batch"])
    if plan is not None:
        lock_pages(plan, ctx.device)  # before there are images
    what = subject(name, batch, ctx.seed, group.rank)
    ctx.fact("pictures", "noise, mean 0 and variance 1, with random labels: made up")
    on_gpu = ctx.device.type == "cuda"
    ctx.fact("accelerator", str(ctx.device) if on_gpu else "cpu (stand-in)")
    cost = count(what.model.eval(), what.images[:1])
    what.model.train()
    strict = strict_training(what, ctx.device)
    try:
        training = Training(ctx, what, plan, group)
    except NotApplicableError as error:  # a precision that this device or torch has not, say
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    try:
        check_training(ctx, training, strict)
        _require_precisions(training)
        moved = record_bytes(ctx, training)
        record_times(ctx, training, group, batch)
        ctx.fact("steps_ran", training.description)
        record_memory(ctx, training)
        if group.size == 1:
            record_reason(ctx, cost, moved, batch, _precision(plan))
    finally:
        training.close()


def _require_precisions(training: Training) -> None:
    """What a plan says must be what ran; `best` was looked at before it was compiled."""
    if training.placed is not None:
        values = training.optimizer.values
        training.placed.record(training.differentiate, len(training.labels), values)
        training.placed.require_precisions(probe.observe(training.differentiate))


def _precision(plan: Optional[PlacementPlan]) -> str:
    """What the products are computed in, by whose best the step is held."""
    return "bf16" if plan is None else "+".join(plan.precisions())
