"""One row of `ensembles`: train the members by one method, and score the ladder of them."""

from __future__ import annotations

import functools
import time
from typing import List

from narrowgauge_lab import precision, training, turns
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.ladder import Rung, score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.optim import SGD, Adam, OptimizerMaker
from narrowgauge_lab.recipes import recipe_of
from narrowgauge_lab.schedule import MultiStep

from . import peer
from .fitting import Fitting, require_batches, require_fitting
from .members import COMBINED, Joined, Numbered

__all__ = ["run"]

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}


def run(ctx: RowContext) -> None:
    """Train and score as `ctx.parameters` say."""
    parameters = ctx.parameters
    require_fitting(ctx)
    peer.require(parameters)
    data = ctx.asked_data(**_SYNTHETIC)
    last = parameters["layout"] == "nhwc"
    splits = splits_of(ctx, data, Augmentation(padding=4, flip=True), channels_last=last)
    require_batches(ctx, len(splits.training))
    training.seed_everything(ctx.seed)
    resumed = ctx.checkpoints.resume and any(ctx.checkpoints.folder.rglob("checkpoint-*.pt"))
    began = time.monotonic()
    if parameters["implementation"] == "torchensemble":
        members = peer.fit(ctx, splits)
    else:
        schedule = MultiStep(parameters["lr"], ())
        members = Fitting(ctx, splits, recipe_of(parameters, _optimizer(ctx), schedule)).fit()
    if members is None:
        return
    # What a process before a resume took is in each member's `seconds_before_resume`.
    if not (resumed or turns.sharing()):
        seconds = time.monotonic() - began
        ctx.metric("training_seconds", seconds, unit="s", source="monotonic")
    _score(ctx, splits, members)


def _optimizer(ctx: RowContext) -> OptimizerMaker:
    given = {"rate": ctx.parameters["lr"], "weight_decay": ctx.parameters["weight_decay"]}
    if ctx.parameters["optimizer"] == "adam":
        return functools.partial(Adam, **given)
    return functools.partial(SGD, momentum=0.9, **given)


def _score(ctx: RowContext, splits: Splits, members: List[Numbered]) -> None:
    """The ladder: rung m runs the first m members, and goes on with what rung m − 1 has done."""
    method, shrinkage = ctx.parameters["method"], ctx.parameters["shrinkage"]
    images, _ = splits.test.batch(splits.test.labels.new_zeros(1))
    nets = [net for _, net in members]
    each = count(nets[0], images).macs
    rungs = [
        Rung(
            f"{number} of {len(nets)} members",
            number * each,
            Joined(nets[:number], COMBINED[method], shrinkage),
        )
        for number in range(1, len(nets) + 1)
    ]
    mode = precision.enter(ctx.parameters["precision"], ctx.device)
    score_ladder(ctx, rungs, splits, _about(ctx, members), cumulative=True, mode=mode)
    ctx.fact("members", len(members))


def _about(ctx: RowContext, members: List[Numbered]) -> About:
    given = ctx.parameters
    words = [f"{given['method']} of {len(members)} {given['network']}"]
    words += [] if given["width"] == 1 else [f"twin of width {given['width']:g}"]
    words += [] if given["implementation"] == "own" else [f"by {given['implementation']}"]
    variant = ", ".join(words)
    ctx.fact("variant", variant)
    return About("ensemble", variant)
