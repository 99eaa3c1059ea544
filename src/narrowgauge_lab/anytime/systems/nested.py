"""Recursively nested in depth: each stage is a network that holds the one before whole, and answers
with twice its layers.

Wan, Hoffmann, Lu and Maire, Orthogonalized SGD and Nested Architectures for Anytime Neural
Networks, ICML 2020 (arXiv 2008.06635). Its text beyond abstract and captions was not to be had:
that stages nest, double, and interlace new layers between old ones is theirs; the rest is a
reconstruction.

Here a layer is a residual block of two 3×3 convolutions (He et al. 2016, pre-activation), for
images of 32×32 in three resolutions. Stage 0 has `blocks` of them per resolution. Stage s puts a
new one after each layer of stage s − 1. The new ones have a residual stream of their own, which
begins at 0; they read the sum of it and of what the old network has at that place, and the old ones
never read it:

    stage s − 1   a_1 ──────► a_2 ──────► …            given, computed once
    stage s       v_1 = F_1(a_1 + 0)   v_2 = v_1 + F_2(a_2 + v_1)   …
    its layers    a_1, a_1 + v_1, a_2 + v_1, a_2 + v_2, …           what stage s + 1 is given

So an answer costs what its stage adds, and exit s has 2^s times the layers of exit 0.
"""

from __future__ import annotations

from typing import List, Optional, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.network import (
    Answer,
    AnytimeNetwork,
    State,
    added,
    laid_out,
    rectified,
)

__all__ = ["NestedNet", "channels_of"]

#: Channels double where the map's sides halve.
_RESOLUTIONS = 3
_CHANNELS = 16


def channels_of(width: float) -> int:
    """Channels at full resolution for a width such as 1 or 0.25. BadValueError for none."""
    channels = round(_CHANNELS * width)
    if channels < 1:
        raise BadValueError(f"width {width} leaves no channel", why=f"width 1 has {_CHANNELS}")
    return channels


class NestedNet(AnytimeNetwork):
    """Takes float32 [B, channels_in, H, W]; exit s answers after `blocks` · 2^s blocks in each of
    three resolutions. Convolutions and linear layers start from Kaiming's normal distribution."""

    def __init__(
        self,
        classes: int = 10,
        exits: int = 4,
        blocks: int = 1,
        channels: int = _CHANNELS,
        channels_in: int = 3,
    ) -> None:
        """Raises BadValueError where there is nothing to build."""
        super().__init__()
        if min(classes, exits, blocks, channels) < 1:
            raise BadValueError(
                f"{exits} exits of {blocks} blocks with {channels} channels for {classes} classes",
                why="there has to be one of each at least",
            )
        self.exits, self.classes, self.blocks = exits, classes, blocks
        self.stem = nn.Conv2d(channels_in, channels, 3, padding=1, bias=False)
        widths = [channels << level for level in range(_RESOLUTIONS)]
        self.stages = nn.ModuleList(
            nn.ModuleList(_layers(number, self._new(number), widths)) for number in range(exits)
        )
        self.heads = nn.ModuleList(_Head(widths[-1], classes) for _ in range(exits))
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def _new(self, exit: int) -> int:
        """Blocks that a stage adds in each resolution."""
        return self.blocks if exit == 0 else self.blocks << (exit - 1)

    def layers(self, exit: int) -> int:
        """Convolutions of 3×3 up to an answer, the first one of all left out: 2^exit · m."""
        self.require_exit(exit)
        return 2 * _RESOLUTIONS * (self.blocks << exit)

    def begin(self, images: torch.Tensor) -> State:
        return (laid_out(images),)

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork. The state is what the stage has after each of its layers, first
        resolution first; after the last stage, the last of them."""
        found = self._first(state[0]) if exit == 0 else self._interlaced(exit, state)
        last = found[-1][-1]
        left = (last,) if exit == self.exits - 1 else tuple(x for level in found for x in level)
        logits = self.heads[exit](last) if head else last.new_zeros((len(last), 0))
        return Answer(logits, left)

    def _first(self, images: torch.Tensor) -> List[List[torch.Tensor]]:
        """What stage 0 has after each of its layers, by resolution."""
        stream = self.stem(images)
        found: List[List[torch.Tensor]] = []
        for level, stack in enumerate(self.stages[0]):
            found.append([])
            for place, block in enumerate(stack):
                shrinks = level > 0 and place == 0
                stream = added(block(stream), _halved(stream) if shrinks else stream)
                found[-1].append(stream)
        return found

    def _interlaced(self, exit: int, state: State) -> List[List[torch.Tensor]]:
        """What a later stage has after each of its layers, from those of the stage before."""
        count = self.blocks << (exit - 1)
        found: List[List[torch.Tensor]] = []
        new: Optional[torch.Tensor] = None
        for level, stack in enumerate(self.stages[exit]):
            old = state[level * count : (level + 1) * count]
            found.append([])
            new = None if new is None else _halved(new)
            for given, block in zip(old, stack):
                read = given if new is None else given + new
                new = block(read) if new is None else added(block(read), new)
                found[-1] += [read, given + new]
        return found


class _Block(nn.Module):
    """What a layer adds to its stream: twice batch normalisation, ReLU and a 3×3 convolution."""

    def __init__(self, channels_in: int, channels: int) -> None:
        super().__init__()
        stride = 1 if channels_in == channels else 2
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        hidden = self.conv1(rectified(self.norm1(stream)))
        return self.conv2(rectified(self.norm2(hidden)))


class _Head(nn.Module):
    """An exit's own normalisation, ReLU, global average and linear layer."""

    def __init__(self, channels: int, classes: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(channels)
        self.linear = nn.Linear(channels, classes)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        return self.linear(rectified(self.norm(stream)).mean((2, 3)))


def _layers(exit: int, count: int, widths: Sequence[int]) -> List[nn.ModuleList]:
    """The blocks of a stage by resolution; only stage 0's change it."""
    found = []
    for level, channels in enumerate(widths):
        first = widths[level - 1] if exit == 0 and level > 0 else channels
        rest = [_Block(channels, channels) for _ in range(count - 1)]
        found.append(nn.ModuleList([_Block(first, channels), *rest]))
    return found


def _halved(stream: torch.Tensor) -> torch.Tensor:
    """A stream at the next resolution, without parameters: every second pixel, zeros for the new
    channels (option A of He et al. 2015)."""
    extra = stream.shape[1] // 2
    return F.pad(stream[:, :, ::2, ::2], (0, 0, 0, 0, extra, stream.shape[1] - extra))
