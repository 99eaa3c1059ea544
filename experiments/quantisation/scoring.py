"""What a quantised network says of every image beside the float one, and what both cost."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime import logits_file, scores
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.measure import Comparison, TimingPlan, interleave
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.quant.energy import bit_operations, stored_bytes
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, Split, write_logits

from .methods import Quantised, Source
from .nets import asked

__all__ = ["record_answers", "record_cost", "record_latency", "record_untrained"]

#: A warm-up that does not become steady ends after so many times the limit of samples.
_WARM_UP_LIMITS = 2.0
#: What one image is timed for, beside the samples: passes of the logits' file.
_PASSES = 30


def record_cost(ctx: RowContext, source: Source, quantised: Quantised) -> None:
    """MACs, parameters, bytes and bit operations, all of the float network: a converted one hides
    them."""
    work, model = source.work, source.model
    macs = sum(each.macs for each in work.values())
    ctx.metric("macs", macs, unit="MAC", source="computed")
    total = bit_operations(work, quantised.widths)
    ctx.metric("bit_operations", total, unit="1", source="computed")
    share = total / bit_operations(work, {})
    ctx.metric("bit_operations_share", share, unit="1", source="computed")
    before, after = (stored_bytes(model, work, each) for each in ({}, quantised.widths))
    ctx.metric("float_bytes", before, unit="B", source="computed")
    ctx.metric("stored_bytes", after, unit="B", source="computed")
    ctx.metric("bytes_ratio", after / before, unit="1", source="computed")
    if quantised.file_bytes is not None:
        ctx.metric("file_bytes", quantised.file_bytes, unit="B", source="computed")
    ctx.fact("widths", {name: list(pair) for name, pair in quantised.widths.items()})
    ctx.fact("ran_by", quantised.how)


def record_latency(ctx: RowContext, source: Source, quantised: Quantised) -> None:
    """`latency` and `float_latency` of one image, taken in turns, and `latency_gain`, the second
    over the first, pair by pair. Nothing of what is only simulated."""
    if not quantised.clocked:
        return
    parameters, device = ctx.parameters, ctx.device
    image, _ = source.splits.test.batch(torch.arange(1, device=device))
    limit = parameters["limit_s"]
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)
    with cpu_threads(parameters["threads"]) as threads, torch_compat.inference_mode():
        compared: Comparison = steadily(
            ctx,
            lambda: interleave(
                lambda: quantised.forward(image), lambda: quantised.twin(image),
                device, plan, parameters["pairs"],
            ),
            device,
        )  # fmt: skip
    record_samples(ctx, "latency", compared.first)
    record_samples(ctx, "float_latency", compared.second)
    record_samples(ctx, "latency_gain", compared.first, compared.ratios, "1")
    ctx.fact("latency_threads", threads)
    if device.type == "cpu":
        ctx.fact("exact_activation_bits", exact_activation_bits())


def record_answers(
    ctx: RowContext, source: Source, quantised: Quantised, mode: Mode, about: logits_file.About
) -> None:
    """`logits.npz` with the figures that follow from it; `accuracy`, `float_accuracy` and their
    difference `accuracy_lost` at the last exit, `exit<k>_accuracy_lost` at each; and `agreement`,
    of how many test images both say the same."""
    splits, batch = source.splits, ctx.parameters["test_batch_size"]
    net, plain = asked(quantised.forward), asked(source.model)
    example, _ = splits.test.batch(torch.arange(1, device=mode.device))
    costs = exit_costs(plain, example)
    test = logits_file.answers(net, splits.test, splits.test_samples, costs, mode, batch)
    exact = logits_file.answers(plain, splits.test, splits.test_samples, costs, mode, batch)
    _record_difference(ctx, test, exact)
    images = logits_file.timed_images(splits.test, mode, _PASSES)
    with cpu_threads(ctx.parameters["threads"]):
        seconds = logits_file.latencies(net, images, mode, _PASSES) if quantised.clocked else None
    if seconds is not None:
        ctx.fact("latency_images", len(images))
    run = RunLogits(
        family=about.family,
        variant=about.variant,
        data=splits.data,
        seed=ctx.seed,
        test=test,
        cumulative_macs=np.array(costs.cumulative, dtype=np.int64),
        direct_macs=np.array(costs.direct, dtype=np.int64),
        exit_names=about.exit_names,
        val=_validation(net, splits, costs, mode, batch),
        latency=seconds,
        device=logits_file.device_name(mode.device),
        synthetic=splits.data == "synthetic",
        base_accuracy=100.0 * float(_right(exact)[-1]),
        base_macs=costs.direct[-1],
    )
    write_logits(ctx.side_file(LOGITS_FILE), run)
    scores.record(ctx, run)


def record_untrained(ctx: RowContext, source: Source, quantised: Quantised, mode: Mode) -> None:
    """`agreement` alone: with random weights no answer is right."""
    splits, batch = source.splits, ctx.parameters["test_batch_size"]
    example, _ = splits.test.batch(torch.arange(1, device=mode.device))
    plain = asked(source.model)
    costs = exit_costs(plain, example)
    test, exact = (
        logits_file.answers(each, splits.test, splits.test_samples, costs, mode, batch)
        for each in (asked(quantised.forward), plain)
    )
    _record_agreement(ctx, test, exact)
    ctx.fact("weights_from", "random")


def _record_difference(ctx: RowContext, test: Split, exact: Split) -> None:
    """What quantisation changes of the answers [exits, images, classes]."""
    after, before = 100.0 * _right(test), 100.0 * _right(exact)
    ctx.metric("accuracy", float(after[-1]), unit="%", source="computed")
    ctx.metric("float_accuracy", float(before[-1]), unit="%", source="computed")
    ctx.metric("accuracy_lost", float(before[-1] - after[-1]), unit="points", source="computed")
    for number, lost in enumerate(before - after):
        ctx.metric(f"exit{number}_accuracy_lost", float(lost), unit="points", source="computed")
    _record_agreement(ctx, test, exact)


def _record_agreement(ctx: RowContext, test: Split, exact: Split) -> None:
    same = (test.logits[-1].argmax(-1) == exact.logits[-1].argmax(-1)).mean()
    ctx.metric("agreement", 100.0 * float(same), unit="%", source="computed")


def _validation(
    net: AnytimeNetwork, splits: Splits, costs: ExitCosts, mode: Mode, batch: int
) -> Split:
    return logits_file.answers(
        net, splits.validation, splits.validation_samples, costs, mode, batch
    )


def _right(split: Split) -> Any:
    """The share of images that each exit gets right: float64 [exits]."""
    return (split.logits.argmax(-1) == split.labels).mean(axis=1)
