"""One row of `mnist`: train the network at one precision and record every epoch."""

from __future__ import annotations

import functools
from typing import Optional

from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab import distributed, placed, training
from narrowgauge_lab.augment import make_feeds
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import Adadelta
from narrowgauge_lab.schedule import Step

from .model import Net

#: Enough made-up images for full and partial batches, few enough for a test.
_SYNTHETIC = {"channels": 1, "size": 28, "classes": 10, "train": 2000, "test": 1000}


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say: in the precision of this row or by its plan, and in as many
    processes."""
    plan = placed.asked_plan(ctx)
    distributed.spread(ctx, ctx.parameters["nproc"], functools.partial(_train, plan))


def _train(plan: Optional[PlacementPlan], ctx: RowContext, group: distributed.Group) -> None:
    home = placed.home(ctx, plan)
    parameters = ctx.parameters
    data = ctx.asked_data(**_SYNTHETIC)
    classes = data.declaration.classes
    training_set, test_set = make_feeds(data, home, limit=parameters["train_limit"])
    training.seed_everything(ctx.seed)
    recipe = training.Recipe(
        epochs=parameters["epochs"],
        batch_size=parameters["batch_size"],
        precision=parameters["precision"],
        schedule=Step(parameters["lr"], parameters["gamma"]),
        optimizer=functools.partial(Adadelta, rate=parameters["lr"]),
        graphs=parameters["graphs"],
        save_weights=parameters["save_weights"],
        plan=plan,
    )
    model = Net(len(classes)).to(home)
    training.train(ctx, model, training_set, test_set, classes, recipe, group)
