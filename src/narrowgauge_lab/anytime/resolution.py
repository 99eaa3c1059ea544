"""One network for images of several sizes: what it costs follows the area, roughly.

A network that averages its last maps whole takes any size; what it learnt at another one need not
fit. Two things help, and both are here: training at random sizes, and statistics of normalisation
of each size's own, beside weights that all sizes share.
"""

from __future__ import annotations

import copy
import zlib
from typing import Hashable, List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.objective import Losses, Objective

__all__ = [
    "LEAST",
    "MOST",
    "AtSize",
    "RandomSizes",
    "at_size",
    "require_size",
    "sharing",
    "sizes",
    "windows",
]

#: Sides in pixels. The network here halves maps three times: below 8 nothing of an image is left,
#: and more than 128 pixels would be made up out of 32.
LEAST, MOST = 8, 128


def require_size(size: int, what: str = "a size") -> int:
    """The size, if a network can take it. Raises BadValueError."""
    if not LEAST <= size <= MOST:
        raise BadValueError(
            f"{what} of {size} pixels",
            why="the network halves its maps three times, and images here have 32 pixels",
            next_step=f"a side of {LEAST} to {MOST} pixels",
        )
    return size


def sizes(text: str) -> Tuple[int, ...]:
    """Sides of `16,24,32`, the least first. Raises BadValueError for none, for what are no whole
    numbers, for one twice, and for sizes that no network here takes."""
    try:
        found = sorted(int(each) for each in text.split(","))
    except ValueError:
        raise BadValueError(
            f"sizes '{text}' are no whole numbers",
            next_step="give whole numbers with commas between, such as 16,24,32",
        ) from None
    for size in found:
        require_size(size)
    if len(set(found)) < len(found):
        raise BadValueError(f"sizes '{text}' name one twice", next_step="each size once")
    return tuple(found)


def at_size(images: torch.Tensor, size: int) -> torch.Tensor:
    """Images [B, C, H, W] at `size` × `size`, bilinear; as they are where they have that size.

    Raises BadValueError for images that are not square: they would be distorted.
    """
    height, width = images.shape[2:]
    if height != width or not height:
        raise BadValueError(
            f"a picture of {width}×{height} pixels",
            why="sizes here are of square pictures, and bringing it to one would distort it",
            next_step="cut a square out of it first",
        )
    if size == height:
        return images
    return F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)


class AtSize(nn.Module):
    """`net` on images that are brought to `size` first. Another number of channels than `channels`
    is refused: a BadValueError, not torch's words about weights."""

    def __init__(self, net: nn.Module, size: int, channels: int = 3) -> None:
        super().__init__()
        self.net = net
        self.size = require_size(size)
        self.channels = channels

    def brought(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, C, H, W] as `net` gets them."""
        if images.dim() != 4 or images.shape[1] != self.channels:
            raise BadValueError(
                f"pictures {list(images.shape)}",
                why=f"the network takes [pictures, {self.channels} channels, height, width]",
            )
        return at_size(images, self.size)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.net(self.brought(images))


def sharing(net: nn.Module) -> nn.Module:
    """A copy of `net` with the very same parameters, and buffers of its own: other statistics of
    normalisation for the same weights."""
    same = {id(parameter): parameter for parameter in net.parameters()}
    return copy.deepcopy(net, same)  # type: ignore[arg-type]  # what stands there is not copied


class RandomSizes(Objective):
    """The cross entropy of a plain network on images of a random size, one for each update.

    An epoch's sizes are a function of the seed and the epoch's number, so that a resumed row has
    the same. All sizes have the same odds.
    """

    exits = 1

    def __init__(self, given: Sequence[int], seed: int, updates: int) -> None:
        """`given`: the sizes; `updates`: how many an epoch has."""
        self._given = tuple(require_size(size) for size in given)
        self._seed, self._updates = seed, max(1, updates)
        self._drawn: List[int] = []
        self._at = 0
        self._draw(0)

    def begin_epoch(self, epoch: int, model: nn.Module) -> None:
        del model
        self._draw(epoch)

    def _draw(self, epoch: int) -> None:
        seed = zlib.crc32(f"sizes {self._seed} {epoch}".encode("ascii"))
        generator = torch_compat.generator_for(torch.device("cpu"), seed)
        drawn = torch.randint(len(self._given), (self._updates,), generator=generator)
        self._drawn = [self._given[place] for place in drawn.tolist()]
        self._at = 0
        self._size = self._drawn[0]

    def begin_update(self) -> Hashable:
        self._size = self._drawn[self._at % self._updates]
        self._at += 1
        return self._size

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        logits = model(at_size(images, self._size)).float()
        return Losses((F.cross_entropy(logits, labels),), logits)


def windows(images: torch.Tensor, top: torch.Tensor, left: torch.Tensor, side: int) -> torch.Tensor:
    """Each image's own window [B, C, side, side] of [B, C, H, W], its corner at `top`, `left`,
    int64 [B]. One gather for the whole batch. Corners have to leave room for the window."""
    batch, channels, height, width = images.shape
    along = torch.arange(side, device=images.device)
    rows, columns = top[:, None] + along, left[:, None] + along
    places = (rows[:, :, None] * width + columns[:, None, :]).reshape(batch, 1, side * side)
    index = places.expand(batch, channels, side * side)
    flat = images.reshape(batch, channels, height * width).gather(2, index)
    return flat.view(batch, channels, side, side)
