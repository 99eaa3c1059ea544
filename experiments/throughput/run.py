"""One row of `throughput`: so many workers with so large batches, all at once."""

from __future__ import annotations

import os

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.registry import require_here
from narrowgauge_lab.measure.agreement import reference_output
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.measure.steady import NotSteadyError, steady_window
from narrowgauge_lab.networks.subject import make_subject
from narrowgauge_lab.seeding import seed_everything

from .records import record_calls, record_ran, record_steady
from .stations import plan_stations
from .work import work_together


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    seed_everything(ctx.seed)
    parameters, device = ctx.parameters, ctx.device
    stations = plan_stations(parameters, device.type, len(os.sched_getaffinity(0)))
    require_here(parameters["engine"], parameters["precision"], device)
    subject = make_subject(
        parameters["model"],
        parameters["weights"],
        max(each.batch for each in stations),
        run_seed=ctx.seed - ctx.repeat,
        images_seed=ctx.seed,
        files=ctx.files,
    )
    ctx.fact("weights", subject.weights)
    ctx.fact("pictures", subject.pictures)
    reference = reference_output(subject.model, subject.images, device)
    tf32_flags.allow_tf32(parameters["precision"] == "tf32")
    let_work = work_together(ctx, subject, stations)
    worked, reports = steadily(ctx, let_work, device)
    record_calls(ctx, worked)
    try:
        steady = steady_window(worked, parameters["warm_up_s"])
    except NotSteadyError as error:
        ctx.invalid(": ".join(filter(None, (error.what, error.why))))
        return
    record_ran(ctx, stations, reports, reference)
    record_steady(ctx, steady, parameters["warm_up_s"])
