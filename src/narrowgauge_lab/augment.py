"""Data that lives on the device as uint8; augmentation and normalisation happen there too.

What is random is drawn once per epoch for every image, so that a training step draws nothing: it
can be captured in a CUDA graph, and a partial batch sees the draws it would have seen anyway.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence, Tuple

import numpy as np
import torch
import torch.nn.functional as F

from narrowgauge_lab.data import FlatData

__all__ = ["Augmentation", "Draws", "Feed", "crop_and_flip", "draw", "make_feeds", "normalise"]


@dataclasses.dataclass(frozen=True)
class Augmentation:
    """Random crop out of the image padded by `padding` black pixels, then a flip with odds 1/2."""

    padding: int = 0
    flip: bool = False

    @property
    def active(self) -> bool:
        return self.padding > 0 or self.flip


@dataclasses.dataclass(frozen=True)
class Draws:
    """One choice per image: `flip` bool[N]; `top`, `left` int64[N], corners in the padded image."""

    flip: torch.Tensor
    top: torch.Tensor
    left: torch.Tensor


def draw(augmentation: Augmentation, count: int, generator: torch.Generator) -> Draws:
    """Draw for `count` images on the generator's device. Corners are uniform on 0 … 2·padding."""
    device = generator.device
    corners = torch.randint(
        0, 2 * augmentation.padding + 1, (2, count), generator=generator, device=device
    )
    if augmentation.flip:
        flip = torch.rand(count, generator=generator, device=device) < 0.5
    else:
        flip = torch.zeros(count, dtype=torch.bool, device=device)
    return Draws(flip, corners[0], corners[1])


def crop_and_flip(
    images: torch.Tensor, flip: torch.Tensor, top: torch.Tensor, left: torch.Tensor, padding: int
) -> torch.Tensor:
    """Cut each image's own window out of its padded self and mirror it where `flip` says.

    images: uint8 [B, C, H, W]; flip: bool [B]; top, left: int64 [B]. Returns uint8 [B, C, H, W].
    One gather for the whole batch; mirroring is reading the window's columns backwards.
    """
    batch, channels, height, width = images.shape
    padded = F.pad(images, (padding, padding, padding, padding))
    down = torch.arange(height, device=images.device)
    across = torch.arange(width, device=images.device)
    rows = top[:, None] + down
    columns = left[:, None] + torch.where(flip[:, None], width - 1 - across, across)
    source = rows[:, :, None] * (width + 2 * padding) + columns[:, None, :]
    index = source.view(batch, 1, height * width).expand(batch, channels, height * width)
    flat = padded.view(batch, channels, (height + 2 * padding) * (width + 2 * padding))
    return flat.gather(2, index).view(images.shape)


def normalise(images: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """uint8 [B, C, H, W] to float32 `(pixel / 255 − mean) / std`; mean and std are [C, 1, 1]."""
    return images.to(torch.float32).div_(255.0).sub_(mean).div_(std)


class Feed:
    """A labelled set, resident on the device: images uint8 [N, C, H, W], labels int64 [N].

    `mean` and `std` are per channel, of pixels scaled to [0, 1].
    """

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        augmentation: Augmentation = Augmentation(),
        channels_last: bool = False,
    ) -> None:
        if len(images) != len(labels):
            raise ValueError(f"{len(images)} images, {len(labels)} labels")
        # A copy: the source is a read-only memory map, and torch wants memory it may write.
        self.images = torch.from_numpy(np.array(images, dtype=np.uint8)).to(device)
        self.labels = torch.from_numpy(np.array(labels, dtype=np.int64)).to(device)
        self.augmentation = augmentation
        self._mean = torch.tensor(tuple(mean), device=device).view(-1, 1, 1)
        self._std = torch.tensor(tuple(std), device=device).view(-1, 1, 1)
        self.channels_last = channels_last
        self._format = torch.channels_last if channels_last else torch.contiguous_format
        none = torch.zeros(len(labels), dtype=torch.int64, device=device)
        # Kept for the whole run and refilled in place: a captured graph reads these addresses.
        self._draws = Draws(none.bool(), none.clone(), none)

    def __len__(self) -> int:
        return int(self.labels.shape[0])

    def redraw(self, generator: torch.Generator) -> None:
        """New draws for the coming epoch. `generator` lives on the feed's device."""
        fresh = draw(self.augmentation, len(self), generator)
        self._draws.flip.copy_(fresh.flip)
        self._draws.top.copy_(fresh.top)
        self._draws.left.copy_(fresh.left)

    def batch(self, indices: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        """The images (float32, normalised, augmented where declared) and labels at `indices`."""
        images = self.images.index_select(0, indices)
        if self.augmentation.active:
            flip, top, left = (
                part.index_select(0, indices)
                for part in (self._draws.flip, self._draws.top, self._draws.left)
            )
            images = crop_and_flip(images, flip, top, left, self.augmentation.padding)
        ready = normalise(images, self._mean, self._std)
        return ready.contiguous(memory_format=self._format), self.labels.index_select(0, indices)


def make_feeds(
    data: FlatData,
    device: torch.device,
    *,
    limit: int = 0,
    augmentation: Augmentation = Augmentation(),
    channels_last: bool = False,
) -> Tuple[Feed, Feed]:
    """The training set, its first `limit` images (0: all) and augmented, and the whole test set.

    Both are normalised by the declared mean and deviation of the training images.
    """
    mean, std = data.declaration.mean, data.declaration.std
    count = limit or len(data.train_images)
    images, labels = data.train_images[:count], data.train_labels[:count]
    return (
        Feed(images, labels, mean, std, device, augmentation, channels_last),
        Feed(data.test_images, data.test_labels, mean, std, device, channels_last=channels_last),
    )
