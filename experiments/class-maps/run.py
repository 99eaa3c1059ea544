"""One row of `class-maps`: train one network with exits, and record what each exit looks at."""

from __future__ import annotations

from pathlib import Path

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import training
from narrowgauge_lab.anytime.feeds import splits_of
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.objective import ExitLosses, Objective
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.nested import NestedNet, channels_of
from narrowgauge_lab.anytime.systems.pondering import PonderLoss
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file

from .looking import look

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}
#: Where the rate falls to a tenth, as shares of the epochs.
_STEPS = (0.5, 0.75, 0.9)


# unverified: class-maps of sact, b-alexnet | nested for 20 epochs so far | its profile paper
def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    # Before anything is trained for pictures of images that nobody looked at.
    if parameters["pictures"] > parameters["images"]:
        raise BadValueError(
            f"{parameters['pictures']} pictures of {parameters['images']} images",
            why="pictures are of the images whose maps are made",
            next_step=f"-p pictures={parameters['images']} or fewer",
        )
    training.seed_everything(ctx.seed)
    splits = splits_of(ctx, ctx.asked_data(**_SYNTHETIC), Augmentation(padding=4, flip=True))
    net = network(ctx, len(splits.classes)).to(ctx.device)
    trained = train_anytime(
        ctx, net, splits, stepped_sgd(ctx.parameters, _STEPS, _objective(ctx, net)), _about(ctx),
        weights=asked_file(parameters["weights"], Path(__file__).parent),
    )  # fmt: skip
    if trained:
        look(ctx, net, splits)


def network(ctx: RowContext, classes: int) -> AnytimeNetwork:
    """The network that a row's parameters ask for."""
    name, width = ctx.parameters["net"], float(ctx.parameters["width"])
    if name == "nested":
        return NestedNet(classes, channels=channels_of(width))
    if name == "sact":
        return AdaptiveResNet("sact", ctx.parameters["units"], channels_of(width), classes)
    return branchy_net(name, width, classes=classes)


def _objective(ctx: RowContext, net: AnytimeNetwork) -> Objective:
    if ctx.parameters["net"] == "sact":
        return PonderLoss(ctx.parameters["tau"], 0, ctx.device)
    return ExitLosses(net.exits)


def _about(ctx: RowContext) -> About:
    parameters = ctx.parameters
    name, width = parameters["net"], parameters["width"]
    words = [f"{parameters['units']} units", f"tau {parameters['tau']:g}"] if name == "sact" else []
    words += [] if width == "1" else [f"twin of width {width}"]
    variant = ", ".join([name, *words])
    ctx.fact("variant", variant)
    families = {"nested": "nested", "sact": "sact", "b-alexnet": "branchynet"}
    return About(families[name], variant)
