"""One row of `pruning`: one trained network, pruned by one method to one ratio after another."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, List, Mapping, Optional

import torch
from torch import nn

from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime.feeds import Splits, splits_of
from narrowgauge_lab.anytime.ladder import Rung, score_ladder
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.optim import OptimizerMaker
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.schedule import Cosine
from narrowgauge_lab.shared_weights import asked_file, trained_weights
from narrowgauge_lab.transforms.masked_training import PruningSGD
from narrowgauge_scores.side_file import RunLogits

from .against import Against, record_against
from .outcomes import Outcome, examine, record_chosen, record_outcomes
from .steps import Pruned, Pruner, ratios_of
from .times import Clock

_HERE = Path(__file__).parent
_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 400, "test": 100}
_TEST_BATCH = 500


# unverified: profile paper of pruning | a part ran | narrowgauge run pruning --profile paper
def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    ratios = ratios_of(parameters["ratios"])  # before an hour goes into training
    against = Against.of(parameters, _HERE, ctx.seed)
    data = ctx.asked_data(**_SYNTHETIC)
    mode = precision.enter(parameters["precision"], ctx.device)
    precision.enter(_trained_in(parameters), ctx.device)  # refused before anything is trained
    training.seed_everything(ctx.seed)
    classes = len(data.declaration.classes)
    whole = cifar_resnet(int(parameters["depth"]), parameters["width"], classes).to(ctx.device)
    last = parameters["layout"] == "nhwc"
    splits = splits_of(ctx, data, Augmentation(padding=4, flip=True), channels_last=last)
    if against is not None:
        against.require_alike(splits)
    pruner = Pruner(ctx, whole)
    asked = asked_file(parameters["weights"], _HERE, ctx.seed)
    if not trained_weights(ctx, whole, asked, functools.partial(_train, splits)):
        return
    precision.enter(mode.name, ctx.device)
    outcomes = [examine(Pruned(0.0, whole, 0.0), splits, mode)]
    clock = Clock(ctx, whole, splits.test, mode)
    try:
        for ratio in ratios:
            found = _measured(ctx, pruner, clock, ratio, splits, mode)
            if found is None:
                return
            outcomes.append(found)
    finally:
        clock.close()
    record_outcomes(ctx, outcomes)
    chosen = record_chosen(ctx, outcomes)
    ctx.log(f"chosen on validation images: {chosen.name}")
    scored = _score(ctx, outcomes, splits, mode)
    if against is not None:
        record_against(ctx, against, scored, outcomes)


def _measured(
    ctx: RowContext, pruner: Pruner, clock: Clock, ratio: float, splits: Splits, mode: Mode
) -> Optional[Outcome]:
    """Prune, train on and time; None where training diverged, and the row is invalid."""
    pruned = pruner.prune(ratio, splits.training, mode)
    before = examine(pruned, splits, mode).accuracy
    # Of its own name, and checkpoints: a row that is stopped goes on with the ratio it was at.
    stage = ctx.for_stage(f"r{100 * ratio:g}")
    training.seed_everything(ctx.seed)
    if ctx.parameters["finetune_epochs"]:
        recipe = dataclasses.replace(
            _recipe(ctx.parameters, "finetune_epochs", "finetune_lr"),
            optimizer=_optimizer(ctx.parameters, "finetune_lr", masks=pruned.masks),
            save_confusion=False,
            keep_last=True,
        )
        if not training.train(
            stage, pruned.model, splits.training, splits.test, splits.classes, recipe
        ):
            return None
        precision.enter(mode.name, ctx.device)
    after = examine(pruned, splits, mode)
    return dataclasses.replace(after, before=before, speedups=clock.record(stage, pruned.model))


def _train(splits: Splits, stage: RowContext, model: nn.Module) -> bool:
    parameters = stage.parameters
    recipe = dataclasses.replace(
        _recipe(parameters, "epochs", "lr"),
        optimizer=_optimizer(parameters, "lr", gamma_l1=parameters["gamma_l1"]),
        compile=parameters["compile"],
        save_confusion=False,
    )
    return training.train(stage, model, splits.training, splits.test, splits.classes, recipe)


def _recipe(parameters: Any, epochs: str, rate: str) -> training.Recipe:
    """`epochs` and `rate`: the parameters that have them."""
    return training.Recipe(
        epochs=parameters[epochs],
        batch_size=parameters["batch_size"],
        precision=_trained_in(parameters),
        schedule=Cosine(parameters[rate], parameters[epochs]),
        optimizer=_optimizer(parameters, rate),
        graphs=parameters["graphs"],
        test_batch_size=_TEST_BATCH,
    )


def _trained_in(parameters: Any) -> str:
    asked = str(parameters["training_precision"])
    return str(parameters["precision"]) if asked == "same" else asked


def _optimizer(
    parameters: Any,
    rate: str,
    masks: Optional[Mapping[str, torch.Tensor]] = None,
    gamma_l1: float = 0.0,
) -> OptimizerMaker:
    return functools.partial(
        PruningSGD,
        rate=parameters[rate],
        momentum=parameters["momentum"],
        weight_decay=parameters["weight_decay"],
        masks=masks,
        gamma_l1=gamma_l1,
    )


def _score(ctx: RowContext, outcomes: List[Outcome], splits: Splits, mode: Mode) -> RunLogits:
    """The whole network and the pruned ones as rungs."""
    parameters, whole = ctx.parameters, outcomes[0]
    words = [f"resnet-{parameters['depth']}", parameters["method"], parameters["schedule"]]
    if parameters["method"] != "magnitude":
        words.append(f"{parameters['channels']} channels")
    words += [] if parameters["width"] == 1 else [f"twin of width {parameters['width']:g}"]
    variant = ", ".join(words)
    ctx.fact("variant", variant)
    about = About(
        "pruning",
        variant,
        base_accuracy=lambda: whole.accuracy,
        base_macs=lambda _: whole.macs,
    )
    # The most pruned first: of equal costs, as those of single weights are, that order stays.
    rungs = [Rung(each.name, each.macs, each.pruned.model) for each in reversed(outcomes)]
    return score_ladder(
        ctx, rungs, splits, about, cumulative=False, mode=mode, batch_size=_TEST_BATCH,
        passes=parameters["passes"],
    )  # fmt: skip
