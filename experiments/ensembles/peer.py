"""The same methods by Ensemble-PyTorch (`torchensemble`), where it is installed: a peer to hold our
own against."""

from __future__ import annotations

import contextlib
import importlib
import io
from typing import Any, Iterator, List, Mapping, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import precision, torch_compat
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext

from .members import Numbered, make_member

__all__ = ["fit", "require"]

_CLASSES = {
    "voting": "VotingClassifier",
    "fusion": "FusionClassifier",
    "boosting": "GradientBoostingClassifier",
    "snapshot": "SnapshotEnsembleClassifier",
}
_OPTIMIZERS = {"adam": "Adam", "sgd": "SGD"}
#: Its snapshots refuse cycles of so many epochs or fewer.
_SHORT_CYCLE = 2


def require(parameters: Mapping[str, Any]) -> None:
    """Raises BadValueError for what it does not do here, NotApplicableError where it is missing."""
    if parameters["implementation"] != "torchensemble":
        return
    method = parameters["method"]
    if method not in _CLASSES:
        raise BadValueError(
            f"method={method} is not run by torchensemble here",
            why="it draws from a data loader that reads files, and images are on the device here",
            next_step="-p implementation=own",
        )
    trains = parameters["precision"] == "fp32" and not parameters["compile"]
    if not trains or parameters["diverged"] == "exclude":
        raise BadValueError(
            "torchensemble trains in fp32, compiles nothing and leaves no member out",
            next_step="-p precision=fp32 -p compile=false -p diverged=stop, or "
            "-p implementation=own",
        )
    if method == "snapshot" and parameters["epochs"] // parameters["members"] <= _SHORT_CYCLE:
        raise BadValueError(
            f"cycles of {parameters['epochs'] // parameters['members']} epochs",
            why=f"torchensemble refuses cycles of {_SHORT_CYCLE} epochs or fewer",
            next_step=f"-p epochs={(_SHORT_CYCLE + 1) * parameters['members']}",
        )
    _library()


def _library() -> Any:
    try:
        return importlib.import_module("torchensemble")
    except ImportError as error:
        raise NotApplicableError(
            "torchensemble is not here",
            why=str(error),
            next_step="-p implementation=own, or install it (and joblib) beside torch",
        ) from error


class _Member(nn.Module):
    """It makes members of a class; copies of one object would all have its weights."""

    def __init__(self, network: str, width: float, classes: int) -> None:
        super().__init__()
        self.net = make_member(network, width, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(images)


class _Batches:
    """A feed as what torchensemble takes for a data loader: shuffled and augmented anew in each
    pass, on the feed's device."""

    def __init__(self, feed: Feed, batch_size: int, seed: int, classes: Tuple[str, ...]) -> None:
        self.feed, self.batch_size = feed, batch_size
        self.shuffling = torch_compat.generator_for(torch.device("cpu"), seed)
        self.drawing = torch_compat.generator_for(feed.labels.device, seed)
        self.classes = classes
        #: Where it looks for the classes; without them it would read a whole pass.
        self.dataset = self

    def __len__(self) -> int:
        return -(-len(self.feed) // self.batch_size)

    def __iter__(self) -> Iterator[Tuple[torch.Tensor, torch.Tensor]]:
        order = torch.randperm(len(self.feed), generator=self.shuffling)
        if self.feed.augmentation.active:
            self.feed.redraw(self.drawing)
        for indices in order.to(self.feed.labels.device).split(self.batch_size):
            yield self.feed.batch(indices)


def fit(ctx: RowContext, splits: Splits) -> Optional[List[Numbered]]:
    """The members that torchensemble trains; None where the row has become invalid by one that
    diverged. Nothing is kept until it is done: a row that is stopped begins anew."""
    given, library = ctx.parameters, _library()
    # It sets nothing itself, and torch lets convolutions use TF32 on a GPU unless it is told.
    precision.enter(given["precision"], ctx.device)
    method, classes = given["method"], splits.classes
    ctx.fact("torchensemble", str(getattr(library, "__version__", "unknown")))
    options = {"shrinkage_rate": given["shrinkage"]} if method == "boosting" else {}
    ensemble = getattr(library, _CLASSES[method])(
        estimator=_Member,
        n_estimators=given["members"],
        estimator_args={
            "network": given["network"],
            "width": given["width"],
            "classes": len(classes),
        },
        cuda=ctx.device.type == "cuda",
        **options,
    )
    rates = {"lr": given["lr"], "weight_decay": given["weight_decay"]}
    if given["optimizer"] == "sgd":
        rates["momentum"] = 0.9
    ensemble.set_optimizer(_OPTIMIZERS[given["optimizer"]], **rates)
    batches = _Batches(splits.training, given["batch_size"], ctx.seed, classes)
    with contextlib.redirect_stdout(io.StringIO()):  # it prints every hundredth batch
        ensemble.fit(batches, epochs=given["epochs"], save_model=False)
    members = list(enumerate(ensemble.estimators_))
    for number, member in members:
        if not all(bool(torch.isfinite(each).all()) for each in member.parameters()):
            ctx.invalid(f"member {number + 1} of {len(members)}: diverged: weights are NaN/inf")
            return None
    return members
