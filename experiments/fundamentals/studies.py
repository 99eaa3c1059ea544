"""The studies, their variants, and what each of them is: the settings of one training."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple

from narrowgauge_contract.errors import BadValueError

__all__ = ["UNSET", "VARIANTS", "Settings", "settings_of"]

#: What a parameter is that leaves it to the variant: of a number, a text and a choice.
UNSET = (-1, "", "study")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training. `hidden`: neurons of the dense layers before the output; `convolution`: 20
    filters of 5×5 and pooling by 2 before them. `start`: the deviation of the first weights, 1
    (`large`) or 1/√inputs (`scaled`). `output_bias`: what the output neurons' biases begin at; 0:
    they are drawn. `l1`, `l2`: λ/n. `dropout`: the share of hidden neurons left out. `book` and
    `small`: images and epochs, as the book has them or near to it, and what two cores can do.
    """

    study: str
    hidden: Tuple[int, ...] = (30,)
    convolution: bool = False
    activation: str = "sigmoid"
    cost: str = "cross-entropy"
    start: str = "scaled"
    output_bias: float = 0.0
    l1: float = 0.0
    l2: float = 0.0
    dropout: float = 0.0
    expansion: str = "none"
    momentum: float = 0.0
    rate: float = 0.5
    batch_size: int = 10
    gradients: str = "autograd"
    book: Tuple[int, int] = (50_000, 30)
    small: Tuple[int, int] = (5_000, 4)


#: λ/n of both the book's 5 of 50,000 images and its 0.1 of 1,000.
_DECAY = 1e-4

_COST = Settings("cost", start="large")
_SATURATED = Settings("saturated", output_bias=5.0, book=(50_000, 10))
_OVERFITTING = Settings("overfitting", start="large", book=(1_000, 400), small=(1_000, 60))
_WIDE = dataclasses.replace(_OVERFITTING, study="dropout", hidden=(100,), start="scaled")
_START = Settings("initialisation", rate=0.1, l2=_DECAY)
_MOMENTUM = Settings("momentum", rate=0.02)
_ACTIVATION = Settings("activation", (30, 30), cost="log-likelihood", rate=0.1)
_DEPTH = Settings("depth", rate=0.1, l2=_DECAY)
_BY_HAND = Settings("by-hand", cost="log-likelihood", rate=0.1, l2=_DECAY)
_CONVOLUTION = dataclasses.replace(
    _BY_HAND, hidden=(100,), convolution=True, l2=0.0, book=(50_000, 60), small=(2_000, 3)
)


_of = dataclasses.replace

#: By the value of the parameter `variant`.
VARIANTS: Dict[str, Settings] = {
    "cost-quadratic": _of(_COST, cost="quadratic", rate=3.0),
    "cost-cross-entropy": _COST,
    "cost-log-likelihood": _of(_COST, cost="log-likelihood"),
    "saturated-quadratic": _of(_SATURATED, cost="quadratic"),
    "saturated-cross-entropy": _SATURATED,
    "overfitting-plain": _OVERFITTING,
    "overfitting-l1": _of(_OVERFITTING, l1=_DECAY),
    "overfitting-l2": _of(_OVERFITTING, l2=_DECAY),
    "overfitting-shifts": _of(_OVERFITTING, expansion="shifts"),
    "overfitting-rotations": _of(_OVERFITTING, expansion="rotations"),
    "overfitting-skews": _of(_OVERFITTING, expansion="skews"),
    "overfitting-all-copies": _of(_OVERFITTING, expansion="all"),
    "dropout-none": _WIDE,
    "dropout-half": _of(_WIDE, dropout=0.5),
    "initialisation-large": _of(_START, start="large"),
    "initialisation-scaled": _START,
    "momentum-none": _MOMENTUM,
    "momentum-0.9": _of(_MOMENTUM, momentum=0.9),
    "momentum-none-rate-times-10": _of(_MOMENTUM, rate=0.2),
    "activation-sigmoid": _ACTIVATION,
    "activation-tanh": _of(_ACTIVATION, activation="tanh"),
    "activation-relu": _of(_ACTIVATION, activation="relu"),
    "depth-1": _DEPTH,
    "depth-2": _of(_DEPTH, hidden=(30,) * 2),
    "depth-3": _of(_DEPTH, hidden=(30,) * 3),
    "depth-4": _of(_DEPTH, hidden=(30,) * 4),
    "depth-4-relu": _of(_DEPTH, hidden=(30,) * 4, activation="relu"),
    "depth-4-relu-large": _of(
        _DEPTH, hidden=(30,) * 4, activation="relu", start="large", rate=1e-6, l2=0.0
    ),
    "by-hand-dense-autograd": _BY_HAND,
    "by-hand-dense-written-out": _of(_BY_HAND, gradients="written-out"),
    "by-hand-convolution-autograd": _CONVOLUTION,
    "by-hand-convolution-written-out": _of(_CONVOLUTION, gradients="written-out"),
}

#: Parameters of the same name as a setting's, but for these.
_NAMES = {"lr": "rate", "initialisation": "start"}
_SAME = (
    "cost", "activation", "l1", "l2", "dropout", "expansion", "momentum", "batch_size", "gradients",
)  # fmt: skip


def settings_of(parameters: Mapping[str, Any]) -> Tuple[Settings, Tuple[str, ...]]:
    """The variant's settings with what parameters change of them, and the changes in words.

    `book` has the images and epochs of this row. Raises BadValueError for what cannot be.
    """
    chosen = VARIANTS[parameters["variant"]]
    images, epochs = chosen.small if parameters["scale"] == "small" else chosen.book
    asked = {name: parameters[name] for name in (*_SAME, *_NAMES)}
    changes = {_NAMES.get(name, name): value for name, value in asked.items() if value not in UNSET}
    if parameters["hidden"]:
        changes["hidden"] = _hidden(parameters["hidden"])
    words = [f"{name} {value}" for name, value in changes.items()]
    run_images, run_epochs = parameters["train_limit"] or images, parameters["epochs"] or epochs
    if (run_images, run_epochs) != chosen.book:
        words.append(f"{run_images} images, {run_epochs} epochs")
    found = dataclasses.replace(chosen, **changes, book=(run_images, run_epochs))
    _require_possible(found)
    return found, tuple(words)


def _require_possible(found: Settings) -> None:
    numbers = {
        "l1": found.l1, "l2": found.l2, "momentum": found.momentum, "lr": found.rate,
        "batch_size": found.batch_size - 1,
    }  # fmt: skip
    below = [name for name, value in numbers.items() if value < 0]
    if below:
        raise BadValueError(
            f"{below[0]} is too small",
            why="-1 leaves it to the variant, and nothing else below is a value of it",
            next_step=f"-p {below[0]}=X with X >= {int(below[0] == 'batch_size')}, or leave it out",
        )
    if not 0 <= found.dropout < 1:
        raise BadValueError(
            f"dropout of {found.dropout:g}",
            why="it is the share of hidden neurons that are left out, and one has to stay",
            next_step="-p dropout=S with 0 <= S < 1",
        )


def _hidden(text: str) -> Tuple[int, ...]:
    try:
        sizes = tuple(int(part) for part in text.split("-"))
    except ValueError:
        sizes = ()
    if not sizes or min(sizes) < 1 or len(sizes) > 16:
        raise BadValueError(
            f"hidden={text} is no list of layers",
            why="it is the neurons of 1 to 16 dense layers, by hyphens",
            next_step="-p hidden=30-30, say",
        )
    return sizes
