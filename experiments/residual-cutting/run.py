"""One row of `residual-cutting`: train or load a ResNet, cut its blocks one by one in every way,
and leave its branches out one after another."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Sequence

from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab import checkpoint, precision, training
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.ladder import Rung, score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.networks.cifar_resnet import CifarResNet, cifar_resnet
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.recipes import recipe_of, sgd_of
from narrowgauge_lab.schedule import Cosine
from narrowgauge_lab.shared_weights import asked_file, load_weights
from narrowgauge_lab.stochastic_depth import (
    add_stochastic_depth,
    fold_stochastic_depth,
    survival,
)
from narrowgauge_lab.transforms.residual_links import parse_cuts

from .greedy import Step, remove_greedily
from .table import (
    asked_factor,
    asked_modes,
    record_asked,
    record_highest_links,
    record_table,
    record_whole,
)
from .variants import Outcome, Variants

_HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 400, "test": 120}
_TEST_BATCH = 500
#: Of the ladder's rungs, one image each.
_PASSES = 30


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    data = ctx.asked_data(**_SYNTHETIC)
    training.seed_everything(ctx.seed)
    classes = len(data.declaration.classes)
    net = cifar_resnet(int(parameters["depth"]), parameters["width"], classes)
    # Before an hour goes into training for a cut that cannot be.
    modes, cuts = asked_modes(parameters["modes"]), parse_cuts(parameters["cut"], net)
    asked_factor(parameters["factor"])
    survival(1, parameters["survival"])
    net.to(ctx.device)
    last = parameters["layout"] == "nhwc"
    splits = splits_of(ctx, data, Augmentation(padding=4, flip=True), channels_last=last)
    if not _trained(ctx, net, splits):
        return
    mode = precision.enter(parameters["precision"], ctx.device)
    variants = Variants(ctx, net, splits, mode)
    whole = record_whole(ctx, variants, net)
    record_highest_links(ctx, variants, net)
    if cuts:
        record_asked(ctx, variants, net, cuts)
    record_table(ctx, variants, net, whole, modes)
    steps = remove_greedily(ctx, variants, net, parameters["greedy"])
    _score(ctx, steps, splits, whole, mode)


def _trained(ctx: RowContext, net: CifarResNet, splits: Splits) -> bool:
    """Give `net` its weights. False where training diverged: the row is INVALID."""
    parameters = ctx.parameters
    asked = asked_file(parameters["weights"], _HERE, ctx.seed)
    if asked is not None:
        load_weights(net, asked)
        ctx.fact("weights_from", f"the file {asked.name}")
        ctx.fact("weights_sha256", sha256_file(asked))
        return True
    if parameters["training"] == "stochastic-depth":
        add_stochastic_depth(net, parameters["survival"])
    classes = splits.classes
    if not training.train(ctx, net, splits.training, splits.test, classes, _recipe(parameters)):
        return False
    fold_stochastic_depth(net)
    if parameters["save_weights"]:
        checkpoint.write_weights(ctx.side_file("weights.pt"), net)
    return True


def _recipe(parameters: Any) -> training.Recipe:
    schedule = Cosine(parameters["lr"], parameters["epochs"])
    recipe = recipe_of(parameters, sgd_of(parameters), schedule)
    # A row that is stopped between its cuts trains nothing again; it saves its weights itself.
    return dataclasses.replace(
        recipe, test_batch_size=_TEST_BATCH, keep_last=True, save_confusion=False,
        save_weights=False,
    )  # fmt: skip


def _score(
    ctx: RowContext, steps: Sequence[Step], splits: Splits, whole: Outcome, mode: Mode
) -> None:
    """The greedy curve as a ladder, on the axes of exits."""
    parameters = ctx.parameters
    words = [f"ResNet-{parameters['depth']}", parameters["training"]]
    words += [] if parameters["width"] == 1 else [f"twin of width {parameters['width']:g}"]
    words += ["statistics anew"] if parameters["recalibration"] else []
    words += ["fine-tuned"] if parameters["finetune_images"] else []
    variant = ", ".join(words)
    ctx.fact("variant", variant)
    about = About(
        "residual-cutting",
        variant,
        base_accuracy=lambda: whole.accuracy,
        base_macs=lambda _costs: whole.macs,
    )
    score_ladder(
        ctx,
        [Rung(each.name, each.macs, each.net) for each in steps],
        splits,
        about,
        cumulative=False,
        mode=mode,
        batch_size=_TEST_BATCH,
        passes=_PASSES if parameters["latency"] else 0,
    )
