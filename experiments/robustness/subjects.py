"""The two networks of a row, of the same weights: exact, and with approximate products."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Dict, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_lab import training
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.layers.manual.convert import convert
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.layers.manual.quantise import Scales, calibrated
from narrowgauge_lab.networks.manual_mnist import ManualNet
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import MultiStep, milestones
from narrowgauge_lab.shared_weights import asked_file, trained_weights

__all__ = ["EXACT", "Normalised", "Subjects", "approximate", "exact_network", "feeds"]

#: The value of `gradient` that takes the exact network's.
EXACT = "exact"
#: As the network's authors normalise its pixels.
_MEAN, _STD = 0.5, 0.5
_SYNTHETIC = {"channels": 1, "size": 28, "classes": 10, "train": 2000, "test": 1000}
#: Images that give the 8-bit policies their scales. Fixed ones: with those of the moment, an
#: image's scores would depend on the others of its batch, and so would an attack.
_CALIBRATION = 512


class Normalised(nn.Module):
    """A network that takes pixels in [0, 1] and normalises them itself, so that what is attacked
    are pixels."""

    def __init__(self, net: nn.Module, mean: float = _MEAN, std: float = _STD) -> None:
        super().__init__()
        self.net, self.mean, self.std = net, mean, std

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net((pixels - self.mean) / self.std)
        return result


@dataclasses.dataclass(frozen=True)
class Subjects:
    """Both take pixels in [0, 1] and are in eval mode."""

    exact: nn.Module
    approximate: nn.Module


def feeds(ctx: RowContext) -> Tuple[Feed, Feed, Tuple[str, ...]]:
    """Training images; those that are attacked, the first of the test set; and the classes."""
    parameters = ctx.parameters
    data: FlatData = ctx.asked_data(**_SYNTHETIC)
    count = parameters["train_limit"] or len(data.train_images)
    attacked = parameters["images"] or len(data.test_images)
    parts = (
        (data.train_images[:count], data.train_labels[:count]),
        (data.test_images[:attacked], data.test_labels[:attacked]),
    )
    first, second = (Feed(*part, (_MEAN,), (_STD,), ctx.device) for part in parts)
    return first, second, data.declaration.classes


def exact_network(
    ctx: RowContext, training_set: Feed, test_set: Feed, classes: Tuple[str, ...]
) -> Tuple[nn.Module, bool]:
    """The network with the weights of the row's seed, and whether there is something to attack."""
    parameters = ctx.parameters
    training.seed_everything(ctx.seed)
    net = ManualNet().to(ctx.device)

    def train(stage: RowContext, model: nn.Module) -> None:
        epochs, rate = parameters["epochs"], parameters["lr"]
        recipe = training.Recipe(
            epochs=epochs,
            batch_size=parameters["batch_size"],
            precision="fp32",
            schedule=MultiStep(rate, milestones(epochs, (0.5, 0.75))),
            optimizer=functools.partial(SGD, rate=rate, momentum=parameters["momentum"]),
        )
        training.train(stage, model, training_set, test_set, classes, recipe)

    asked = asked_file(parameters["weights"], Path(__file__).parent)
    there = trained_weights(ctx, net, asked, train)
    return Normalised(net).eval(), there


def approximate(ctx: RowContext, exact: nn.Module, training_set: Feed) -> nn.Module:
    """A copy of `exact` with the row's policy, whose own backward pass is what `gradient` says.
    A policy that this device lacks skips the row."""
    policy = parse_policy(ctx.parameters["policy"])
    asked = ctx.parameters["gradient"]
    scales: Dict[str, Scales] = {}
    if policy.eight_bit:
        count = min(_CALIBRATION, len(training_set))
        pixels = training_set.images[:count].float() / 255.0
        form = multiplier_of(policy).form(per_channel=True)
        scales = calibrated(exact, form, [pixels], weights=True)
        ctx.fact("calibration_images", count)
    own = "straight-through" if asked == EXACT else asked
    try:
        converted = convert(exact, policy, gradient=own, scales=scales or None)
    except NotApplicableError as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    ctx.fact("choices", converted.choices())
    return converted.model.eval()
