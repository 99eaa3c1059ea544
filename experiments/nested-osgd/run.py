"""One row of `nested-osgd`: a network of several exits, trained by one way to combine losses."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Mapping

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import training
from narrowgauge_lab.anytime import operating
from narrowgauge_lab.anytime.feeds import splits_of
from narrowgauge_lab.anytime.gradients import Combination, Orthogonalised, PCGrad, Sum, Weighted
from narrowgauge_lab.anytime.loss_weights import parse_loss_weights
from narrowgauge_lab.anytime.objective import ExitLosses
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.augment import Augmentation
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.recipes import stepped_sgd
from narrowgauge_lab.shared_weights import asked_file

from .networks import make

__all__ = ["combination", "run"]

_SYNTHETIC = {"channels": 3, "size": 32, "classes": 10, "train": 600, "test": 200}
#: Where the rate falls to a tenth, as shares of the epochs. The notes' log shows three such drops.
_STEPS = (0.5, 0.75, 0.9)


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say and score every exit."""
    parameters = ctx.parameters
    last = parameters["layout"] == "nhwc"
    moved = Augmentation(padding=4, flip=True)
    splits = splits_of(ctx, ctx.asked_data(**_SYNTHETIC), moved, channels_last=last)
    training.seed_everything(ctx.seed)
    net, about = make(parameters, len(splits.classes))
    ctx.fact("variant", about.variant)
    ctx.fact("exits", net.exits)
    way = combination(parameters, net.exits)
    operating.require_policy(parameters["policy"], net.exits, paper=False)
    if parameters["optimizer"] == "osgd":
        ctx.fact("reconstruction", "Gram and Schmidt's process; the paper's text was not to be had")
    objective = ExitLosses(net.exits, way, parameters["cosine_images"])
    net.to(ctx.device)
    trained = train_anytime(
        ctx, net, splits, stepped_sgd(parameters, _STEPS, objective), about,
        weights=asked_file(parameters["weights"], Path(__file__).parent),
    )  # fmt: skip
    if trained:
        operating.operate_row(ctx, "entropy")


def combination(parameters: Mapping[str, Any], exits: int) -> Combination:
    """What `optimizer` and its options ask for. Raises BadValueError for options that do nothing
    there, and for weights that are not one for each exit."""
    name = parameters["optimizer"]
    _require_used(parameters)
    if exits < 2 and name in ("pcgrad", "osgd"):
        raise BadValueError(
            f"optimizer={name} does nothing with one exit",
            why="gradients of exits are projected onto one another's, and there is no other",
            next_step="-p optimizer=sum or -p exits=4",
        )
    per_tensor = parameters["projection"] == "tensor"
    momentum = parameters["momentum"] if parameters["project"] == "momentum" else None
    if name == "weighted":
        text = parameters["loss_weights"]
        return parse_loss_weights(text, exits) if text else _falling(exits)
    if name == "pcgrad":
        return PCGrad(per_tensor, momentum)
    if name == "osgd":
        return Orthogonalised(
            per_tensor,
            momentum,
            negative_only=parameters["negative_only"],
            rescale=parameters["rescale"],
            last_first=parameters["priority"] == "last",
        )
    return Sum()


#: Options, the parameter and its values that take them, and what leaves them out.
_OPTIONS = {
    "exits": ("network", ("nested",), 4),
    "blocks": ("network", ("nested", "iresnext", "iresnext-incremental"), 1),
    "projection": ("optimizer", ("pcgrad", "osgd"), "global"),
    "project": ("optimizer", ("pcgrad", "osgd"), "gradient"),
    "negative_only": ("optimizer", ("osgd",), False),
    "rescale": ("optimizer", ("osgd",), False),
    "priority": ("optimizer", ("osgd",), "first"),
    "loss_weights": ("optimizer", ("weighted",), ""),
}


def _require_used(parameters: Mapping[str, Any]) -> None:
    """Or a row would say that it varied what it did not."""
    for option, (decider, takers, unset) in _OPTIONS.items():
        if parameters[decider] not in takers and parameters[option] != unset:
            # A profile may have set it, which leaving it out would not undo.
            undo = f"-p {option}={str(unset).lower()}" if unset != "" else f"leave {option} out"
            raise BadValueError(
                f"{option}={parameters[option]} does nothing with {decider}={parameters[decider]}",
                why=f"only {' and '.join(takers)} {'take' if len(takers) > 1 else 'takes'} it",
                next_step=f"-p {decider}={','.join(takers)} or {undo}",
            )


def _falling(exits: int) -> Weighted:
    return Weighted(tuple((exits - number) / exits for number in range(exits)))
