"""The form of IResNeXt whose answers are steps: branch g reads branches 0 to g and no later one.

The residual stream is cut into 8 slices, one for each branch. A branch's first convolution reads
the slices up to its own, the others are within the branch (the last convolution of a block by
groups too, which the published program has commented out), and normalisation is by channels that
only one branch writes. So what an exit computed is what every later exit would compute: stage g
computes slice g alone, and all exits cost what the last one costs and the heads before it.

That is not the published network: a stream slice is an eighth of the stream that an exit of
`shared` has, and there are half as many multiply-accumulates.
"""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State, laid_out
from narrowgauge_lab.anytime.systems.iresnext_parts import (
    GROUPS,
    BlockShape,
    Drawn,
    Geometry,
    conv_weight,
    grouped_conv,
)

__all__ = ["IncrementalIResNeXt"]


class _Norm(nn.BatchNorm2d):
    """Batch normalisation and ReLU, of all channels or of one branch's."""

    def normalise(self, images: torch.Tensor) -> torch.Tensor:
        """All channels at once: images [B, C, H, W]."""
        return F.relu_(self(images))

    def normalise_slice(self, images: torch.Tensor, group: int) -> torch.Tensor:
        """One branch's, [B, C / 8, H, W]. In training mode its running statistics alone move."""
        size = self.num_features // GROUPS
        own = slice(group * size, (group + 1) * size)
        return F.relu_(
            F.batch_norm(
                images, self.running_mean[own], self.running_var[own], self.weight[own],
                self.bias[own], self.training, self.momentum, self.eps,
            )
        )  # fmt: skip


class _Block(nn.Module):
    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        inner, branch = shape.inner, shape.branch
        self.slice = shape.stream // GROUPS
        self.norm1, self.norm2, self.norm3 = _Norm(shape.stream), _Norm(inner), _Norm(inner)
        #: Of each branch, over the slices up to its own.
        self.reduce = nn.ParameterList(
            [conv_weight(branch, self.slice * (group + 1), 1, inner) for group in range(GROUPS)]
        )
        self.grouped = conv_weight(inner, branch, 3, fan_out=9 * branch)
        self.expand = conv_weight(shape.stream, branch, 1, fan_out=self.slice)

    def run(self, stream: torch.Tensor) -> torch.Tensor:
        """All branches: the stream [B, C, H, W] after this block, its slices one after another."""
        stream = self._narrowed(stream, GROUPS)
        # One product with zeros where a branch would look at a later one, not eight small ones.
        whole = [F.pad(part, (0, 0, 0, 0, 0, self._beyond(part))) for part in self.reduce]
        hidden = F.conv2d(self.norm1.normalise(stream), torch.cat(whole))
        hidden = grouped_conv(self.norm2.normalise(hidden), self.grouped, GROUPS)
        return stream + grouped_conv(self.norm3.normalise(hidden), self.expand, GROUPS)

    def _beyond(self, part: torch.Tensor) -> int:
        return self.shape.stream - int(part.shape[1])

    def run_slice(
        self, group: int, stream: torch.Tensor, before: Sequence[torch.Tensor]
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        """Branch `group` alone: its slice of the stream after this block, and what later branches
        read here, normalised; `before` has that of the earlier ones, if there are any."""
        stream = self._narrowed(stream, 1)
        seen = torch.cat((*before, self.norm1.normalise_slice(stream, group)), 1)
        hidden = self.norm2.normalise_slice(F.conv2d(seen, self.reduce[group]), group)
        hidden = F.conv2d(hidden, _part(self.grouped, group), padding=1)
        hidden = self.norm3.normalise_slice(hidden, group)
        return stream + F.conv2d(hidden, _part(self.expand, group)), seen

    def _narrowed(self, stream: torch.Tensor, groups: int) -> torch.Tensor:
        """Means of 2×2 pixels, and each slice doubled by channels of zeros."""
        if not self.shape.narrows:
            return stream
        halved = F.avg_pool2d(stream, 2)
        if groups == 1:
            return F.pad(halved, (0, 0, 0, 0, 0, self.slice // 2))
        zeros = torch.zeros_like(halved[:, : self.slice // 2])
        parts = [(part, zeros) for part in halved.split(self.slice // 2, 1)]
        return torch.cat([piece for pair in parts for piece in pair], 1)


def _part(weight: torch.Tensor, group: int) -> torch.Tensor:
    """One branch's filters."""
    size = weight.shape[0] // GROUPS
    return weight[group * size : (group + 1) * size]


class IncrementalIResNeXt(AnytimeNetwork):
    """What is carried from exit to exit: the images, each block's normalised input slices so far,
    and the pooled features so far."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.exits = GROUPS
        self.classes = geometry.classes
        features = geometry.features
        self.stem = conv_weight(geometry.stem, 3, 3, fan_out=9 * geometry.stem)
        self.blocks = nn.ModuleList([_Block(shape) for shape in geometry.shapes])
        self.norm = _Norm(features)
        self.heads = nn.ModuleList(
            [nn.Linear(features // GROUPS * (group + 1), self.classes) for group in range(GROUPS)]
        )

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """Branch `exit` alone, on what the branches before it have left."""
        images = laid_out(state[0])
        left = list(state[1:])
        stream = F.conv2d(images, _part(self.stem, exit), padding=1)
        kept = [images]
        for position, block in enumerate(self.blocks):
            stream, seen = block.run_slice(exit, stream, left[position : position + 1])
            kept.append(seen)
        pooled = self.norm.normalise_slice(stream, exit).mean((2, 3))
        features = torch.cat((*left[len(self.blocks) :], pooled), 1)
        kept.append(features)
        logits = self.heads[exit](features) if head else features.new_empty((len(features), 0))
        return Answer(logits, tuple(kept))

    def forward(self, images: torch.Tensor) -> List[torch.Tensor]:
        """All branches at once in training mode, which is much faster; the same answers as one by
        one, but for rounding. What is measured or timed goes one by one."""
        if self.training:
            return self.answers(images, range(self.exits))
        return super().forward(images)

    def answers(
        self, images: torch.Tensor, exits: Sequence[int], drawn: Sequence[Drawn] = ()
    ) -> List[torch.Tensor]:
        """The logits [B, classes] of some exits, in the order given, and then of those that only
        the device knows: all out of one pass."""
        stream = F.conv2d(laid_out(images), self.stem, padding=1)
        for block in self.blocks:
            stream = block.run(stream)
        pooled = self.norm.normalise(stream).mean((2, 3))
        wanted = range(self.exits) if drawn else exits
        every = {exit: self._head(pooled, exit) for exit in wanted}
        table = torch.stack([every[exit] for exit in wanted]) if drawn else pooled
        chosen = [table.index_select(0, each.exit)[0] for each in drawn]
        return [every[exit] for exit in exits] + chosen

    def _head(self, pooled: torch.Tensor, exit: int) -> torch.Tensor:
        head: nn.Linear = self.heads[exit]
        return head(pooled[:, : head.in_features])
