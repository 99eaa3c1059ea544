"""A residual network whose exits fuse coarse and fine maps top-down, and its rival of equal cost.

A feature pyramid (Lin et al. 2017, arXiv 1612.03144) adds coarse maps, enlarged, to finer ones, so
that these carry what is only seen from afar. Its coarse maps are those of the whole network, which
an early exit does not have. So there are two forms, and in both an exit pays for all it reads:

    own     a head makes coarse maps of its own, by 3×3 convolutions of stride 2 from the map that
            its exit has, down to an eighth of the image's sides, and fuses them back up
    trunk   a head fuses the trunk's newest map into the finer ones before it, which are there
            already; the trunk's coarse maps come only with the exits after them. Where the trunk
            has one scale so far there is nothing to fuse, and the head is a plain one

A head answers from the means of all its fused maps. No exit reads a map of a later stage. Plain
heads are a 1×1 convolution of so many channels that their multiply-accumulates are the pyramid's:
`PyramidNet.rival`.
"""

from __future__ import annotations

import abc
from typing import List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.networks.cifar_resnet import BasicBlock

__all__ = ["FORMS", "PyramidNet", "apart"]

FORMS = ("own", "trunk")
_CHANNELS = (16, 32, 64)
#: Halvings of the image's sides down to a head's coarsest map.
_COARSEST = 3


class PyramidNet(AnytimeNetwork):
    """Takes float32 [B, 3, S, S], S a multiple of 8. The trunk is the residual network of He et al.
    2015 for CIFAR: a 3×3 convolution, and `blocks` blocks in each of three scales with 16, 32 and
    64 channels times `width`; `exits_per_scale` exits in each, as evenly as blocks allow.

    `form`: one of FORMS; `channels` of the fused maps. `plain`: for each exit the channels of a
    plain head instead, as `rival` finds them.
    """

    def __init__(
        self,
        form: str,
        blocks: int = 5,
        width: float = 1.0,
        channels: int = 16,
        exits_per_scale: int = 2,
        classes: int = 10,
        plain: Optional[Sequence[int]] = None,
    ) -> None:
        """Raises BadValueError where there is nothing to build."""
        super().__init__()
        widths = [round(each * width) for each in _CHANNELS]
        _require(form, blocks, widths, channels, exits_per_scale)
        self.form, self.classes = form, classes
        self.given = (form, blocks, width, channels, exits_per_scale, classes)
        self.exits = len(widths) * exits_per_scale
        self.stem = nn.Sequential(
            nn.Conv2d(3, widths[0], 3, padding=1, bias=False), nn.BatchNorm2d(widths[0])
        )
        stages: List[nn.Module] = []
        heads: List[_Head] = []
        for scale, after in enumerate(widths):
            before = widths[max(scale - 1, 0)]
            for count in _shares(blocks, exits_per_scale):
                first = scale > 0 and len(stages) == scale * exits_per_scale
                stages.append(_blocks(before if first else after, after, 2 if first else 1, count))
                number = len(stages) - 1
                if plain is not None:
                    heads.append(_Plain(scale, after, plain[number], classes))
                elif form == "own":
                    heads.append(_Own(scale, after, channels, classes))
                else:
                    heads.append(_Trunk(scale, widths[: scale + 1], channels, classes))
        self.stages, self.heads = nn.ModuleList(stages), nn.ModuleList(heads)
        self.per_scale = exits_per_scale

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """See AnytimeNetwork. The state is the newest map of each scale so far, finest first."""
        stream = F.relu(self.stem(state[0])) if exit == 0 else state[-1]
        stream = self.stages[exit](stream)
        # The first exit of a scale leaves the maps before; another one replaces its scale's own.
        kept = state if exit % self.per_scale == 0 else state[:-1]
        maps = (stream,) if exit == 0 else (*kept, stream)
        logits = self.heads[exit](maps) if head else stream.new_zeros((len(stream), 0))
        return Answer(logits, maps)

    @property
    def plain_channels(self) -> List[int]:
        """Channels of the plain heads, exit by exit; none where heads are pyramids."""
        return [head.wider.out_channels for head in self.heads if isinstance(head, _Plain)]

    def rival(self, size: int = 32) -> PyramidNet:
        """A network with the same trunk, weights included, and plain heads of random weights that
        cost what these do, as nearly as whole channels allow, for images of `size` × `size`."""
        found = []
        for head in self.heads:
            assert isinstance(head, _Head)
            side = size >> head.scale
            one = _Plain(head.scale, head.channels_in, 1, self.classes).macs(side)
            found.append(max(1, round(head.macs(side) / one)))
        form, blocks, width, channels, exits_per_scale, classes = self.given
        other = PyramidNet(form, blocks, width, channels, exits_per_scale, classes, found)
        other.stem.load_state_dict(self.stem.state_dict())
        other.stages.load_state_dict(self.stages.state_dict())
        return other


