"""How the members of each method are trained, one stage of the row each, so that a row that was
stopped goes on with the member that it was at."""

from __future__ import annotations

import copy
import dataclasses
import zlib
from typing import List, Optional

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import training
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.schedule import Cosine

from .boosting import Boosted, Residual
from .members import COMBINED, IMAGENET_FORM, Joined, Numbered, make_member

__all__ = ["Fitting", "bootstrapped", "require_batches", "require_fitting"]


def bootstrapped(feed: Feed, seed: int) -> Feed:
    """As many images of `feed`, drawn with replacement (Breiman 1996), augmented as there."""
    drawn = np.random.RandomState(seed).randint(0, len(feed), len(feed))
    chosen = torch.from_numpy(drawn).to(feed.labels.device)
    mine = copy.copy(feed)
    mine.images = feed.images.index_select(0, chosen)
    mine.labels = feed.labels.index_select(0, chosen)
    return mine


@dataclasses.dataclass
class Fitting:
    """The training of a row's members. `recipe`: of one member, or of all together for fusion; its
    epochs are shared by the cycles of a snapshot ensemble."""

    ctx: RowContext
    splits: Splits
    recipe: training.Recipe

    def __post_init__(self) -> None:
        given = self.ctx.parameters
        self.method, self.count = given["method"], given["members"]
        classes = len(self.splits.classes)
        #: All are made first: the same random weights whichever of them a resume begins with.
        self.members = [
            make_member(given["network"], given["width"], classes).to(self.ctx.device)
            for _ in range(1 if self.method == "snapshot" else self.count)
        ]
        self.excluded: List[int] = []

    def fit(self) -> Optional[List[Numbered]]:
        """The trained members with their numbers from 0, without those that diverged where the row
        leaves them out; None where the row has become invalid by one that did."""
        ways = {
            "voting": self._independent,
            "bagging": self._independent,
            "snapshot": self._snapshots,
            "fusion": self._together,
            "boosting": self._boosted,
        }
        found = ways[self.method]()
        if self.excluded:
            self.ctx.fact("members_excluded", [number + 1 for number in self.excluded])
        if found is not None and not found:
            self.ctx.invalid("no member is left: all diverged")
            return None
        return found

    def _independent(self) -> Optional[List[Numbered]]:
        found: List[Numbered] = []
        for number, member in enumerate(self.members):
            feed = self.splits.training
            if self.method == "bagging":
                feed = bootstrapped(feed, _seed(self.ctx.seed, number))
            if self._train(number, member, feed, self.recipe):
                found.append((number, member))
            elif not self._left_out(number):
                return None
        return found

    def _boosted(self) -> Optional[List[Numbered]]:
        found: List[Numbered] = []
        shrinkage = self.ctx.parameters["shrinkage"]
        objective = Residual(self.recipe.batch_size)
        recipe = dataclasses.replace(self.recipe, objective=objective)
        for number, member in enumerate(self.members):
            before = [each for _, each in found]
            joined = Boosted(member, before, shrinkage, len(self.splits.classes))
            joined.to(self.ctx.device)
            if self._train(number, joined, self.splits.training, recipe):
                found.append((number, member))
            elif not self._left_out(number):
                return None
        return found

    def _together(self) -> Optional[List[Numbered]]:
        joined = Joined(self.members, COMBINED["fusion"])
        name = f"all {self.count} members, which are trained together"
        if not self._train(None, joined, self.splits.training, self.recipe, name):
            return None
        return list(enumerate(self.members))

    def _snapshots(self) -> Optional[List[Numbered]]:
        """One network over cycles of a cosine, from the rate to 0 and back at once (Loshchilov and
        Hutter 2017; Huang et al. 2017); its weights at the end of each are a member."""
        epochs, rate = self.recipe.epochs // self.count, self.ctx.parameters["lr"]
        schedule = Cosine(rate, epochs, each_update=True)
        # One of all cycles: its moments go on.
        optimizer = self.recipe.optimizer(self.members[0])
        cycle = dataclasses.replace(
            self.recipe, epochs=epochs, schedule=schedule, optimizer=lambda _: optimizer
        )
        found: List[Numbered] = []
        for number in range(self.count):
            if not self._train(number, self.members[0], self.splits.training, cycle):
                return None
            found.append((number, copy.deepcopy(self.members[0])))
        return found

    def _train(
        self,
        number: Optional[int],
        model: nn.Module,
        feed: Feed,
        recipe: training.Recipe,
        name: str = "",
    ) -> bool:
        """One stage of the row; False where it diverged. The row is told which member did, unless
        it leaves such out."""
        reasons: List[str] = []
        stage = self.ctx.for_stage(
            "fusion" if number is None else f"member{number}", reasons.append
        )
        # Or all members would see the same images in the same order.
        stage.seed = _seed(self.ctx.seed, number or 0)
        training.seed_everything(stage.seed)
        kept = dataclasses.replace(recipe, keep_last=True, save_confusion=False)
        splits = self.splits
        converged = training.train(stage, model, feed, splits.test, splits.classes, kept)
        name = name or f"member {(number or 0) + 1} of {self.count}"
        if not converged and self._excludes:
            self.ctx.log(f"{name} is left out: {reasons.pop()}")
        for reason in reasons:
            self.ctx.invalid(f"{name}: {reason}")
        return converged

    @property
    def _excludes(self) -> bool:
        return bool(self.ctx.parameters["diverged"] == "exclude")

    def _left_out(self, number: int) -> bool:
        if self._excludes:
            self.excluded.append(number)
        return self._excludes


def require_fitting(ctx: RowContext) -> None:
    """Raises BadValueError for options that cannot be, or do nothing, with the row's method."""
    given = ctx.parameters
    method, epochs, count = given["method"], given["epochs"], given["members"]
    if method == "snapshot" and epochs % count:
        raise BadValueError(
            f"{epochs} epochs are not {count} cycles of a whole number of them",
            why="a snapshot ensemble takes a member at the end of each cycle",
            next_step=f"-p epochs={max(1, epochs // count) * count}, or another number of members",
        )
    if method in ("snapshot", "fusion") and given["diverged"] == "exclude":
        raise BadValueError(
            f"diverged=exclude does nothing with method={method}",
            why="its members are one training: where that diverges, none of them is good",
            next_step="-p diverged=stop",
        )
    if method != "boosting" and given["shrinkage"] != 1.0:
        raise BadValueError(
            f"shrinkage={given['shrinkage']:g} does nothing with method={method}",
            next_step="-p method=boosting or -p shrinkage=1",
        )


def require_batches(ctx: RowContext, images: int) -> None:
    """Raises BadValueError where batch normalisation would get one value of a channel, with so many
    training images."""
    batch_size = ctx.parameters["batch_size"]
    if ctx.parameters["network"] == IMAGENET_FORM and 1 in (batch_size, images % batch_size):
        raise BadValueError(
            f"a batch of {IMAGENET_FORM} would hold one image",
            why="one position of it reaches the last stage, and one value has no variance; "
            f"there are {images} images, in batches of {batch_size}",
            next_step="another -p batch_size or -p train_limit",
        )


def _seed(seed: int, number: int) -> int:
    """A seed of its own for each member, the same on every machine."""
    return zlib.crc32(f"{seed} member {number}".encode("ascii"))
