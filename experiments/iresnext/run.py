"""One row of `iresnext`: train one form of the network by one rule, and score its eight exits."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Callable, Optional

from narrowgauge_lab import checkpoint, precision, training
from narrowgauge_lab.anytime import operating
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.objective import ExitLosses, Objective
from narrowgauge_lab.anytime.systems.iresnext import IResNeXt, iresnext
from narrowgauge_lab.anytime.systems.iresnext_training import Sandwich
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.batch_statistics import reestimate
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file

_HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 700, "test": 200}
#: Where the rate falls to a tenth, as shares of the epochs.
_FALLS = (0.5, 0.75)
#: Of a test or validation batch: what `incremental` carries of one image is 3 MB at width 1.
_TEST_BATCH = 500


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    data = ctx.asked_data(**_SYNTHETIC)
    training.seed_everything(ctx.seed)
    classes = len(data.declaration.classes)
    net = iresnext(parameters["variant"], parameters["blocks"], parameters["width"], classes)
    # Before an hour goes into training.
    operating.require_policy(parameters["policy"], net.exits, paper=False)
    net.to(ctx.device)
    last = parameters["layout"] == "nhwc"
    splits = splits_of(ctx, data, Augmentation(padding=4, flip=True), channels_last=last)
    recipe = _recipe(ctx, _objective(ctx, net, splits))
    trained = train_anytime(
        ctx, net, splits, recipe, _about(ctx, net),
        weights=asked_file(parameters["weights"], _HERE), settle=_settling(ctx, net, splits),
    )  # fmt: skip
    if trained:
        operating.operate_row(ctx, "max-probability")


def _objective(ctx: RowContext, net: IResNeXt, splits: Splits) -> Objective:
    if ctx.parameters["objective"] == "all":
        return ExitLosses(net.exits)
    updates = math.ceil(len(splits.training) / ctx.parameters["batch_size"])
    return Sandwich(ctx.seed, updates, ctx.device)


def _recipe(ctx: RowContext, objective: Objective) -> training.Recipe:
    recipe = stepped_sgd(ctx.parameters, _FALLS, objective)
    # Statistics that are taken anew belong to the weights: they are saved after that.
    save = recipe.save_weights and ctx.parameters["objective"] == "all"
    return dataclasses.replace(recipe, test_batch_size=_TEST_BATCH, save_weights=save)


def _settling(ctx: RowContext, net: IResNeXt, splits: Splits) -> Optional[Callable[[], None]]:
    """What comes between the training by the sandwich rule and the answers; None by the other.

    Running averages are of the exits that updates had, and random ones had few.
    """
    if ctx.parameters["objective"] == "all":
        return None

    def settle() -> None:
        taken = reestimate(
            net,
            splits.training,
            precision.enter(ctx.parameters["precision"], ctx.device),
            images=ctx.parameters["recalibration"],
            batch_size=ctx.parameters["batch_size"],
            seed=ctx.seed,
        )
        ctx.fact("recalibration_images", taken)
        if ctx.parameters["save_weights"]:
            checkpoint.write_weights(ctx.side_file("weights.pt"), net)

    return settle


def _about(ctx: RowContext, net: IResNeXt) -> About:
    width, blocks = ctx.parameters["width"], ctx.parameters["blocks"]
    words = [ctx.parameters["variant"], ctx.parameters["objective"], f"{blocks} blocks"]
    words += [] if width == 1 else [f"twin of width {width:g}"]
    variant = ", ".join(words)
    ctx.fact("variant", variant)
    names = tuple(f"{number} of {net.exits} branches" for number in range(1, net.exits + 1))
    return About("iresnext", variant, exit_names=names)
