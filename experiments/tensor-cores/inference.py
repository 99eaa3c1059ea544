"""A clean inference row: one network, one setup, one process."""

from __future__ import annotations

import dataclasses
import math
from typing import Optional

import torch

from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.agreement import check_output
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.measure.energy import Source
from narrowgauge_lab.measure.probe import require_precision, tf32_by_arithmetic
from narrowgauge_lab.measure.recording import record_cost, record_energy, record_kernels

from . import setups
from .apex import patched_functions
from .engines import make_ready
from .evidence import reference_output
from .network import Inference
from .times import Loop, measure_times, record_times

__all__ = ["loop_for", "make_images", "measure"]


def measure(ctx: RowContext, workload: Inference, source: Optional[Source]) -> None:
    """Measure one clean row of `workload`, as the row's parameters ask; energy from `source`."""
    parameters, device = ctx.parameters, ctx.device
    setup = setups.from_parameters(parameters)
    setups.require(setup, device)
    ctx.fact("setup", dataclasses.asdict(setup))
    ctx.fact("patched_functions", patched_functions())
    model = workload.build()
    images = make_images(ctx, workload)
    cost = count(model, images[:1])
    reference = reference_output(model, images, device)
    tf32_flags.allow_tf32(setup.precision == "tf32")
    tf32 = tf32_by_arithmetic(device)
    network = make_ready(model, images, setup, device, parameters["compile_mode"])
    ctx.fact("engine_ran", network.engine)
    require_precision(ctx, setup.precision, network.observations, tf32)
    check_output(ctx, network.call().clone(), reference, setup.precision)
    loop, batch = loop_for(ctx), int(parameters["batch"])
    times = measure_times(ctx, network.call, loop, eager=setup.engine == "eager")
    record_times(ctx, times, batch, loop)
    record_cost(ctx, cost, network.call, batch, times.latency, setup.precision)
    record_kernels(ctx, network.call)
    record_energy(ctx, network.call, batch, source)


def make_images(ctx: RowContext, workload: Inference) -> torch.Tensor:
    """One batch of noise between 0 and 1, float32 on the CPU, as the original's; the same for every
    row of a seed and batch."""
    size = workload.size
    generator = torch_compat.generator_for(torch.device("cpu"), ctx.seed)
    return torch.rand(ctx.parameters["batch"], 3, size, size, generator=generator)


def loop_for(ctx: RowContext) -> Loop:
    """As many whole batches as hold the images asked for."""
    batch = int(ctx.parameters["batch"])
    calls = math.ceil(ctx.parameters["images"] / batch)
    return Loop(calls, f"{calls * batch} images")
