"""One row of `sparse-energy`: what a network by one way draws for each picture."""

from __future__ import annotations

from typing import Tuple

import torch

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.account import check_precision
from narrowgauge_lab.engines.base import DTYPES, Runner
from narrowgauge_lab.measure.agreement import check_output, reference_output
from narrowgauge_lab.measure.energy import EnergyPlan, measure_energy
from narrowgauge_lab.networks.pictures import Sources, pictured
from narrowgauge_lab.seeding import seed_everything
from narrowgauge_lab.sparse_networks import make_ready

_LIMITS = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2}


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say, one picture a call. A host that cannot say what it draws
    makes the row INVALID; with energy=none only the outputs are checked."""
    parameters = ctx.parameters
    if parameters["threads"]:
        # First of all: torch 1.8 crashes where a convolution ran with another number before.
        torch.set_num_threads(parameters["threads"])
    seed_everything(ctx.seed)
    precision = parameters["precision"]
    seed = ctx.seed - ctx.repeat
    made = pictured(parameters["model"], Sources.of(parameters, ctx.files), seed)
    ctx.fact("weights", made.weights)
    ctx.fact("pictures", made.pictures)
    strict = reference_output(made.model, made.images, ctx.device)
    tf32_flags.allow_tf32(precision == "tf32")
    images = made.images.to(device=ctx.device, dtype=DTYPES[precision]).split(1)
    ready = make_ready(
        parameters["engine"], made.model, images[0], precision, parameters["calibrate_s"]
    )
    try:
        ctx.fact("sparse_layers", ready.sparse_layers)
        outputs = torch.cat([ready.runner(images[i]).clone() for i in range(len(strict))])
        check_output(ctx, outputs, strict, precision, source="fp64", limits=_LIMITS)
        layers = {"the way": ready.runner.layers()}
        check_precision(ctx, precision, ready.runner.observations(), layers)
        _measure(ctx, ready.runner, images)
    finally:
        ready.runner.close()


def _measure(ctx: RowContext, runner: Runner, images: Tuple[torch.Tensor, ...]) -> None:
    """A call is of one picture, and they go through all and over again. Nothing waits between them,
    whichever way it is. Metrics `energy_gross` and `energy_net`, J per picture."""
    at = 0

    def call() -> None:
        nonlocal at
        runner(images[at])
        at = (at + 1) % len(images)

    plan = EnergyPlan(seconds=ctx.parameters["window_s"], windows=ctx.parameters["windows"])
    result = measure_energy(ctx, call, ctx.device, ctx.parameters["energy"], plan)
    if result is not None:
        rates = [window.calls / window.seconds for window in result.windows]
        ctx.metric("images_per_second", rates, unit="image/s", source="monotonic")
