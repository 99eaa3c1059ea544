"""Residual networks whose depth adapts: to the image (ACT) or to each position of it (SACT).

M. Figurnov et al. 2017, "Spatially Adaptive Computation Time for Residual Networks" (arXiv
1612.02297), for images such as CIFAR-10's: three blocks of n pre-activation units with 16, 32 and
64 channels (He et al. 2016, arXiv 1603.05027), leaky ReLU of slope 0.1. In `sact` a position that
has halted keeps its state, so a unit's second convolution matters where positions still run and its
first one on these dilated by 3×3; everywhere in the first unit of a block.

Here everything is computed and masked, as training wants it; `sparse_sact` computes what is needed.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State, laid_out
from narrowgauge_lab.anytime.systems.act import Halter

__all__ = [
    "BLOCKS", "KINDS", "SLOPE", "AdaptiveResNet", "Block", "Head", "Thought", "Unit", "dilated",
]  # fmt: skip

#: plain: no halting; act: one halting per image; sact: one per position.
KINDS = ("plain", "act", "sact")
#: Blocks of a network, each of half the height and width of the one before.
BLOCKS = 3
#: Of the leaky ReLU.
SLOPE = 0.1
#: Halting scores begin near sigmoid(-3) = 0.047: at first most units run.
_FIRST_BIAS = -3.0


@dataclasses.dataclass(frozen=True)
class Thought:
    """An answer and what it took.

    `logits` [B, classes]; per block `ponder` ρ and `steps` N, each [B, 1, h, w] in `sact` and
    [B, 1, 1, 1] in `act`, empty in `plain`; `active` [B, units of all blocks]: the share of
    positions at which a unit ran; `macs` float64 [B]: multiply-accumulates that were needed.
    """

    logits: torch.Tensor
    ponder: Tuple[torch.Tensor, ...]
    steps: Tuple[torch.Tensor, ...]
    active: torch.Tensor
    macs: torch.Tensor

    def ponder_cost(self) -> torch.Tensor:
        """Σ over blocks of the mean ρ, what a training step pays for thinking; a scalar."""
        return torch.stack([each.mean() for each in self.ponder]).sum()


def dilated(mask: torch.Tensor) -> torch.Tensor:
    """Positions of a mask [B, 1, h, w] of 0 and 1, and their eight neighbours."""
    return F.max_pool2d(mask, 3, stride=1, padding=1)


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.1)


def _conv(channels_in: int, channels: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=bias)


def activate(hidden: torch.Tensor) -> torch.Tensor:
    """The leaky ReLU of all units."""
    return F.leaky_relu(hidden, SLOPE)


class Unit(nn.Module):
    """A pre-activation residual unit of two 3×3 convolutions.

    The shortcut averages where the map shrinks, and pads new channels with zeros on both sides.
    `early`: the shortcut starts after the activation, as in a network's first unit.
    """

    def __init__(self, channels_in: int, channels: int, stride: int, early: bool) -> None:
        super().__init__()
        self.stride, self.early = stride, early
        self.extra = (channels - channels_in) // 2
        self.bn1 = _norm(channels_in)
        self.conv1 = _conv(channels_in, channels, stride)
        self.bn2 = _norm(channels)
        self.conv2 = _conv(channels, channels, bias=True)

    def forward(self, x: torch.Tensor, mask: Optional[torch.Tensor] = None) -> torch.Tensor:
        """[B, C, h, w] to [B, C', h', w']. Where the mask [B, 1, h, w] is 0, x stays as it is."""
        ready = activate(self.bn1(x))
        residual = self.conv2(activate(self.bn2(self.conv1(ready))))
        if mask is not None:
            residual = residual * mask
        return self.shortcut(ready if self.early else x) + residual

    def shortcut(self, x: torch.Tensor) -> torch.Tensor:
        if self.stride != 1:
            x = F.avg_pool2d(x, self.stride)
        return F.pad(x, (0, 0, 0, 0, self.extra, self.extra)) if self.extra else x

    def macs_at(self) -> Tuple[int, int]:
        """MACs of the first and of the second convolution for one position of their result."""
        return self.conv1.weight.numel(), self.conv2.weight.numel()


class Head(nn.Module):
    """Halting scores of a state [B, C, h, w]: [B, 1, h, w], or where not `spatial` [B, 1, 1, 1].

    From the mean over the map, and in SACT from each position's neighbourhood as well.
    """

    def __init__(self, channels: int, spatial: bool) -> None:
        super().__init__()
        self.all_norm = _norm(channels)
        self.all_conv = nn.Conv2d(channels, 1, 1, bias=not spatial)
        self.near_norm = _norm(channels) if spatial else None
        self.near_conv = _conv(channels, 1, bias=True) if spatial else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        score = self.all_conv(activate(self.all_norm(x.mean((2, 3), keepdim=True))))
        if self.near_conv is not None and self.near_norm is not None:
            score = score + self.near_conv(activate(self.near_norm(x)))
        return torch.sigmoid(score.float())

    def macs(self, positions: torch.Tensor) -> torch.Tensor:
        """MACs for images with so many active positions each, float64 [B]: of the neighbourhoods
        of these, and of the mean where there is any."""
        near = 0 if self.near_conv is None else self.near_conv.weight.numel()
        return positions * near + (positions > 0) * self.all_conv.weight.numel()

    def begin_slowly(self) -> None:
        """Set the bias so that hardly any unit halts at first."""
        last = self.all_conv if self.near_conv is None else self.near_conv
        assert last.bias is not None
        nn.init.constant_(last.bias, _FIRST_BIAS)


class Block(nn.Module):
    """Units of one map size; `heads` are those of all units but the last, or none."""

    def __init__(self, units: List[Unit], heads: List[Head]) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.heads = nn.ModuleList(heads)


class AdaptiveResNet(AnytimeNetwork):
    """Images [B, 3, H, W], H and W multiples of 4, to one answer, whose cost depends on the image.

    `units` per block: 5 make ResNet-32, 68,862,592 MACs for 32×32 where `plain`. `width`: channels
    of the first block. Raises BadValueError for a kind that there is not and too few units.
    """

    exits = 1

    def __init__(self, kind: str, units: int = 5, width: int = 16, classes: int = 10) -> None:
        super().__init__()
        if kind not in KINDS or units < 2 or width < 1:
            raise BadValueError(
                f"there is no adaptive network '{kind}' of {units} units, {width} channels wide",
                why="units can halt only where a block has two or more",
                next_step=f"kinds are {', '.join(KINDS)}",
            )
        self.kind, self.classes = kind, classes
        self.conv = _conv(3, width, bias=True)
        blocks, channels_in = [], width
        for number in range(BLOCKS):
            channels = width * 2**number
            stages = []
            for position in range(units):
                stride = 2 if number > 0 and position == 0 else 1
                stages.append(Unit(channels_in, channels, stride, number == position == 0))
                channels_in = channels
            scored = 0 if kind == "plain" else units - 1
            blocks.append(Block(stages, [Head(channels, kind == "sact") for _ in range(scored)]))
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.BatchNorm1d(channels_in, eps=1e-3, momentum=0.1)
        self.linear = nn.Linear(channels_in, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for module in self.modules():
            if isinstance(module, Head):
                module.begin_slowly()

    def think(self, images: torch.Tensor, head: bool = True, account: bool = True) -> Thought:
        """Everything computed, and masked where it does not count. Without `account` nobody counts:
        `macs` and `active` are empty."""
        return self._think(images, head, _Account(len(images) if account else 0, images.device))

    def maps(self, images: torch.Tensor) -> torch.Tensor:
        """The last block's output [B, C, h, w], of whose means over positions `answer` is."""
        return self._run(images, _Account(0, images.device))[0]

    def _think(self, images: torch.Tensor, head: bool, account: _Account) -> Thought:
        hidden, ponder, steps = self._run(images, account)
        logits = self.answer(hidden.mean((2, 3))) if head else hidden.new_empty(len(images), 0)
        account.add(self.linear.weight.numel() if head else 0)
        return Thought(logits, tuple(ponder), tuple(steps), account.shares(), account.macs)

    def _run(
        self, images: torch.Tensor, account: _Account
    ) -> Tuple[torch.Tensor, List[torch.Tensor], List[torch.Tensor]]:
        """The last block's output, and ρ and N of each block."""
        hidden = self.conv(laid_out(images))
        account.add(self.conv.weight.numel() * hidden.shape[2] * hidden.shape[3])
        ponder, steps = [], []
        for block in self.blocks:
            hidden, halter = self._think_block(block, hidden, account)
            if halter is not None:
                ponder.append(halter.steps + halter.remainder)
                steps.append(halter.steps)
        return hidden, ponder, steps

    def answer(self, features: torch.Tensor) -> torch.Tensor:
        """Logits of the last block's means over positions, [B, C]."""
        return self.linear(activate(self.norm(features)))

    def _think_block(
        self, block: Block, x: torch.Tensor, account: _Account
    ) -> Tuple[torch.Tensor, Optional[Halter]]:
        spatial = self.kind == "sact"
        halter: Optional[Halter] = None
        output: Optional[torch.Tensor] = None
        for number, unit in enumerate(block.units):
            mask = None if halter is None else halter.running.float()
            x = unit(x, mask if spatial else None)
            account.unit(unit, mask, x)
            if self.kind == "plain":
                continue
            if halter is None:
                halter = Halter(x[:, :1] if spatial else x[:, :1, :1, :1])
            scores = None
            if number < len(block.heads):
                scores = block.heads[number](x)
                account.head(block.heads[number], mask, x)
            part = halter.take(scores) * x  # float32, in autocast as well
            output = part if output is None else output + part
        return (x if output is None else output), halter

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """The one answer. Its `macs` are the work that this sample needs, None in `plain`."""
        self.require_exit(exit)
        thought = self.think(state[0], head)
        return Answer(thought.logits, (), None if self.kind == "plain" else thought.macs)


class _Account:
    """Adds up what each image needs. Positions count with all nine taps, at the border too, as in
    the published counts and in those of `measure.cost`. Of no images it counts nothing."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.macs = torch.zeros(batch, dtype=torch.float64, device=device)
        self.active: List[torch.Tensor] = []

    def shares(self) -> torch.Tensor:
        """[B, units] of positions at which each unit ran."""
        return torch.stack(self.active, 1) if self.active else self.macs.new_zeros(0, 0).float()

    def add(self, macs: int) -> None:
        """The same for all images."""
        self.macs += macs

    def unit(self, unit: Unit, mask: Optional[torch.Tensor], x: torch.Tensor) -> None:
        """A unit that left x, where the mask (None: everywhere) was 1."""
        if not len(self.macs):
            return
        first, second = unit.macs_at()
        positions = x.shape[2] * x.shape[3]
        if mask is None:
            self.macs += (first + second) * positions
            self.active.append(torch.ones(len(self.macs), device=x.device))
            return
        ran = _ran(mask, positions)
        near = _ran(dilated(mask), positions) if mask.shape[2:] == x.shape[2:] else ran
        self.macs += near * first + ran * second
        self.active.append((ran / positions).float())

    def head(self, head: Head, mask: Optional[torch.Tensor], x: torch.Tensor) -> None:
        """Scores of x, for positions where the unit before had run."""
        if not len(self.macs):
            return
        positions = x.shape[2] * x.shape[3]
        everywhere = torch.full_like(self.macs, positions)
        self.macs += head.macs(everywhere if mask is None else _ran(mask, positions))


def _ran(mask: torch.Tensor, positions: int) -> torch.Tensor:
    """Positions of each image, float64 [B], of a mask per position or per image."""
    whole = mask.shape[2] * mask.shape[3]
    return mask.sum((1, 2, 3)).double() * (positions // whole)
