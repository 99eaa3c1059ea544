"""One row of `branchynet`: train one network in two stages, fit its thresholds, and time it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime import operating, policies
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.loss_weights import parse_loss_weights
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.objective import ExitLosses, LastExitLoss, Objective
from narrowgauge_lab.anytime.systems.branchynet import NETS, BranchyNet, branchy_net
from narrowgauge_lab.anytime.training import Stage, train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.optim import Adam
from narrowgauge_lab.recipes import recipe_of
from narrowgauge_lab.schedule import MultiStep, milestones
from narrowgauge_lab.shared_weights import asked_file
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

from .clock import Policies, record_clock
from .published import record_published
from .trunk import trunk_accuracy, trunk_correct

_HERE = Path(__file__).parent
_SYNTHETIC = {"classes": 10, "train": 2000, "test": 300}
#: The paper's Adam.
_BETAS = (0.99, 0.999)


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    # Before anything is read or trained for what there is not.
    training.seed_everything(ctx.seed)
    net = branchy_net(parameters["net"], parameters["width"], parameters["head_norm"])
    operating.require_policy(parameters["policy"], net.exits)
    combination = parse_loss_weights(parameters["loss_weights"], net.exits)
    splits = _splits(ctx)
    net.to(ctx.device)
    trained = train_anytime(
        ctx, net, splits, _recipe(ctx, ExitLosses(net.exits, combination), parameters["epochs"]),
        _about(ctx, net, splits), stages=_stages(ctx, net),
        weights=asked_file(parameters["weights"], _HERE),
    )  # fmt: skip
    if not trained:
        return
    thresholds = ",".join(repr(each) for each in NETS[parameters["net"]].thresholds)
    paper = f"entropy:{thresholds}"
    logits = read_logits(ctx.side_file(LOGITS_FILE))
    operation = operating.operate(
        ctx,
        logits,
        asked=parameters["policy"],
        paper=paper,
        kind="entropy",
        lose=parameters["lose"],
    )
    record_published(ctx, parameters["net"], logits)
    by = Policies(*(policies.parse(each, net.exits) for each in (operation.policy, paper)))
    _time(ctx, net, splits, by)


def _splits(ctx: RowContext) -> Splits:
    parameters = ctx.parameters
    shape, name = NETS[parameters["net"]].image, parameters["data"]
    if name == "synthetic":
        data: FlatData = ctx.synthetic(channels=shape[0], size=shape[1], **_SYNTHETIC)
    else:
        data = ctx.data(name)
    found: Tuple[int, ...] = data.train_images.shape[1:]
    if found != shape:
        raise BadValueError(
            f"{parameters['net']} does not take the images of {name}",
            why=f"they are {'×'.join(map(str, found))}, it takes {'×'.join(map(str, shape))}",
            next_step="b-lenet goes with mnist and fashion-mnist, the others go with cifar10",
        )
    if not parameters["augment"]:
        return splits_of(ctx, data, Augmentation())
    # A mirrored digit is another one, or none.
    grey = shape[0] == 1
    return splits_of(ctx, data, Augmentation(2) if grey else Augmentation(4, flip=True))


def _recipe(ctx: RowContext, objective: Objective, epochs: int) -> training.Recipe:
    rate, falls_at = ctx.parameters["lr"], ctx.parameters["falls_at"]
    optimizer = functools.partial(Adam, rate=rate, betas=_BETAS)
    schedule = MultiStep(rate, milestones(epochs, (falls_at,)) if falls_at < 1 else ())
    recipe = recipe_of(ctx.parameters, optimizer, schedule, objective)
    return dataclasses.replace(recipe, epochs=epochs)


def _stages(ctx: RowContext, net: AnytimeNetwork) -> Tuple[Stage, ...]:
    epochs = ctx.parameters["trunk_epochs"]
    if not epochs:
        return ()
    return (Stage("trunk", _recipe(ctx, LastExitLoss(net.exits - 1), epochs)),)


def _about(ctx: RowContext, net: BranchyNet, splits: Splits) -> About:
    width, words = ctx.parameters["width"], [ctx.parameters["net"]]
    words += [] if width == 1 else [f"twin of width {width:g}"]
    words += ["normalised branches"] if ctx.parameters["head_norm"] else []
    ctx.fact("variant", ", ".join(words))
    names = tuple(f"branch {number + 1}" for number in range(net.exits - 1))
    return About(
        "branchynet", ", ".join(words), exit_names=(*names, "trunk"),
        base_accuracy=functools.partial(trunk_accuracy, ctx),
        base_macs=lambda costs: costs.direct[-1],
        base_correct=functools.partial(trunk_correct, ctx, net, splits),
    )  # fmt: skip


def _time(ctx: RowContext, net: BranchyNet, splits: Splits, by: Policies) -> None:
    count = min(ctx.parameters["clock_images"], len(splits.test))
    if not count:
        return
    images, _ = splits.test.batch(torch.arange(count, device=ctx.device))
    threads = ctx.parameters["clock_threads"]
    mode = precision.enter(ctx.parameters["precision"], ctx.device)
    record_clock(ctx, net, images, by, mode, threads)
