"""One row of `ddnn`: train devices and cloud as one, then cut them apart and count what crosses."""

from __future__ import annotations

import dataclasses
import functools

from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime import operating
from narrowgauge_lab.anytime.gradients import Combination
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.loss_weights import parse_loss_weights
from narrowgauge_lab.anytime.systems.ddnn import DeviceLosses
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import SGD, Adam, OptimizerMaker
from narrowgauge_lab.recipes import recipe_of
from narrowgauge_lab.schedule import Cosine, Schedule, Step
from narrowgauge_lab.shared_weights import asked_file
from narrowgauge_scores.side_file import LOGITS_FILE, read_logits

from .outages import record_outages
from .subject import HERE, Subject, design, variant
from .traffic import record_thresholds, record_traffic

_PAPER_POLICY = "entropy-normalised:0.8"


def run(ctx: RowContext) -> None:
    """Measure as `ctx.parameters` say."""
    parameters = ctx.parameters
    # Before anything is read or trained for what there is not.
    how, combination = design(ctx), parse_loss_weights(parameters["loss_weights"], 2)
    operating.require_policy(parameters["policy"], 2)
    subject = Subject.of(ctx)
    training.seed_everything(ctx.seed)
    net = subject.network(how).to(ctx.device)
    splits = subject.splits(ctx)
    named = variant(ctx)
    ctx.fact("variant", named)
    trained = train_anytime(
        ctx, net, splits, _recipe(ctx, combination),
        About("ddnn", named, exit_names=("local", "cloud")),
        weights=asked_file(parameters["weights"], HERE),
    )  # fmt: skip
    if not trained:
        return
    logits = read_logits(ctx.side_file(LOGITS_FILE))
    operation = operating.operate(
        ctx, logits, asked=parameters["policy"], paper=_PAPER_POLICY, kind="entropy-normalised",
        lose=parameters["lose"],
    )  # fmt: skip
    record_traffic(ctx, net, subject.shape, logits, operation.point)
    record_thresholds(ctx, net, logits)
    if parameters["outages"]:
        mode = precision.enter(parameters["precision"], ctx.device)
        record_outages(ctx, net, splits.test, mode)


def _recipe(ctx: RowContext, combination: Combination) -> training.Recipe:
    parameters = ctx.parameters
    rate, epochs = parameters["lr"], parameters["epochs"]
    optimizer: OptimizerMaker = functools.partial(Adam, rate=rate)
    schedule: Schedule = Step(rate, 1.0)
    if parameters["optimizer"] == "sgd":
        optimizer = functools.partial(
            SGD, rate=rate, momentum=0.9, weight_decay=1e-4, nesterov=True
        )
        schedule = Cosine(rate, epochs)
    recipe = recipe_of(parameters, optimizer, schedule, DeviceLosses(combination))
    return dataclasses.replace(recipe, test_batch_size=500)
