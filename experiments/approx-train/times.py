"""A training step with approximate products beside one of torch's own layers."""

from __future__ import annotations

import copy
import functools

import torch
from torch import nn

from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.distributed import ALONE
from narrowgauge_lab.measure import Comparison, TimingPlan, interleave
from narrowgauge_lab.measure.algorithms import best_algorithms
from narrowgauge_lab.measure.recording import record_samples
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.stepping import Stepper

__all__ = ["record_step_times"]

#: A warm-up that does not become steady ends after so many times the limit of samples.
_WARM_UP_LIMITS = 2.0


def record_step_times(
    ctx: RowContext, exact: nn.Module, approximate: nn.Module, training_set: Feed, mode: Mode
) -> None:
    """Record `step_exact` and `step`, whole updates of `batch_size` images taken in turns, and
    `step_ratio`, the second over the first, pair by pair. Both models stay as they are.

    Both are stepped alike, captured in a CUDA graph or not.
    """
    parameters = ctx.parameters
    count = min(parameters["batch_size"], len(training_set))
    indices = torch.arange(count, device=mode.device)
    first, second = (
        functools.partial(_stepper(ctx, model, training_set, mode, count), indices)
        for model in (exact, approximate)
    )
    limit = parameters["limit_s"]
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=_WARM_UP_LIMITS * limit)

    def taken() -> Comparison:
        return interleave(first, second, mode.device, plan, parameters["pairs"])

    # In training too: a row that was given its weights has none before this.
    with best_algorithms(mode.device):
        compared: Comparison = steadily(ctx, taken, mode.device)
    record_samples(ctx, "step_exact", compared.first)
    record_samples(ctx, "step", compared.second)
    record_samples(ctx, "step_ratio", compared.second, compared.ratios, "1")
    ctx.fact("step_images", count)


def _stepper(
    ctx: RowContext, model: nn.Module, training_set: Feed, mode: Mode, batch: int
) -> Stepper:
    """Updates of a copy of `model`, which do all that updates do, by a rate of 0."""
    stepped = copy.deepcopy(model).train()
    optimizer = SGD(stepped, 0.0, ctx.parameters["momentum"], ctx.parameters["weight_decay"])
    return Stepper(stepped, optimizer, training_set, mode, ALONE, batch, ctx.parameters["graphs"])
