"""One row of `mnist`: train the network at one precision and record every epoch."""

from __future__ import annotations

import functools

from narrowgauge_lab import training
from narrowgauge_lab.augment import make_feeds
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import Adadelta
from narrowgauge_lab.schedule import Step

from .model import Net

#: Enough made-up images for full and partial batches, few enough for a test.
_SYNTHETIC = {"channels": 1, "size": 28, "classes": 10, "train": 2000, "test": 1000}


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say, in the precision of this row."""
    parameters = ctx.parameters
    name = parameters["data"]
    data = ctx.synthetic(**_SYNTHETIC) if name == "synthetic" else ctx.data(name)
    classes = data.declaration.classes
    training_set, test_set = make_feeds(data, ctx.device, limit=parameters["train_limit"])
    training.seed_everything(ctx.seed)
    recipe = training.Recipe(
        epochs=parameters["epochs"],
        batch_size=parameters["batch_size"],
        precision=parameters["precision"],
        schedule=Step(parameters["lr"], parameters["gamma"]),
        optimizer=functools.partial(Adadelta, rate=parameters["lr"]),
        graphs=parameters["graphs"],
        save_weights=parameters["save_weights"],
    )
    training.train(ctx, Net(len(classes)).to(ctx.device), training_set, test_set, classes, recipe)
