"""One row of `resolution-ladder`: one network asked at several sizes, or by a glance and a second
look at a part of the picture."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any, List, Optional, Tuple

from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime import operating, policies, resolution
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.ladder import score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.objective import Objective
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file, trained_weights

from .glancing import record_glance
from .sizing import record_sizes, rungs_of

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}
#: Where the rate falls to a tenth, as shares of the epochs.
_STEPS = (0.5, 0.75, 0.9)
#: Of the pictures.
_SIDE = 32


# unverified: 200 epochs of resolution-ladder | 40 on a GPU so far | run its profile paper
def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    sizes = _checked(parameters)
    splits = splits_of(ctx, ctx.asked_data(**_SYNTHETIC), Augmentation(padding=4, flip=True))
    training.seed_everything(ctx.seed)
    net = cifar_resnet(int(parameters["depth"]), parameters["width"], len(splits.classes))
    net.to(ctx.device)

    def train(stage: RowContext, model: nn.Module) -> bool:
        recipe = dataclasses.replace(
            stepped_sgd(parameters, _STEPS, _objective(ctx, splits, sizes)), save_confusion=False
        )
        return training.train(
            stage, model, splits.training, splits.test, splits.classes, recipe
        )  # fmt: skip

    asked = asked_file(parameters["weights"], Path(__file__).parent)
    if not trained_weights(ctx, net, asked, train, label=f"{parameters['trained']}-"):
        return
    mode = precision.enter(parameters["precision"], ctx.device)
    rungs = rungs_of(ctx, net, splits, mode, sizes)
    if parameters["answers"] == "sizes":
        logits = score_ladder(ctx, rungs, splits, _about(ctx), cumulative=False, mode=mode)
        record_sizes(ctx, logits, sizes)
    else:
        record_glance(ctx, net, splits, mode, rungs, _about(ctx))


def _checked(parameters: Any) -> Tuple[int, ...]:
    """The sizes. Raises BadValueError for what no network takes, before anything is trained."""
    sizes = resolution.sizes(parameters["sizes"])
    for name in ("glance", "look"):
        resolution.require_size(parameters[name], f"a {name}")
    if not resolution.LEAST <= parameters["crop"] <= _SIDE:
        raise BadValueError(
            f"a window of {parameters['crop']} pixels",
            why=f"it is cut out of pictures of {_SIDE}×{_SIDE}",
            next_step=f"-p crop=N with N from {resolution.LEAST} to {_SIDE}",
        )
    if parameters["look"] <= parameters["glance"]:
        raise BadValueError(
            f"a look at {parameters['look']} pixels after a glance at {parameters['glance']}",
            why="a second look that sees no more costs no more, and is no second exit",
            next_step=f"-p look={parameters['glance'] + 8}",
        )
    if parameters["policy"] != operating.FITTED:
        policies.parse(parameters["policy"], 2)
    return sizes


def _objective(ctx: RowContext, splits: Splits, sizes: Tuple[int, ...]) -> Optional[Objective]:
    if ctx.parameters["trained"] == "fixed":
        return None
    updates = math.ceil(len(splits.training) / ctx.parameters["batch_size"])
    return resolution.RandomSizes(sizes, ctx.seed, updates)


def _about(ctx: RowContext) -> About:
    parameters = ctx.parameters
    words: List[str] = [f"ResNet-{parameters['depth']} of width {parameters['width']:g}"]
    words += ["trained at random sizes" if parameters["trained"] == "random" else "trained at 32"]
    words += ["statistics kept"] if parameters["statistics"] == "kept" else []
    if parameters["answers"] == "glance":
        words.append(f"glance {parameters['glance']}, look {parameters['look']}")
        if parameters["place"] != "whole":
            words.append(f"at {parameters['crop']} pixels by {parameters['place']}")
        words += ["mean of both"] if parameters["combined"] == "mean" else []
    family = "glance" if parameters["answers"] == "glance" else "resolution"
    about = About(family, ", ".join(words))
    ctx.fact("variant", about.variant)
    return about
