"""One row of `quantisation`: train a network in float, or take it, quantise it one way, and say
what that costs and loses."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.ladder import Rung, score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.cpu_threads import cpu_threads
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.shared_weights import asked_file, trained_weights
from narrowgauge_lab.transforms.folding import fold_batch_norm

from .methods import LADDER, Source, quantise, require_method, rungs
from .nets import Net, asked, last_of, make
from .scoring import record_answers, record_cost, record_latency, record_untrained

_HERE = Path(__file__).parent
_SYNTHETIC = {"classes": 10, "train": 400, "test": 100}


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    data = _data(ctx)
    name = parameters["net"]
    net = make(name, parameters["width"], data.train_images.shape[1:], parameters["data"])
    training.seed_everything(ctx.seed)
    model = net.build(parameters["width"]).to(ctx.device).eval()
    # Before anything is trained for what there is not.
    require_method(ctx, getattr(model, "exits", 1))
    splits = _splits(ctx, data, net)
    trained = bool(parameters["epochs"] or parameters["weights"])
    if trained and not _train(ctx, net, model, splits):
        return
    ctx.metric(
        "parameters", sum(each.numel() for each in model.parameters()), unit="1", source="computed"
    )
    mode = precision.enter("fp32", ctx.device)
    source = Source.of(ctx, fold_batch_norm(model), splits)
    if parameters["method"] == LADDER:
        _ladder(ctx, source, mode, trained)
        return
    splits.record(ctx)
    quantised = quantise(ctx, source)
    if quantised is None:
        return
    record_cost(ctx, source, quantised)
    record_latency(ctx, source, quantised)
    if trained:
        record_answers(ctx, source, quantised, mode, _about(ctx, asked(source.model).exits))
    else:
        record_untrained(ctx, source, quantised, mode)


def _data(ctx: RowContext) -> FlatData:
    name = ctx.parameters["data"]
    if name != "synthetic":
        return ctx.data(name)
    channels, size = (3, 32) if ctx.parameters["net"].startswith("resnet") else (1, 28)
    return ctx.synthetic(channels=channels, size=size, **_SYNTHETIC)


def _splits(ctx: RowContext, data: FlatData, net: Net) -> Splits:
    colours = net.image[0] == 3  # a mirrored digit is another one, or none
    return splits_of(ctx, data, Augmentation(4, True) if colours else Augmentation())


def _train(ctx: RowContext, net: Net, model: nn.Module, splits: Splits) -> bool:
    """Give `model` the weights that every row of this run has of this network and seed."""
    parameters = ctx.parameters
    rate, epochs = parameters["lr"] or net.rate, parameters["epochs"]
    exits = getattr(model, "exits", 0)
    recipe = training.Recipe(
        epochs=epochs,
        batch_size=parameters["batch_size"],
        precision="fp32",
        schedule=net.schedule(rate, epochs),
        optimizer=net.optimizer(rate),
        objective=ExitLosses(exits) if exits else None,
        save_confusion=False,
    )

    def train(stage: RowContext, given: nn.Module) -> bool:
        return training.train(stage, given, splits.training, splits.test, splits.classes, recipe)

    asked_for = asked_file(parameters["weights"], _HERE, ctx.seed)
    label = f"{parameters['net']}-{parameters['width']:g}-"
    return trained_weights(ctx, model, asked_for, train, label)


def _about(ctx: RowContext, exits: int) -> About:
    parameters = ctx.parameters
    words = [parameters["net"], parameters["method"]]
    if parameters["method"] != "fp32":
        words += [f"{parameters['bits']} bits", parameters["executor"]]
    if parameters["width"] != 1:
        words.append(f"twin of width {parameters['width']:g}")
    ctx.fact("variant", ", ".join(words))
    names = tuple(f"branch {number + 1}" for number in range(exits - 1))
    return About("quantisation", ", ".join(words), exit_names=(*names, "whole"))


def _ladder(ctx: RowContext, source: Source, mode: precision.Mode, trained: bool) -> None:
    """The same weights at 2 bits and more as one ladder. All rungs do the same multiplications, so
    on the axis of costs they stand one above the other; by the clock they may not."""
    if not trained:
        raise BadValueError(
            "a ladder of networks that nobody trained",
            why="there are no answers to score",
            next_step="-p epochs=1 or more, or -p weights=FILE",
        )
    images, _ = source.splits.test.batch(torch.arange(1, device=ctx.device))
    plain = asked(source.model)
    macs = exit_costs(plain, images).direct[-1]
    found = rungs(ctx, source)
    clocked = all(each.clocked for each in found.values())
    # One image is timed on as many threads here as by every other method.
    with cpu_threads(ctx.parameters["threads"] if clocked else 0) as threads:
        score_ladder(
            ctx,
            [Rung(f"{bits} bits", macs, last_of(each.forward)) for bits, each in found.items()],
            source.splits,
            _about(ctx, 1),
            cumulative=False,
            mode=mode,
            batch_size=ctx.parameters["test_batch_size"],
            passes=30 if clocked else 0,
        )
    if clocked:
        ctx.fact("latency_threads", threads)
