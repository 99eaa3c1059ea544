"""IResNeXt: a ResNeXt whose exits are its first 1, 2, … branches (Lee and Shin, arXiv 1807.02609).

Every exit is as deep as the whole, and thin: exit k runs the first k + 1 of 8 branches of each of
its blocks, with batch normalisation and a classifier of its own. Shapes are those of the published
program (hankook/IResNeXt, `models/anytime_resnext.py`); weights are sliced by views, where it pads
the last convolution of a block with zeros.

Two forms. `shared`, as published: an exit's residual stream is not the next one's, so answers are
not steps to better ones and running all exits costs the sum. `incremental`
(`iresnext_incremental`): a branch never sees a later one, so nothing is computed twice.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Callable, Dict, List, Sequence, Tuple, Union

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State, laid_out
from narrowgauge_lab.anytime.systems.iresnext_incremental import IncrementalIResNeXt
from narrowgauge_lab.anytime.systems.iresnext_parts import (
    GROUPS,
    BlockShape,
    Drawn,
    ExitNorm,
    Geometry,
    conv_weight,
    grouped_conv,
    prefixes,
)

__all__ = ["VARIANTS", "IResNeXt", "SharedIResNeXt", "iresnext"]

#: What both forms have: `answers` of chosen exits and of drawn ones.
IResNeXt = Union["SharedIResNeXt", IncrementalIResNeXt]
_Set = Tuple[torch.Tensor, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class _Slices:
    """A block's weights of one exit: views of the block's own."""

    norms: Tuple[_Set, _Set, _Set]
    reduce: torch.Tensor
    grouped: torch.Tensor
    expand: torch.Tensor


class _Block(nn.Module):
    """BN, ReLU, 1×1; BN, ReLU, 3×3 by groups; BN, ReLU, 1×1; and the stream itself is added."""

    def __init__(self, shape: BlockShape) -> None:
        super().__init__()
        self.shape = shape
        inner, branch, stream = shape.inner, shape.branch, shape.stream
        self.norm1 = ExitNorm([stream] * GROUPS)
        self.norm2 = ExitNorm(shape.widths)
        self.norm3 = ExitNorm(shape.widths)
        self.reduce = conv_weight(inner, stream, 1, fan_out=inner)
        self.grouped = conv_weight(inner, branch, 3, fan_out=9 * branch)
        self.expand = conv_weight(stream, inner, 1, fan_out=stream)

    def slices(self, exits: Sequence[int]) -> List[_Slices]:
        """The weights of these exits."""
        sizes = [self.shape.widths[exit] for exit in exits]
        norms = zip(*(norm.sets(exits) for norm in (self.norm1, self.norm2, self.norm3)))
        weights = zip(
            prefixes(self.reduce, 0, sizes),
            prefixes(self.grouped, 0, sizes),
            prefixes(self.expand, 1, sizes),
        )
        return [_Slices(own, *three) for own, three in zip(norms, weights)]

    def run(self, stream: torch.Tensor, exit: int, own: _Slices) -> torch.Tensor:
        """The stream [B, C, H, W] after this block, by the branches of `exit`."""
        stream = self._narrowed(stream)
        hidden = self.norm1.normalise(stream, exit, own.norms[0])
        hidden = self.norm2.normalise(F.conv2d(hidden, own.reduce), exit, own.norms[1])
        hidden = grouped_conv(hidden, own.grouped, exit + 1)
        hidden = self.norm3.normalise(hidden, exit, own.norms[2])
        # Contiguous, as it becomes anyway: torch 1.8 takes no batch of none with a view.
        return stream + F.conv2d(hidden, own.expand.contiguous())

    def run_drawn(self, stream: torch.Tensor, exit: torch.Tensor, within: int) -> torch.Tensor:
        """The same for an exit that the device alone knows, at the cost of exit `within`, which it
        must not be beyond: branches that it does not have are normalised to 0."""
        width = self.shape.widths[within]
        stream = self._narrowed(stream)
        hidden = self.norm1.normalise_drawn(stream, exit)
        hidden = self.norm2.normalise_drawn(F.conv2d(hidden, self.reduce[:width]), exit)
        hidden = grouped_conv(hidden, self.grouped[:width], within + 1)
        hidden = self.norm3.normalise_drawn(hidden, exit)
        return stream + F.conv2d(hidden, self.expand[:, :width])

    def _narrowed(self, stream: torch.Tensor) -> torch.Tensor:
        """Means of 2×2 pixels and as many channels of zeros, before the first of a later stage."""
        if not self.shape.narrows:
            return stream
        return F.pad(F.avg_pool2d(stream, 2), (0, 0, 0, 0, 0, self.shape.stream // 2))


class SharedIResNeXt(AnytimeNetwork):
    """The form as published. What is carried from exit to exit is the images alone."""

    def __init__(self, geometry: Geometry) -> None:
        super().__init__()
        self.exits = GROUPS
        self.classes = geometry.classes
        features = geometry.features
        self.stem = conv_weight(geometry.stem, 3, 3, fan_out=9 * geometry.stem)
        self.blocks = nn.ModuleList([_Block(shape) for shape in geometry.shapes])
        self.norm = ExitNorm([features] * GROUPS)
        bound = features**-0.5
        self.weight = nn.Parameter(
            torch.empty(GROUPS, geometry.classes, features).uniform_(-bound, bound)
        )
        self.bias = nn.Parameter(torch.zeros(GROUPS, geometry.classes))

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """All of the exit, from the images; without `head`, nothing: the next exit starts anew."""
        if not head:
            return Answer(state[0].new_empty((state[0].shape[0], 0)), state)
        return Answer(self.answers(state[0], (exit,))[0], state)

    def forward(self, images: torch.Tensor) -> List[torch.Tensor]:
        return self.answers(images, range(self.exits))

    def counted(self, example: torch.Tensor) -> Tuple[AnytimeNetwork, torch.Tensor]:
        """Itself on a CPU; of one elsewhere, where `grouped_conv` does more, a copy there."""
        if example.device.type == "cpu":
            return self, example
        return copy.deepcopy(self).float().cpu(), example.float().cpu()

    def answers(
        self, images: torch.Tensor, exits: Sequence[int], drawn: Sequence[Drawn] = ()
    ) -> List[torch.Tensor]:
        """The logits [B, classes] of some exits, in the order given, and then of those that only
        the device knows. The host needs no answer for these, so a CUDA graph can hold them."""
        stem = self._begun(images)  # alike for all exits; `advance` pays for it at each
        per_block = [block.slices(exits) for block in self.blocks]
        norms, weights, biases = self.norm.sets(exits), self.weight.unbind(0), self.bias.unbind(0)
        found = []
        for position, exit in enumerate(exits):
            stream = stem
            for block, slices in zip(self.blocks, per_block):
                stream = block.run(stream, exit, slices[position])
            pooled = self.norm.normalise(stream, exit, norms[position]).mean((2, 3))
            found.append(F.linear(pooled, weights[exit], biases[exit]))
        return found + [self._drawn(stem, each) for each in drawn]

    def _drawn(self, stem: torch.Tensor, drawn: Drawn) -> torch.Tensor:
        stream, exit = stem, drawn.exit
        for block in self.blocks:
            stream = block.run_drawn(stream, exit, drawn.within)
        pooled = self.norm.normalise_drawn(stream, exit).mean((2, 3))
        weight, bias = self.weight.index_select(0, exit)[0], self.bias.index_select(0, exit)[0]
        return F.linear(pooled, weight, bias)

    def _begun(self, images: torch.Tensor) -> torch.Tensor:
        """The stream before the first block."""
        return F.conv2d(laid_out(images), self.stem, padding=1)


#: The forms by the names that parameters have.
VARIANTS: Dict[str, Callable[[Geometry], IResNeXt]] = {
    "shared": SharedIResNeXt,
    "incremental": IncrementalIResNeXt,
}


def iresnext(variant: str, blocks: int = 7, width: float = 1.0, classes: int = 10) -> IResNeXt:
    """The network of that form with random weights, `blocks` in each of three stages.

    Raises UnknownNameError and, for sizes that it cannot have, BadValueError.
    """
    if variant not in VARIANTS:
        raise UnknownNameError("form of IResNeXt", variant, VARIANTS)
    return VARIANTS[variant](Geometry(blocks, width, classes))
