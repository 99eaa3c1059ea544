"""Whether a setup trains the same network: its first loss and gradient against strict float32."""

from __future__ import annotations

import copy
from typing import Tuple

import torch
import torch.nn.functional as F

from narrowgauge_lab import tf32_flags
from narrowgauge_lab.context import RowContext

from .setups import Training
from .subjects import Subject

__all__ = ["check_training", "strict_training"]

#: Of the loss; what computes something else is off by more. The gradient is recorded without a
#: limit: rounding in fifty layers moves it by tens of percent in 8 bits, and that still trains.
_LIMIT = 0.05


def strict_training(what: Subject, device: torch.device) -> Tuple[float, torch.Tensor]:
    """Loss and flat gradient of the batch by torch's own layers in float32, TF32 off."""
    tf32_flags.allow_tf32(False)
    model = copy.deepcopy(what.model).to(device)
    loss = F.cross_entropy(model(what.images.to(device)), what.labels.to(device))
    parts = torch.autograd.grad(loss, list(model.parameters()))
    return float(loss.detach()), torch.cat([each.reshape(-1) for each in parts]).cpu()


def check_training(ctx: RowContext, training: Training, strict: Tuple[float, torch.Tensor]) -> None:
    """Record `loss_error` and `gradient_error`, relative; a loss that is off makes the row INVALID,
    and so does a gradient that is not finite at any loss scale."""
    loss, gradient = strict
    training.settle()
    training.differentiate()
    training.finish()
    scale = training.loss_scale()
    found = torch.cat([each.cpu() for each in training.gradient_parts()]) / scale
    off = abs(float(training.loss) - loss) / abs(loss)
    error = float((found.double() - gradient.double()).norm() / gradient.double().norm())
    ctx.metric("loss_error", off, unit="1", source="strict float32")
    ctx.metric("gradient_error", error, unit="1", source="strict float32")
    if not off <= _LIMIT:
        ctx.invalid(f"the loss is off by {off:.3g} of strict float32's; {_LIMIT:g} at most")
    if not error < float("inf"):
        ctx.invalid("the gradient is not finite")
