"""One row of `fundamentals`: one variant of one study, trained on MNIST."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Dict

from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime.feeds import Splits, make_splits
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.training import train_anytime
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.optim import SGD
from narrowgauge_lab.schedule import Step

from .expansion import EXPANSIONS, ExpandedFeed
from .network import Network
from .objective import Cost
from .studies import Settings, settings_of

__all__ = ["run"]

_SYNTHETIC = {"channels": 1, "size": 28, "classes": 10, "train": 1500, "test": 300}


def run(ctx: RowContext) -> None:
    """Train as `ctx.parameters` say and record every epoch and every layer."""
    parameters = ctx.parameters
    settings, changes = settings_of(parameters)
    data = ctx.asked_data(**_SYNTHETIC)
    splits = _splits(ctx, data, settings)
    training.seed_everything(ctx.seed)
    net = Network(settings, len(splits.classes)).to(ctx.device)
    # Before the first gradient: cuDNN takes tf32 for a convolution unless told otherwise.
    precision.enter("fp32", ctx.device)
    about = About("fundamentals", ", ".join((parameters["variant"], *changes)))
    ctx.fact("study", settings.study)
    ctx.fact("variant", about.variant)
    ctx.fact("settings", _told(settings))
    cost = Cost(settings, net.layers, splits)
    _look_at_start(ctx, cost, net)
    train_anytime(ctx, net, splits, _recipe(ctx, settings, cost), about)


def _told(settings: Settings) -> Dict[str, Any]:
    """The settings of this row, by the names that the README has for them."""
    found = dataclasses.asdict(settings)
    images, epochs = found.pop("book")
    del found["small"]
    return {**found, "hidden": list(settings.hidden), "images": images, "epochs": epochs}


def _look_at_start(ctx: RowContext, cost: Cost, net: Network) -> None:
    """The norms of the gradients before anything is learnt: of each layer, and what is left of the
    last hidden layer's at the first."""
    by_weights, by_biases = cost.gradient_norms(net)
    for name, norms in (("weight", by_weights), ("bias", by_biases)):
        metric = f"{name}_gradient_at_start"
        ctx.metric(metric, norms, unit="1", source="computed", index="layer")
    first, last = by_biases[0], by_biases[-2]
    ctx.metric("first_layer_gradient_at_start", first, unit="1", source="computed")
    if last > 0:
        ctx.metric("first_over_last_at_start", first / last, unit="1", source="computed")


def _splits(ctx: RowContext, data: FlatData, settings: Settings) -> Splits:
    """Pixels are 0 to 1, as in the book, and not normalised."""
    declaration = dataclasses.replace(data.declaration, mean=(0.0,), std=(1.0,))
    splits = make_splits(
        dataclasses.replace(data, declaration=declaration),
        ctx.device,
        validation=ctx.parameters["validation"],
        train_limit=settings.book[0],
        test_limit=ctx.parameters["test_limit"],
    )
    copies = EXPANSIONS[settings.expansion]
    if not copies:
        return splits
    chosen = splits.training_samples
    images, labels = data.train_images[chosen], data.train_labels[chosen]
    feed = ExpandedFeed(images, labels, declaration.mean, declaration.std, ctx.device, copies)
    return dataclasses.replace(splits, training=feed)


def _recipe(ctx: RowContext, settings: Settings, cost: Cost) -> training.Recipe:
    return training.Recipe(
        epochs=settings.book[1],
        batch_size=settings.batch_size,
        precision="fp32",
        schedule=Step(settings.rate, 1.0),
        optimizer=functools.partial(SGD, rate=settings.rate, momentum=settings.momentum),
        graphs=ctx.parameters["graphs"],
        save_weights=ctx.parameters["save_weights"],
        objective=cost,
    )
