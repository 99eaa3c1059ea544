"""One row of `tensor-cores`: a workload at one setting, clean or contaminated."""

from __future__ import annotations

from typing import Optional

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.energy import Source, source_or_invalid
from narrowgauge_lab.seeding import seed_everything

from . import contaminated, inference, linear
from .network import INFERENCE, TRAINING


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    seed_everything(ctx.seed)
    # Now, so that a source that is not here is said before anything is measured.
    source = source_or_invalid(ctx, ctx.parameters["energy"], ctx.device)
    try:
        _measure(ctx, source)
    finally:
        if source is not None:
            source.close()


def _measure(ctx: RowContext, source: Optional[Source]) -> None:
    name, clean = ctx.parameters["workload"], ctx.parameters["protocol"] == "clean"
    if name in INFERENCE:
        measure = inference.measure if clean else contaminated.measure_inference
        measure(ctx, INFERENCE[name], source)
    else:
        train = linear.measure if clean else contaminated.measure_training
        train(ctx, TRAINING[name], source)
