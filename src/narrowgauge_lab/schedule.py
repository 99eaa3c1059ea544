"""Learning-rate schedules as pure functions of time in epochs, so that a resumed run needs no
state."""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import Sequence, Tuple

from narrowgauge_contract.errors import BadValueError

__all__ = ["Cosine", "MultiStep", "Schedule", "Step", "milestones"]


class Schedule(abc.ABC):
    """The learning rate over time, in epochs from 0."""

    #: Whether every update has a rate of its own, by the part of the epoch that is over; else it is
    #: set once for each epoch.
    each_update: bool = False

    @abc.abstractmethod
    def rate(self, epoch: float) -> float:
        """The learning rate from then on, until the next update or epoch."""


@dataclasses.dataclass(frozen=True)
class Step(Schedule):
    """`base · gamma^(epoch // every)`: torch's StepLR, stepped once per epoch."""

    base: float
    gamma: float
    every: int = 1

    def rate(self, epoch: float) -> float:
        return self.base * self.gamma ** (epoch // self.every)


@dataclasses.dataclass(frozen=True)
class MultiStep(Schedule):
    """`base`, times `gamma` from each milestone on; `warm_up_rate` during the first epochs.

    The warm-up is what He et al. 2015 (section 4.2) do for ResNet-110, whose first updates at the
    full rate would not converge.
    """

    base: float
    milestones: Tuple[int, ...]
    gamma: float = 0.1
    warm_up_epochs: int = 0
    warm_up_rate: float = 0.0

    def rate(self, epoch: float) -> float:
        if epoch < self.warm_up_epochs:
            return self.warm_up_rate
        passed = sum(1 for milestone in self.milestones if epoch >= milestone)
        return self.base * self.gamma**passed


@dataclasses.dataclass(frozen=True)
class Cosine(Schedule):
    """Half a cosine from `base` to `least` over `epochs`, after which it stays: torch's
    CosineAnnealingLR with T_max = epochs, stepped once per epoch (Loshchilov and Hutter 2017, arXiv
    1608.03983, without restarts), or as there once per update."""

    base: float
    epochs: int
    least: float = 0.0
    each_update: bool = False

    def rate(self, epoch: float) -> float:
        part = min(epoch / self.epochs, 1.0)
        return self.least + (self.base - self.least) * (1 + math.cos(math.pi * part)) / 2


def milestones(epochs: int, fractions: Sequence[float]) -> Tuple[int, ...]:
    """Milestones as epochs: 200 epochs at .5 and .75 give (100, 150), 1 gives (1, 1).

    Raises BadValueError unless the fractions rise within (0, 1).
    """
    ordered = tuple(fractions)
    if sorted(set(ordered)) != list(ordered) or any(not 0 < part < 1 for part in ordered):
        raise BadValueError(
            f"milestones {', '.join(map(str, ordered))} do not rise between 0 and 1",
            next_step="give fractions of the epochs, for example 0.5,0.75",
        )
    # Rounded up, so that one epoch is trained at the full rate; the inner rounding takes back what
    # a product such as 0.1 · 30 = 3.0000000000000004 would add.
    return tuple(math.ceil(round(epochs * part, 9)) for part in ordered)
