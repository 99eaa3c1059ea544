"""What rows of every experiment record: samples, work, memory, energy, and whether the speed is
possible at all."""

from __future__ import annotations

import statistics
from typing import Any, Callable, Optional, Sequence

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.ceilings import Ceiling
from narrowgauge_lab.measure.cost import Cost, peak_memory
from narrowgauge_lab.measure.energy import Source, measure_energy
from narrowgauge_lab.measure.kernels import kernel_names
from narrowgauge_lab.measure.roofline import (
    ceiling_of_precision,
    ceiling_over,
    require_possible,
)
from narrowgauge_lab.measure.timing import Samples

__all__ = ["record_cost", "record_energy", "record_kernels", "record_samples"]

Call = Callable[[], Any]

#: Seconds that the ceiling is measured for, unless the row's own samples may take less.
_CEILING_S = 0.25
#: The longest kernels of a call, which are most of its time.
_KERNELS = 12


def record_samples(
    ctx: RowContext,
    name: str,
    samples: Samples,
    values: Optional[Sequence[float]] = None,
    unit: str = "s",
    source: str = "",
) -> None:
    """Record the samples' seconds, or the `values` that were made of them, as a metric."""
    listed = list(samples.seconds if values is None else values)
    ctx.metric(
        name, listed, unit=unit, source=source or samples.source, conditions=samples.conditions()
    )


def record_cost(
    ctx: RowContext, cost: Cost, call: Call, batch: int, latency: Samples, precision: str
) -> None:
    """Record the work per second and its share of the measured ceiling; on a GPU also the memory.

    The row is INVALID where it is faster than the ceiling leaves room for. Where torch has no
    product in `precision` that could be one, `ceiling_missing` says so.
    """
    per_call = cost.macs / cost.batch * batch
    rates = [per_call / seconds for seconds in latency.seconds]
    record_samples(ctx, "macs_per_second", latency, rates, "MAC/s")
    rate = batch / statistics.median(latency.seconds)
    seconds = min(_CEILING_S, ctx.parameters["limit_s"])

    def look() -> Ceiling:
        return ceiling_of_precision(precision, ctx.device, seconds)

    try:
        limit = ceiling_over(cost, rate, look)
    except NotApplicableError as error:  # torch 1.8 has no int8 product on a GPU; TensorRT has
        ctx.fact("ceiling_missing", f"{error.what}: {error.why}")
    else:
        require_possible(ctx, cost, rate, precision, limit)
    if ctx.device.type == "cuda":
        # On a CPU it would have to be the process's first call, which the probe has seen.
        ctx.metric("peak_memory", peak_memory(ctx.device, call), unit="B", source="torch")


def record_kernels(ctx: RowContext, call: Call) -> None:
    """Record which GPU kernels the call's time goes to, and whether their names are those of tensor
    cores. Only in the first repeat: the profiler takes seconds to begin."""
    if ctx.device.type != "cuda" or ctx.repeat != 0:
        return
    try:
        kernels = kernel_names(call)
    except NotApplicableError as error:  # the row is profiled, or this torch has no profiler
        ctx.fact("kernels_missing", f"{error.what}: {error.why}")
        return
    total = sum(kernel.seconds for kernel in kernels)
    ctx.fact(
        "kernels",
        [
            {
                "name": kernel.name,
                "calls": kernel.calls,
                "share": kernel.seconds / total,
                "tensor_cores": kernel.tensor_cores,
            }
            for kernel in kernels[:_KERNELS]
        ],
    )


def record_energy(ctx: RowContext, call: Call, batch: int, source: Optional[Source]) -> None:
    """Record what a call draws, and each image of it, where energy was asked for."""
    result = measure_energy(ctx, call, ctx.device, source)
    if source is None or result is None or result.net is None:
        return
    label = source.label(source.total.rails)
    per_image = [joules / batch for joules in result.net]
    ctx.metric("energy_per_image", per_image, unit="J", source=label)
