"""One row of `resnet`: train one depth at one precision with the original's schedule."""

from __future__ import annotations

import functools
from typing import Optional

from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_lab import distributed, placed, training
from narrowgauge_lab.augment import Augmentation, make_feeds
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import MultiStep, milestones

from .model import ResNet

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 300}
#: From this depth on, the full rate is too much for the first epoch (He et al. 2015, section 4.2).
_WARM_UP_DEPTH = 110


def schedule(epochs: int, rate: float, depth: int) -> MultiStep:
    """A tenth of the rate from half, a hundredth from three quarters of the epochs; see above."""
    warm_up = 1 if depth >= _WARM_UP_DEPTH else 0
    steps = milestones(epochs, (0.5, 0.75))
    return MultiStep(rate, steps, warm_up_epochs=warm_up, warm_up_rate=0.1 * rate)


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say: in the depth and precision of this row or by its plan, and in
    as many processes."""
    plan = placed.asked_plan(ctx)
    distributed.spread(ctx, ctx.parameters["nproc"], functools.partial(_train, plan))


def _train(plan: Optional[PlacementPlan], ctx: RowContext, group: distributed.Group) -> None:
    home = placed.home(ctx, plan)
    parameters = ctx.parameters
    data = ctx.asked_data(**_SYNTHETIC)
    classes = data.declaration.classes
    depth = int(parameters["depth"])
    training_set, test_set = make_feeds(
        data,
        home,
        limit=parameters["train_limit"],
        augmentation=Augmentation(padding=4, flip=True),
        channels_last=parameters["layout"] == "nhwc",
    )
    training.seed_everything(ctx.seed)
    recipe = training.Recipe(
        epochs=parameters["epochs"],
        batch_size=parameters["batch_size"],
        precision=parameters["precision"],
        schedule=schedule(parameters["epochs"], parameters["lr"], depth),
        optimizer=functools.partial(
            SGD,
            rate=parameters["lr"],
            momentum=parameters["momentum"],
            weight_decay=parameters["weight_decay"],
        ),
        graphs=parameters["graphs"],
        save_weights=parameters["save_weights"],
        plan=plan,
    )
    model = ResNet(depth, len(classes)).to(home)
    training.train(ctx, model, training_set, test_set, classes, recipe, group)
