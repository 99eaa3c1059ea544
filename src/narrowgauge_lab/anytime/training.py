"""Training of an anytime network from its first stage to the file that its scores are taken of."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import Callable, Iterator, List, Optional, Sequence

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab import precision, training
from narrowgauge_lab.anytime import logits_file, scores
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.objective import Objective
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure.cost import serialised_bytes
from narrowgauge_lab.shared_weights import load_weights
from narrowgauge_lab.training import Recipe

__all__ = ["Stage", "train_anytime"]


@dataclasses.dataclass(frozen=True)
class Stage:
    """A training before the main one, such as of the trunk alone. Its metrics and facts begin with
    `name_`, and parameters that its losses do not reach stay as they are."""

    name: str
    recipe: Recipe


def train_anytime(
    ctx: RowContext,
    net: AnytimeNetwork,
    splits: Splits,
    recipe: Recipe,
    about: logits_file.About,
    *,
    stages: Sequence[Stage] = (),
    weights: Optional[Path] = None,
    settle: Optional[Callable[[], None]] = None,
) -> bool:
    """Train `net`, which is on `ctx.device`, stage after stage and then by `recipe`, each with an
    objective; or take the state dict of a file `weights` and train nothing. Then leave `logits.npz`
    and record its scores, and `weights_bytes`, of all tensors of the state dict. `settle` is called
    once the net is trained, before it is asked anything: for batch statistics that are taken anew,
    say. By what policy samples leave is `operating`'s.

    A row that was stopped goes on with the stage and epoch that it was in, and trains nothing again
    if it was stopped later: the checkpoints of all stages stay until the row clears its own. False
    where a training diverged: the row is INVALID, later stages do not happen, and no file is
    written.
    Raises what `training.train`, `load_weights` and `logits_file.write` raise, and UsageError for a
    recipe without objective.
    """
    splits.record(ctx)
    if weights is not None:
        load_weights(net, weights)
        ctx.fact("weights_from", f"the file {weights.name}")
        ctx.fact("weights_sha256", sha256_file(weights))
    elif not _trained(ctx, net, splits, recipe, stages):
        return False
    elif settle is not None:
        settle()
    mode = precision.enter(recipe.precision, ctx.device)
    run = logits_file.write(ctx, net, splits, about, mode, batch_size=recipe.test_batch_size)
    ctx.metric("weights_bytes", serialised_bytes(net), unit="B", source="computed")
    scores.record(ctx, run)
    net.eval()
    return True


def _trained(
    ctx: RowContext,
    net: AnytimeNetwork,
    splits: Splits,
    recipe: Recipe,
    stages: Sequence[Stage],
) -> bool:
    for stage in stages:
        # Half-trained weights, and what they confuse, would lie where those of the whole row are
        # looked for.
        unwritten = dataclasses.replace(stage.recipe, save_weights=False, save_confusion=False)
        with _only_reached(net, splits, _objective_of(net, unwritten)):
            if not _train(ctx.for_stage(stage.name), net, splits, unwritten):
                return False
    return _train(ctx, net, splits, recipe)


def _train(ctx: RowContext, net: AnytimeNetwork, splits: Splits, recipe: Recipe) -> bool:
    """One stage. Its last checkpoint stays: a row that is stopped later begins after it, with the
    metrics of its epochs."""
    _objective_of(net, recipe)
    kept = dataclasses.replace(recipe, keep_last=True)
    return training.train(ctx, net, splits.training, splits.test, splits.classes, kept)


def _objective_of(net: AnytimeNetwork, recipe: Recipe) -> Objective:
    if recipe.objective is None:
        raise UsageError(
            f"{type(net).__name__} has {net.exits} exits and is to be trained without an objective",
            next_step="give the recipe one, such as anytime.objective.ExitLosses",
        )
    return recipe.objective


@contextlib.contextmanager
def _only_reached(net: AnytimeNetwork, splits: Splits, objective: Objective) -> Iterator[None]:
    """Freeze what a stage's losses do not depend on, such as heads while the trunk is trained:
    weight decay would move it. Not of the last stage, whose losses may be of other exits in each
    update."""
    frozen = _unreached(net, splits, objective)
    for each in frozen:
        each.requires_grad_(False)
    try:
        yield
    finally:
        for each in frozen:
            each.requires_grad_(True)


def _unreached(
    net: AnytimeNetwork, splits: Splits, objective: Objective
) -> List[torch.nn.Parameter]:
    """The parameters that the losses of two images do not depend on. A function of its own: a loss
    that is kept keeps the graph behind it, whose nodes belong to this stream, while steps run on
    another one, to be captured."""
    device = splits.training.labels.device
    images, labels = splits.training.batch(torch.arange(2, device=device))
    wanted = [each for each in net.parameters() if each.requires_grad]
    with in_eval_mode(net), torch.random.fork_rng(devices=[]):
        total = objective.losses(net, images, labels).total(objective.weights)
        found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [each for each, gradient in zip(wanted, found) if gradient is None]
