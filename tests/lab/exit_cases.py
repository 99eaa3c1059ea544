"""A small network with three exits, which the tests of its drivers run."""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
from torch import nn

from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State

__all__ = ["Told", "Toy", "logits_of", "toy"]


class Toy(AnytimeNetwork):
    """Convolutions of eight channels, each with a head as small as can be."""

    def __init__(self, exits: int = 3, classes: int = 4, channels: int = 8) -> None:
        super().__init__()
        self.exits, self.classes = exits, classes
        widths = [3] + [channels] * exits
        self.trunk = nn.ModuleList(
            nn.Conv2d(before, after, 3, padding=1) for before, after in zip(widths, widths[1:])
        )
        self.heads = nn.ModuleList(nn.Linear(channels, classes) for _ in range(exits))
        #: Images that each stage was given, in order: what compaction saves.
        self.given: List[int] = []

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork."""
        (x,) = state
        self.given.append(x.shape[0])
        x = torch.relu(self.trunk[exit](x))
        if not head:
            return Answer(x.new_zeros((x.shape[0], 0)), (x,))
        return Answer(self.heads[exit](x.mean(dim=(2, 3))), (x,))


class Told(AnytimeNetwork):
    """Answers with logits that it was told, sample by sample; `macs` [exits, N] likewise."""

    def __init__(self, logits: torch.Tensor, macs: Optional[torch.Tensor] = None) -> None:
        super().__init__()
        self.exits, _, self.classes = logits.shape
        self.register_buffer("logits", logits)
        self.register_buffer("macs", macs)

    def begin(self, images: torch.Tensor) -> State:
        """Which samples they are: the images' first value."""
        return (images.reshape(len(images), -1)[:, 0].long(),)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork."""
        (samples,) = state
        macs = None if self.macs is None else self.macs[exit][samples]
        return Answer(self.logits[exit][samples], state, macs)

    def images(self) -> torch.Tensor:
        """One for each sample that it was told of."""
        return torch.arange(self.logits.shape[1]).float().reshape(-1, 1, 1, 1)


def toy(exits: int = 3, seed: int = 0) -> Toy:
    torch.manual_seed(seed)
    return Toy(exits).eval()


def logits_of(*exits: Sequence[float], classes: int = 2) -> torch.Tensor:
    """[exits, N, classes]: for each exit and sample how sure it is of class 0 (a logit)."""
    told = torch.zeros(len(exits), len(exits[0]), classes)
    told[:, :, 0] = torch.tensor(exits)
    return told
