"""One row of `sparse-network`: a network by one way, on real pictures one after another."""

from __future__ import annotations

import dataclasses
from typing import Any, Tuple

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines import EngineCache
from narrowgauge_lab.engines.account import check_precision
from narrowgauge_lab.engines.base import DTYPES, Runner
from narrowgauge_lab.engines.serving import kept_engines
from narrowgauge_lab.measure.agreement import check_output, reference_output
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.measure.timing import TimingPlan, measure_time
from narrowgauge_lab.networks.pictures import Pictured, Sources, pictured
from narrowgauge_lab.seeding import seed_everything
from narrowgauge_lab.sparse_networks import Ready, make_ready

__all__ = ["Pictures", "run"]

_WARM_UP_S, _WARM_UP_LIMITS = 5.0, 10.0
#: What the difference of two ways at one precision may be, of the norm of an image's logits.
_LIMITS = {"fp32": 1e-3, "tf32": 2e-2, "fp16": 5e-2}


class Pictures:
    """Batches on the device, one after another and over again: what a call is given."""

    def __init__(self, images: torch.Tensor, batch: int) -> None:
        if not len(images):
            raise UsageError("there is no picture")
        count = -(-len(images) // batch)
        every = images[torch.arange(count * batch, device=images.device) % len(images)]
        self.batches: Tuple[torch.Tensor, ...] = tuple(every.split(batch))
        self.count = len(images)
        self._at = 0

    def next(self) -> torch.Tensor:
        self._at = (self._at + 1) % len(self.batches)
        return self.batches[self._at]

    def through(self, runner: Any) -> torch.Tensor:
        """What `runner` gives for every picture, once, float64 on the CPU."""
        outputs = [runner(batch).double().cpu().clone() for batch in self.batches]
        return torch.cat(outputs)[: self.count]


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say; what this host lacks is skipped."""
    parameters = ctx.parameters
    if parameters["threads"]:
        # First of all: torch 1.8 crashes where a convolution ran with another number before.
        torch.set_num_threads(parameters["threads"])
    seed_everything(ctx.seed)
    precision, way = parameters["precision"], parameters["engine"]
    seed = ctx.seed - ctx.repeat
    made = pictured(parameters["model"], Sources.of(parameters, ctx.files), seed)
    strict = reference_output(made.model, made.images, ctx.device)
    tf32_flags.allow_tf32(precision == "tf32")
    images = made.images.to(device=ctx.device, dtype=DTYPES[precision])
    pictures = Pictures(images, parameters["batch"])
    calibrate_s = parameters["calibrate_s"]
    kept = EngineCache(kept_engines())
    ready = make_ready(way, made.model, pictures.batches[0], precision, calibrate_s, kept)
    try:
        _record_facts(ctx, made, ready, pictures)
        _check(ctx, made, ready.runner, pictures, strict)
        _measure(ctx, ready.runner, pictures)
    finally:
        ready.runner.close()


def _record_facts(ctx: RowContext, made: Pictured, ready: Ready, pictures: Pictures) -> None:
    ctx.fact("weights", made.weights)
    ctx.fact("pictures", made.pictures)
    ctx.fact("prepared", made.preprocessing)
    ctx.fact("images", pictures.count)
    ctx.fact("sparse_layers", ready.sparse_layers)
    if ready.layers:
        ctx.fact("layers", list(ready.layers))
        ctx.fact("left_alone", ready.left_alone)
        zeros = [layer["zeros"] for layer in ready.layers]
        ctx.metric("layer_zeros", zeros, unit="1", source="counted", index="layer")


def _check(
    ctx: RowContext, made: Pictured, runner: Runner, pictures: Pictures, strict: torch.Tensor
) -> None:
    """The first pictures against float64, and every picture against dense at the same precision,
    which is computed in this row again."""
    precision = ctx.parameters["precision"]
    found = pictures.through(runner)
    check_output(ctx, found, strict, precision, source="fp64", limits=_LIMITS)
    check_precision(ctx, precision, runner.observations(), {"the way": runner.layers()})
    dense = make_ready("eager", made.model, pictures.batches[0], precision, 0.0)
    try:
        wanted = pictures.through(dense.runner)
    finally:
        dense.runner.close()
    same = (found.argmax(dim=1) == wanted.argmax(dim=1)).double()
    differences = (found - wanted).norm(dim=1) / wanted.norm(dim=1)
    ctx.metric("agreement", float(same.mean()), unit="1", source="eager")
    ctx.metric("largest_difference", float(differences.max()), unit="1", source="eager")
    wrong = [int(each) for each in (~(differences <= _LIMITS[precision])).nonzero().flatten()]
    if wrong:
        ctx.invalid(
            f"pictures {wrong[:10]} differ from dense by {float(differences.max()):.3g} of their "
            f"logits; rounding to {precision} explains {_LIMITS[precision]:g} at most"
        )
    if made.classes is not None:
        right = (found.argmax(dim=1) == made.classes).double()
        ctx.metric("top1", float(right.mean()), unit="1", source="imagenet-20")


def _measure(ctx: RowContext, runner: Runner, pictures: Pictures) -> None:
    """Each sample is the next batch of pictures, waited for; then calls back to back."""
    limit, device = ctx.parameters["limit_s"], ctx.device
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=min(_WARM_UP_S, _WARM_UP_LIMITS * limit))

    def call() -> None:
        runner(pictures.next())

    def waited_for() -> None:
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def measure() -> Any:
        alone = measure_time(waited_for, device, dataclasses.replace(plan, calls=1))
        return alone, measure_time(call, device, plan)

    alone, steady = steadily(ctx, measure, device)
    batch = ctx.parameters["batch"]
    record_samples(ctx, "latency", alone)
    rates = [batch / seconds for seconds in steady.seconds]
    record_samples(ctx, "images_per_second", steady, rates, "image/s")