class _Head(nn.Module, abc.ABC):
    """An exit's head at a scale: 0, 1, 2 for the image's sides, a half and a quarter of them."""

    def __init__(self, scale: int, channels_in: int) -> None:
        super().__init__()
        self.scale, self.channels_in = scale, channels_in

    @abc.abstractmethod
    def macs(self, side: int) -> int:
        """Multiply-accumulates of one image whose newest map is `side` × `side`."""


class _Plain(_Head):
    """1×1 convolution of the newest map, global average, linear layer."""

    def __init__(self, scale: int, channels_in: int, channels: int, classes: int) -> None:
        super().__init__(scale, channels_in)
        self.wider = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.answer = _Answer(channels, 1, classes)

    def macs(self, side: int) -> int:
        return self.wider.weight.numel() * side * side + self.answer.linear.weight.numel()

    def forward(self, maps: Tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.answer([self.wider(maps[-1])])


class _Own(_Head):
    """A pyramid over coarse maps that the head makes itself of the newest map of the trunk."""

    def __init__(self, scale: int, channels_in: int, channels: int, classes: int) -> None:
        super().__init__(scale, channels_in)
        self.lateral = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.down = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(before, channels, 3, stride=2, padding=1, bias=False),
                nn.BatchNorm2d(channels),
            )
            for before in [channels_in, *[channels] * (_COARSEST - scale - 1)]
        )
        self.answer = _Answer(channels, 1 + len(self.down), classes)

    def macs(self, side: int) -> int:
        found = self.lateral.weight.numel() * side * side + self.answer.linear.weight.numel()
        for halvings, stage in enumerate(self.down, start=1):
            found += stage[0].weight.numel() * (side >> halvings) ** 2
        return found

    def forward(self, maps: Tuple[torch.Tensor, ...]) -> torch.Tensor:
        coarse = [maps[-1]]
        for stage in self.down:
            coarse.append(F.relu(stage(coarse[-1])))
        return self.answer(_top_down([self.lateral(coarse[0]), *coarse[1:]]))


class _Trunk(_Head):
    """A pyramid over the trunk's maps so far."""

    def __init__(self, scale: int, channels_in: Sequence[int], channels: int, classes: int) -> None:
        super().__init__(scale, channels_in[-1])
        self.laterals = nn.ModuleList(
            nn.Conv2d(before, channels, 1, bias=False) for before in channels_in
        )
        self.answer = _Answer(channels, len(self.laterals), classes)

    def macs(self, side: int) -> int:
        found = self.answer.linear.weight.numel()
        for enlarged, lateral in enumerate(reversed(self.laterals)):
            found += lateral.weight.numel() * (side << enlarged) ** 2
        return int(found)

    def forward(self, maps: Tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.answer(_top_down([lateral(m) for lateral, m in zip(self.laterals, maps)]))


class _Answer(nn.Module):
    """Batch normalisation, ReLU and global average of each map, and one linear layer of all."""

    def __init__(self, channels: int, maps: int, classes: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(maps))
        self.linear = nn.Linear(maps * channels, classes)

    def forward(self, maps: Sequence[torch.Tensor]) -> torch.Tensor:
        means = [F.relu(norm(each)).mean((2, 3)) for norm, each in zip(self.norms, maps)]
        return self.linear(torch.cat(means, 1))


def apart(one: Sequence[int], other: Sequence[int]) -> float:
    """By how much two networks' costs differ at most, exit by exit, as a share of the first's."""
    return max(abs(a - b) / a for a, b in zip(one, other))


def _top_down(maps: Sequence[torch.Tensor]) -> List[torch.Tensor]:
    """Maps of halving sides, finest first: to each is added what the next coarser one has become,
    enlarged by repeating."""
    fused = [maps[-1]]
    for finer in reversed(maps[:-1]):
        fused.append(finer + F.interpolate(fused[-1], size=finer.shape[2:], mode="nearest"))
    return fused[::-1]


def _blocks(before: int, after: int, stride: int, count: int) -> nn.Sequential:
    rest = [BasicBlock(after, after, 1) for _ in range(count - 1)]
    return nn.Sequential(BasicBlock(before, after, stride), *rest)


def _shares(blocks: int, exits: int) -> List[int]:
    """How many blocks come before each exit of a scale and after the one before it."""
    edges = [-(-blocks * number // exits) for number in range(exits + 1)]
    return [high - low for low, high in zip(edges, edges[1:])]


def _require(
    form: str, blocks: int, widths: Sequence[int], channels: int, exits_per_scale: int
) -> None:
    if form not in FORMS:
        raise BadValueError(f"there is no form '{form}' of pyramid", next_step=" or ".join(FORMS))
    if min(blocks, channels, exits_per_scale, *widths) < 1:
        raise BadValueError(
            f"{blocks} blocks and {exits_per_scale} exits a scale, {widths[0]} channels and "
            f"{channels} of the fused maps",
            why="there has to be one of each at least",
        )
    if exits_per_scale > blocks:
        raise BadValueError(
            f"{exits_per_scale} exits a scale of {blocks} blocks",
            why="between two exits there is a block at least",
            next_step=f"-p exits_per_scale={blocks} or fewer, or more blocks",
        )
