"""One update of a network of several exits: as `stepping`, with the losses of an `Objective`."""

from __future__ import annotations

import itertools
import math
from typing import Any, Callable, Dict, Optional, Tuple

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab import precision
from narrowgauge_lab.anytime.gradients import PerExit, Projection, cosines
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.objective import Losses, Objective, cosine_names
from narrowgauge_lab.anytime.staged import StagedForward
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.compiling import Forward, compiled_call, compiled_or_say
from narrowgauge_lab.distributed import Group
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.optim import FlatOptimizer
from narrowgauge_lab.stepping import Stepper

__all__ = ["ExitStepper"]

#: Of `Losses`, in their order.
_Parts = Tuple[Tuple[Optional[torch.Tensor], ...], torch.Tensor, Optional[torch.Tensor]]


class ExitStepper(Stepper):
    """Updates by the losses of `objective`, which `optimizer` is made for, and sums them by exit.

    Processes exchange the gradient of each exit where they are combined by more than their sum: the
    projection is of the gradients of the whole batch.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: FlatOptimizer,
        training_set: Feed,
        mode: precision.Mode,
        group: Group,
        batch_size: int,
        graphs: str,
        objective: Objective,
        compiles: bool = False,
    ) -> None:
        self.objective = objective
        self._losses: Callable[..., Any] = self._compiled(model, batch_size, compiles)
        #: Over the epoch: loss · images of each exit, images of each exit, extra loss · images.
        self.sums = torch.zeros(2 * objective.exits + 1, dtype=torch.float64, device=mode.device)
        super().__init__(model, optimizer, training_set, mode, group, batch_size, graphs)

    def _compiled(self, model: torch.nn.Module, batch: int, compiles: bool) -> Callable[..., Any]:
        """The losses as `objective` wants them compiled."""
        if not compiles:
            return Forward(self._parts, batch)
        if not isinstance(self.objective.combination, Projection):
            return Forward(self._parts, batch, compiled_call(model, self._parts))
        staged = isinstance(model, AnytimeNetwork)
        # One that answers all exits in a pass of its own has no stages to compile there.
        if not (staged and type(model).forward is AnytimeNetwork.forward):
            raise UsageError(
                "torch.compile does not go with this training",
                why=f"gradients are projected exit by exit, and {type(model).__name__} has no "
                "stages to train by that could be compiled one by one",
                next_step="-p compile=false",
            )
        return StagedForward(self._parts, model, batch)

    def begin(self) -> None:
        super().begin()
        self.sums.zero_()

    def __call__(self, indices: torch.Tensor) -> None:
        self.kind = self.objective.begin_update()
        super().__call__(indices)

    def losses(self, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        """Of a batch, in the row's precision."""
        with self.mode.autocast():
            return self.objective.losses(self.model, images, labels)

    def _parts(self, images: torch.Tensor, labels: torch.Tensor) -> _Parts:
        """The losses as a compiler takes them."""
        found = self.objective.losses(self.model, images, labels)
        return found.per_exit, found.logits, found.extra

    def _gradients(self, indices: torch.Tensor) -> None:
        images, labels = self.training_set.batch(indices)
        with compiled_or_say():
            with self.mode.autocast():
                found = Losses(*self._losses(images, labels))
            total = found.total(self.objective.weights)
            if isinstance(self.optimizer, PerExit):
                each = [self._ready(loss) for loss in found.per_exit]
                self.optimizer.differentiate_each(each, self._ready(found.extra))
            else:
                ready = self._ready(total)
                assert ready is not None
                self.optimizer.differentiate_partly(ready)
        correct = (found.logits.detach().argmax(1) == labels).sum()
        count = len(labels)
        self.totals.add_(torch.stack((total.detach().double() * count, correct.double())))
        self.sums.add_(self._summed(found, count))

    def _ready(self, loss: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
        """To be differentiated: this process's part of the whole loss, scaled where losses are."""
        if loss is None:
            return None
        return self._scaled(loss if self.group.size == 1 else loss * self._part)

    def _scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss if self.loss_scale is None else self.loss_scale.apply(loss)

    def _summed(self, found: Losses, count: int) -> torch.Tensor:
        zero = torch.zeros((), dtype=torch.float64, device=self.sums.device)
        every = [*found.per_exit, found.extra]
        sums = [zero if loss is None else loss.detach().double() * count for loss in every]
        seen = [zero if loss is None else zero + count for loss in found.per_exit]
        return torch.stack([*sums[:-1], *seen, sums[-1]])

    def epoch_values(self, count: int) -> Dict[str, float]:
        """After an epoch over `count` images: the mean loss of each exit, NaN where no update had
        it, and the mean extra one. Waits for the device."""
        self.group.all_reduce_(self.sums)
        objective, sums = self.objective, self.sums.tolist()
        found = {}
        for place, number in enumerate(objective.numbers):
            seen = sums[objective.exits + place]
            found[f"exit{number}_train_loss"] = sums[place] / seen if seen else math.nan
        if objective.extra:
            found[objective.extra] = sums[-1] / count
        return found

    def cosines(self) -> Dict[str, float]:
        """The cosine between the gradients of each two exits as the weights are now, in eval mode
        and over the objective's first training images; nothing is changed."""
        limit, numbers = self.objective.cosine_images, self.objective.numbers
        if not limit:
            return {}
        first = torch.arange(min(limit, len(self.training_set)), device=self.mode.device)
        images, labels = self.training_set.batch(first)
        with in_eval_mode(self.model), torch.random.fork_rng(devices=[]):
            found = self.losses(images, labels).per_exit
            # Scaled, or small gradients are 0 in fp16; no cosine depends on the scale.
            wanted = {n: self._scaled(loss) for n, loss in zip(numbers, found) if loss is not None}
            table = cosines(list(wanted.values()), self.optimizer.parameters).tolist()
        values = dict.fromkeys(cosine_names(numbers), math.nan)
        for (row, i), (column, j) in itertools.combinations(enumerate(wanted), 2):
            values[f"gradient_cosine_{i}_{j}"] = table[row][column]
        return values
