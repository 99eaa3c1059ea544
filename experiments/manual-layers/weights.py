"""Where a row's weights come from: a file, an earlier row of the run, or training by the recipe."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Optional, Sequence

from torch import nn

from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab import training
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import MultiStep
from narrowgauge_lab.shared_weights import asked_file, trained_weights

__all__ = ["FOLDER", "file_sha256", "give_weights"]

#: Files that parameters name are looked for here first: a container sees no others.
FOLDER = Path(__file__).parent


def give_weights(
    ctx: RowContext, model: nn.Module, training_set: Feed, test_set: Feed, classes: Sequence[str]
) -> bool:
    """Give `model` the row's weights, as `trained_weights` does: by the original's recipe, or what
    parameters make of it, where no file is asked for. False where training diverged."""
    parameters = ctx.parameters
    recipe = training.Recipe(
        epochs=parameters["epochs"],
        batch_size=parameters["batch_size"],
        precision="fp32",
        schedule=MultiStep(parameters["lr"], ()),
        optimizer=functools.partial(SGD, rate=parameters["lr"], momentum=parameters["momentum"]),
        graphs=parameters["graphs"],
    )

    def train(stage: RowContext, untrained: nn.Module) -> None:
        training.train(stage, untrained, training_set, test_set, classes, recipe)

    return trained_weights(ctx, model, _asked(ctx), train, f"{parameters['network']}-")


def file_sha256(ctx: RowContext) -> str:
    """Of the file of weights that the row asks for; empty where it asks for none."""
    asked = _asked(ctx)
    return sha256_file(asked) if asked else ""


def _asked(ctx: RowContext) -> Optional[Path]:
    return asked_file(str(ctx.parameters["weights"]), FOLDER)
