"""How IResNeXt is trained beside the sum over all exits: the sandwich rule of Yu and Huang 2019
(arXiv 1903.05134), with in-place distillation."""

from __future__ import annotations

import zlib
from typing import List

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.objective import Losses, Objective
from narrowgauge_lab.anytime.systems.iresnext import IResNeXt
from narrowgauge_lab.anytime.systems.iresnext_parts import GROUPS, Drawn

__all__ = ["Sandwich"]

#: The exits that one is drawn from each: all but the first and the last, in two halves.
_BETWEEN = ((1, 3), (4, 6))
_LAST = GROUPS - 1


class Sandwich(Objective):
    """Each update trains the widest exit by the labels, and the narrowest and two random ones by
    what the widest says of the images (no gradient goes back through that).

    One of the two is drawn from each half of the exits between: each has the odds that it has where
    two are drawn from all, and where the host does not know which, they cost half and 7/8 of the
    widest, not twice the whole. The draws of an epoch are a function of the seed and the epoch's
    number, so that a resumed row has the same; `begin_epoch` makes them, and an update asks the
    device for nothing. On a CPU, where asking is free, the drawn exits cost what they are, unless
    a compiler takes the update, which cannot ask (known since torch 2.3).
    """

    exits = GROUPS
    extra = "random_exits_train_loss"

    def __init__(self, seed: int, updates: int, device: torch.device) -> None:
        """`updates`: how many an epoch has."""
        self._seed = seed
        self._updates = max(1, updates)
        self._table = torch.zeros((self._updates, len(_BETWEEN)), dtype=torch.int64, device=device)
        self._at = torch.zeros(1, dtype=torch.int64, device=device)
        self._draw(0)

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        del model
        self._draw(epoch)

    def _draw(self, epoch: int) -> None:
        """The exits of every update of the epoch. In place: a captured step reads there."""
        seed = zlib.crc32(f"sandwich {self._seed} {epoch}".encode("ascii"))
        generator = torch_compat.generator_for(torch.device("cpu"), seed)
        for half, (first, last) in enumerate(_BETWEEN):
            drawn = torch.randint(first, last + 1, (self._updates,), generator=generator)
            self._table[:, half].copy_(drawn)
        self._at.zero_()

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        pair = self._table.index_select(0, self._at)[0]
        self._at.add_(1).remainder_(self._updates)
        answers = self._answers(model, images, pair)
        narrowest, widest, between = answers[0], answers[1], answers[2:]
        with torch.no_grad():
            teacher = F.softmax(widest, 1)
        taught = [_by_teacher(each, teacher) for each in (narrowest, *between)]
        per_exit = (taught[0], *(None,) * (GROUPS - 2), F.cross_entropy(widest, labels))
        return Losses(per_exit, widest, torch.stack(taught[1:]).sum())

    def _answers(
        self, model: nn.Module, images: torch.Tensor, pair: torch.Tensor
    ) -> List[torch.Tensor]:
        net: IResNeXt = model  # type: ignore[assignment]  # both forms have `answers`
        if images.device.type == "cpu" and not torch_compat.compiling():
            found = net.answers(images, (0, _LAST, *pair.tolist()))
        else:
            drawn = [Drawn(one, last) for one, (_, last) in zip(pair.split(1), _BETWEEN)]
            found = net.answers(images, (0, _LAST), drawn)
        return [logits.float() for logits in found]


def _by_teacher(logits: torch.Tensor, teacher: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy against probabilities [B, classes]: Kullback and Leibler's divergence
    but for what no gradient sees."""
    return -(teacher * F.log_softmax(logits, 1)).sum(1).mean()
