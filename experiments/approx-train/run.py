"""One row of `approx-train`: an exactly trained ResNet gets an approximate forward pass, and is
trained on with it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, Dict, Tuple

from torch import nn

from narrowgauge_contract.errors import NotApplicableError, SkippedError
from narrowgauge_lab import precision, training
from narrowgauge_lab.augment import Augmentation, Feed, make_feeds
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.evaluation import evaluate
from narrowgauge_lab.layers.manual.convert import Converted, convert
from narrowgauge_lab.layers.manual.policies import Policy, parse_gradient, parse_policy
from narrowgauge_lab.networks.cifar import ResNet
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.schedule import MultiStep, milestones
from narrowgauge_lab.shared_weights import asked_file, trained_weights

from .times import record_step_times

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 300}
#: Where the rate falls to a tenth, as shares of the epochs: He et al. 2015, section 4.2.
_STEPS = (0.5, 0.75)
#: Forward passes of float policies, and of those on codes; backward passes are exact float32.
_RAN, _RAN_CODES = "fp32", "fp32+int8"


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    # Before anything is trained for a policy that there is not.
    policy = parse_policy(ctx.parameters["policy"])
    parse_gradient(ctx.parameters["gradient"])
    mode = precision.enter("fp32", ctx.device)
    training_set, test_set, classes = _feeds(ctx)
    training.seed_everything(ctx.seed)
    exact = ResNet(int(ctx.parameters["depth"]), len(classes)).to(ctx.device)

    def train(stage: RowContext, model: nn.Module) -> None:
        # The row's confusion matrix is that after fine-tuning.
        exactly = _recipe(ctx.parameters, "epochs", "lr", "auto")
        recipe = dataclasses.replace(exactly, save_confusion=False)
        training.train(stage, model, training_set, test_set, classes, recipe)

    asked = asked_file(ctx.parameters["weights"], Path(__file__).parent)
    if not trained_weights(ctx, exact, asked, train):
        return
    accuracy = _accuracy(ctx, exact, test_set, mode)
    ctx.metric("accuracy_exact", accuracy, unit="%", source="computed")
    converted = _converted(ctx, exact)
    before = _accuracy(ctx, converted.model, test_set, mode)
    ctx.metric("accuracy_before", before, unit="%", source="computed")
    ctx.metric("accuracy_lost", accuracy - before, unit="points", source="computed")
    record_step_times(ctx, exact, converted.model, training_set, mode)
    graphs = ctx.parameters["graphs"]
    recipe = dataclasses.replace(
        _recipe(ctx.parameters, "finetune_epochs", "finetune_lr", graphs), ran=_ran(policy)
    )
    # A seed of its own: or a row that trained before would draw other things than those after it.
    training.seed_everything(ctx.seed)
    training.train(ctx, converted.model, training_set, test_set, classes, recipe)
    after = _accuracy(ctx, converted.model, test_set, mode)
    ctx.metric("accuracy_after", after, unit="%", source="computed")
    ctx.metric("accuracy_missing", accuracy - after, unit="points", source="computed")


def _feeds(ctx: RowContext) -> Tuple[Feed, Feed, Tuple[str, ...]]:
    parameters = ctx.parameters
    data: FlatData = ctx.asked_data(**_SYNTHETIC)
    count = parameters["test_limit"] or len(data.test_images)
    data = dataclasses.replace(
        data, test_images=data.test_images[:count], test_labels=data.test_labels[:count]
    )
    sets = make_feeds(
        data,
        ctx.device,
        limit=parameters["train_limit"],
        augmentation=Augmentation(padding=4, flip=True),
    )
    return (*sets, data.declaration.classes)


def _recipe(parameters: Any, epochs: str, rate: str, graphs: str) -> training.Recipe:
    """`epochs` and `rate`: the parameters that have them."""
    count, first = parameters[epochs], parameters[rate]
    optimizer = functools.partial(
        SGD, rate=first, momentum=parameters["momentum"], weight_decay=parameters["weight_decay"]
    )
    return training.Recipe(
        epochs=count,
        batch_size=parameters["batch_size"],
        precision="fp32",
        schedule=MultiStep(first, milestones(count, _STEPS)),
        optimizer=optimizer,
        graphs=graphs,
    )


def _converted(ctx: RowContext, exact: nn.Module) -> Converted:
    """The network with manual layers. A policy that this device lacks skips the row."""
    parameters = ctx.parameters
    try:
        converted = convert(exact, parameters["policy"], gradient=parameters["gradient"])
    except NotApplicableError as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error
    left: Dict[str, str] = {each.name: each.reason for each in converted.left_alone}
    ctx.fact("choices", converted.choices())
    ctx.fact("layers_left_alone", left)
    return converted


def _accuracy(ctx: RowContext, model: nn.Module, test_set: Feed, mode: Mode) -> float:
    return evaluate(model, test_set, mode, ctx.parameters["test_batch_size"]).accuracy


def _ran(policy: Policy) -> str:
    """What the precision probe has to see in a step of such layers."""
    return _RAN_CODES if policy.eight_bit else _RAN
