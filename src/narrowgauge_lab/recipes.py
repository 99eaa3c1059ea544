"""A training's recipe from a row's parameters, which have the same names in all experiments."""

from __future__ import annotations

import functools
from typing import Any, Mapping, Optional, Sequence

from narrowgauge_lab.anytime.objective import Objective
from narrowgauge_lab.optim import SGD, OptimizerMaker
from narrowgauge_lab.schedule import MultiStep, Schedule, milestones
from narrowgauge_lab.training import Recipe

__all__ = ["recipe_of", "sgd_of", "stepped_sgd"]


def recipe_of(
    parameters: Mapping[str, Any],
    optimizer: OptimizerMaker,
    schedule: Schedule,
    objective: Optional[Objective] = None,
) -> Recipe:
    """By `epochs`, `batch_size`, `precision`, `graphs`; `compile` and `save_weights`, if any."""
    return Recipe(
        epochs=parameters["epochs"],
        batch_size=parameters["batch_size"],
        precision=parameters["precision"],
        schedule=schedule,
        optimizer=optimizer,
        graphs=parameters["graphs"],
        compile=parameters.get("compile", False),
        save_weights=parameters.get("save_weights", False),
        objective=objective,
    )


def sgd_of(parameters: Mapping[str, Any]) -> OptimizerMaker:
    """SGD by `lr`, `weight_decay`, and `momentum` (0.9 where there is none)."""
    return functools.partial(
        SGD,
        rate=parameters["lr"],
        momentum=parameters.get("momentum", 0.9),
        weight_decay=parameters["weight_decay"],
    )


def stepped_sgd(
    parameters: Mapping[str, Any], falls: Sequence[float], objective: Optional[Objective] = None
) -> Recipe:
    """`recipe_of` `sgd_of`, whose rate falls to a tenth at each of these shares of the epochs."""
    schedule = MultiStep(parameters["lr"], milestones(parameters["epochs"], falls))
    return recipe_of(parameters, sgd_of(parameters), schedule, objective)
