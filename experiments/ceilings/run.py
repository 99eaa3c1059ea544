"""One row of `ceilings`: measure one, and keep every sample."""

from __future__ import annotations

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.ceilings import MACS, ceiling
from narrowgauge_lab.measure.state import steadily


def run(ctx: RowContext) -> None:
    """Record the rate of each sample, and what was done by which library.

    Raises NotApplicableError for a ceiling that this device or this torch does not have.
    """
    name, seconds = ctx.parameters["ceiling"], ctx.parameters["seconds"]
    found = steadily(ctx, lambda: ceiling(name, ctx.device, seconds), ctx.device)
    ctx.fact("ceiling", found.to_fact())
    ctx.metric(
        "macs_per_second" if found.unit == MACS else "bytes_per_second",
        [found.work / each for each in found.samples.seconds],
        unit=found.unit,
        source=found.samples.source,
        conditions=found.samples.conditions(),
    )
