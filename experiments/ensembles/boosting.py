"""Gradient boosting for classification: each member fits what the members before leave over."""

from __future__ import annotations

from typing import Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.anytime.gradients import Weighted
from narrowgauge_lab.anytime.objective import Losses, Objective
from narrowgauge_lab.compiling import PartByPart

from .members import combine

__all__ = ["Boosted", "Residual"]


class Boosted(PartByPart):
    """The members so far with a new one, which alone is trained: gives their sum."""

    def __init__(
        self, member: nn.Module, before: Sequence[nn.Module], shrinkage: float, classes: int
    ) -> None:
        super().__init__()
        self.member = member
        self.shrinkage, self.classes = shrinkage, classes
        #: A tuple is no part of a module: neither trained, nor kept in the checkpoint.
        self.before = tuple(before)
        for each in self.before:
            each.eval()

    def so_far(self, images: torch.Tensor) -> torch.Tensor:
        """What the members before say [B, classes]; zeros of none."""
        if not self.before:
            return images.new_zeros((len(images), self.classes))
        with torch.no_grad():
            return combine([self.ask(each, images) for each in self.before], "sum", self.shrinkage)

    def new(self, images: torch.Tensor) -> torch.Tensor:
        """What the new member says, float32 [B, classes]."""
        return self.ask(self.member, images).float()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.so_far(images) + self.shrinkage * self.new(images)


class Residual(Objective):
    """Least squares of the new member against one-hot labels less the probabilities so far
    (Friedman 2001, for the cross entropy). Summed over a batch, as Ensemble-PyTorch has it, which
    matters beside weight decay: the mean over images times the images of a full batch, in records
    too, where its unit is no nat.
    """

    exits = 1

    def __init__(self, batch_size: int) -> None:
        self.combination = Weighted((float(batch_size),))

    @property
    def numbers(self) -> Tuple[int, ...]:
        """No exits: the epoch has the metrics of any training."""
        return ()

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        assert isinstance(model, Boosted)
        before = model.so_far(images).float()
        with torch.no_grad():
            target = F.one_hot(labels, model.classes) - F.softmax(before, 1)
        said = model.new(images)
        loss = (said - target).pow(2).sum(1).mean()
        return Losses((loss,), before + model.shrinkage * said)
