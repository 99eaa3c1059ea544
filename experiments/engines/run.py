"""One row of `engines`: a network by one engine, in one precision, at one batch."""

from __future__ import annotations

import torch

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.account import check_precision, record_layers
from narrowgauge_lab.engines.base import DTYPES, Runner
from narrowgauge_lab.engines.registry import require_here
from narrowgauge_lab.measure.agreement import LIMITS, check_output, reference_output
from narrowgauge_lab.measure.cost import Cost, count
from narrowgauge_lab.measure.recording import record_cost, record_kernels
from narrowgauge_lab.networks import network
from narrowgauge_lab.networks.subject import Subject, count_right, make_subject
from narrowgauge_lab.seeding import seed_everything

from .building import build, options_for
from .times import measure_times, record_times

#: One scale for all of a layer's activations costs MobileNetV2 half of its logits' norm, while it
#: still answers 18 of 20 images right; what answers nothing is off by 1 or more.
_LIMITS = {**LIMITS, "int8": 0.9, "fp8": 0.9}


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    seed_everything(ctx.seed)
    name, precision = ctx.parameters["engine"], ctx.parameters["precision"]
    options = options_for(name, ctx.parameters["options"])
    model, batch = ctx.parameters["model"], int(ctx.parameters["batch"])
    size = network(model).size
    ctx.fact("input_shape", f"{batch}x3x{size}x{size}")
    require_here(name, precision, ctx.device)
    subject = make_subject(
        model,
        ctx.parameters["weights"],
        batch,
        run_seed=ctx.seed - ctx.repeat,
        images_seed=ctx.seed,
        files=ctx.files,
    )
    ctx.fact("weights", subject.weights)
    ctx.fact("pictures", subject.pictures)
    cost = count(subject.model, subject.images[:1])
    reference = reference_output(subject.model, subject.images, ctx.device)
    tf32_flags.allow_tf32(precision == "tf32")
    example = subject.images.to(device=ctx.device, dtype=DTYPES[precision])
    runner = build(ctx, subject, example, options)
    try:
        _measure_runner(ctx, subject, example, runner, cost, reference)
    finally:
        runner.close()


def _measure_runner(
    ctx: RowContext,
    subject: Subject,
    example: torch.Tensor,
    runner: Runner,
    cost: Cost,
    reference: torch.Tensor,
) -> None:
    precision, batch = ctx.parameters["precision"], len(example)
    output = runner(example).clone()
    check_output(ctx, output, reference, precision, source="fp64", limits=_LIMITS)
    _record_accuracy(ctx, subject, runner, example)
    layers = runner.layers()
    record_layers(ctx, layers)
    ran = check_precision(ctx, precision, runner.observations(), {"the engine": layers})
    times = measure_times(ctx, lambda: runner(example))
    record_times(ctx, times, batch)
    record_cost(ctx, cost, lambda: runner(example), batch, times.back_to_back, ran)
    record_kernels(ctx, lambda: runner(example))
    held = runner.memory_bytes()
    if held is not None:
        ctx.metric("engine_memory", held, unit="B", source=ctx.parameters["engine"])


def _record_accuracy(
    ctx: RowContext, subject: Subject, runner: Runner, example: torch.Tensor
) -> None:
    """`top1` and `top5` on real images; nothing at all where weights are random."""
    if subject.labelled is None:
        return
    right = count_right(runner, subject.labelled, example)
    ctx.metric("top1", right.first / right.images, unit="1", source="imagenet-20")
    ctx.metric("top5", right.first_five / right.images, unit="1", source="imagenet-20")
