"""What a network of several exits is trained by: its losses, and how they become one update.

`Recipe.objective` takes one; without it the loop trains one output by cross entropy. Systems with
losses of their own (distillation between widths, the cost of pondering) derive from `Objective`.
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
from typing import Dict, Hashable, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.gradients import Combination, Sum

__all__ = ["ExitLosses", "LastExitLoss", "Losses", "Objective"]


@dataclasses.dataclass(frozen=True)
class Losses:
    """What one batch gives. All losses are scalars, means over the images, in nats.

    `per_exit`: first exit first; None for an exit that this update leaves out. `logits`: [B,
    classes] of the last exit, for the training accuracy. `extra`: what is added to them, such as
    a cost of pondering; its gradient is never projected.
    """

    per_exit: Tuple[Optional[torch.Tensor], ...]
    logits: torch.Tensor
    extra: Optional[torch.Tensor] = None

    def total(self, weights: Tuple[float, ...]) -> torch.Tensor:
        """Their weighted sum with `extra`: what the metric `train_loss` is the mean of."""
        parts: List[torch.Tensor] = [
            loss if weight == 1 else loss * weight
            for loss, weight in zip(self.per_exit, weights)
            if loss is not None
        ]
        parts += [] if self.extra is None else [self.extra]
        found = parts[0]
        for part in parts[1:]:
            found = found + part
        return found


class Objective(abc.ABC):
    """The losses of a training step. Nothing in `losses` may ask the device for an answer, since it
    may be under capture in a CUDA graph; updates of one kind (`begin_update`) are captured once.

    `exits`: how many losses there are. `combination`: how they become an update. `extra`: the name
    of the metric of the mean extra loss of an epoch (its unit is nat); empty: there is none.
    `cosine_images`: after each epoch the cosines between the exits' gradients are recorded, over
    the first so many training images in eval mode; 0: never.
    """

    exits: int
    combination: Combination = Sum()
    extra: str = ""
    cosine_images: int = 0

    @abc.abstractmethod
    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        """The losses of `images` [B, C, H, W] with `labels` int64 [B]. Called within the row's
        autocast; logits should be made float32 before a loss is taken of them."""

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        """Told before each epoch, counted from 0, also of the first after a resume: the place to
        set what depends on it, in tensors on the device."""
        del epoch, model

    def begin_update(self) -> Hashable:
        """Told before each update, on the host: the place to choose what changes from one update to
        the next and is no tensor. Gives its kind: two of one kind launch the same kernels on the
        same sizes."""
        return None

    def after_epoch(self, model: nn.Module) -> Dict[str, float]:
        """Asked after each epoch, before its checkpoint: what the objective measures of the model
        then, by names that `metrics` has. It changes nothing, and draws nothing at random."""
        del model
        return {}

    @property
    def weights(self) -> Tuple[float, ...]:
        """What each exit's loss is multiplied by in the recorded training loss."""
        return self.combination.weights(self.exits)

    @property
    def numbers(self) -> Tuple[int, ...]:
        """Which of the network's exits the losses are of: what its metrics are named after."""
        return tuple(range(self.exits))

    def metrics(self) -> Dict[str, Tuple[str, str]]:
        """The epoch's metrics beside those of every training: unit and source by name."""
        found = {f"exit{k}_train_loss": ("nat", "computed") for k in self.numbers}
        found.update({f"exit{k}_test_accuracy": ("%", "computed") for k in self.numbers})
        found.update({self.extra: ("nat", "computed")} if self.extra else {})
        if self.cosine_images:
            found.update(dict.fromkeys(cosine_names(self.numbers), ("1", "computed")))
        return found


class ExitLosses(Objective):
    """The cross entropy of every exit of a network whose forward gives the logits of all."""

    def __init__(
        self, exits: int, combination: Optional[Combination] = None, cosine_images: int = 0
    ) -> None:
        """Raises BadValueError where the combination is not one of so many exits."""
        if exits < 1:
            raise BadValueError(f"{exits} exits", why="a network has one at least")
        self.exits = exits
        self.combination = Sum() if combination is None else combination
        self.cosine_images = cosine_images if exits > 1 else 0
        self.combination.weights(exits)

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        answers = [logits.float() for logits in model(images)]
        return Losses(tuple(F.cross_entropy(each, labels) for each in answers), answers[-1])


class LastExitLoss(Objective):
    """The cross entropy of the last exit alone, without the heads before it: how BranchyNet trains
    its trunk first."""

    exits = 1

    def __init__(self, last: int) -> None:
        """`last`: the number of the network's last exit, from 0."""
        self.last = last

    @property
    def numbers(self) -> Tuple[int, ...]:
        return (self.last,)

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        until = getattr(model, "forward_until")  # noqa: B009  # of AnytimeNetwork
        logits = until(self.last, images).float()
        return Losses((F.cross_entropy(logits, labels),), logits)


def cosine_names(numbers: Sequence[int]) -> List[str]:
    """The metrics of the cosine between the gradients of each two exits, `gradient_cosine_0_1`."""
    pairs = itertools.combinations(numbers, 2)
    return [f"gradient_cosine_{one}_{other}" for one, other in pairs]
