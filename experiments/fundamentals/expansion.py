"""Training images and copies of them that show the same digit: moved, turned or skewed a little."""

from __future__ import annotations

import dataclasses
import math
from typing import Dict, List, Sequence, Tuple

import numpy as np
import torch

from narrowgauge_lab.augment import Augmentation, Feed, normalise

__all__ = ["EXPANSIONS", "ExpandedFeed", "transformed"]

#: A 2×3 matrix that says where a pixel of the copy comes from: (row, column) about the middle.
Affine = Tuple[Tuple[float, float, float], Tuple[float, float, float]]


def _shift(down: float, across: float) -> Affine:
    return ((1.0, 0.0, -down), (0.0, 1.0, -across))


def _turn(degrees: float) -> Affine:
    sine, cosine = math.sin(math.radians(degrees)), math.cos(math.radians(degrees))
    return ((cosine, sine, 0.0), (-sine, cosine, 0.0))


def _skew(by: float) -> Affine:
    return ((1.0, 0.0, 0.0), (by, 1.0, 0.0))


_SHIFTS = [_shift(1, 0), _shift(-1, 0), _shift(0, 1), _shift(0, -1)]
_TURNS = [_turn(10), _turn(-10)]
_SKEWS = [_skew(0.2), _skew(-0.2)]
#: The copies that each image gets beside itself. Shifts are those of the book: a pixel each way.
EXPANSIONS: Dict[str, List[Affine]] = {
    "none": [],
    "shifts": _SHIFTS,
    "rotations": _TURNS,
    "skews": _SKEWS,
    "all": [*_SHIFTS, *_TURNS, *_SKEWS],
}

#: Images at a time: what is between them is in float32.
_CHUNK = 5_000


def transformed(images: np.ndarray, affine: Affine) -> np.ndarray:
    """images uint8 [N, C, H, W], each read at the places that `affine` says, between pixels by
    straight lines, and black outside. Returns uint8 [N, C, H, W]."""
    height, width = images.shape[2:]
    down = np.arange(height)[:, None] - (height - 1) / 2
    across = np.arange(width)[None, :] - (width - 1) / 2
    (a, b, c), (d, e, f) = affine
    rows = a * down + b * across + c + (height - 1) / 2
    columns = d * down + e * across + f + (width - 1) / 2
    chunks = [
        _read(images[start : start + _CHUNK], rows, columns)
        for start in range(0, len(images), _CHUNK)
    ]
    return np.concatenate(chunks) if chunks else np.array(images)


def _read(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    top, left = np.floor(rows).astype(np.int64), np.floor(columns).astype(np.int64)
    found = np.zeros(images.shape, dtype=np.float32)
    for row, weight_down in ((top, 1 - (rows - top)), (top + 1, rows - top)):
        for column, weight in ((left, 1 - (columns - left)), (left + 1, columns - left)):
            found += _at(images, row, column) * (weight_down * weight).astype(np.float32)
    return np.rint(found).astype(np.uint8)


def _at(images: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    height, width = images.shape[2:]
    inside = (rows >= 0) & (rows < height) & (columns >= 0) & (columns < width)
    found = images[:, :, rows.clip(0, height - 1), columns.clip(0, width - 1)]
    return np.where(inside, found, 0).astype(np.float32)


@dataclasses.dataclass(frozen=True)
class _OneOfItsCopies(Augmentation):
    """What makes the training loop draw anew each epoch."""

    @property
    def active(self) -> bool:
        return True


class ExpandedFeed(Feed):
    """A training set that shows of each image, each epoch, one of its copies or itself, all alike
    probable: an epoch stays as long as without copies."""

    def __init__(
        self,
        images: np.ndarray,
        labels: np.ndarray,
        mean: Sequence[float],
        std: Sequence[float],
        device: torch.device,
        copies: Sequence[Affine],
    ) -> None:
        super().__init__(images, labels, mean, std, device, _OneOfItsCopies())
        every = [images, *(transformed(images, each) for each in copies)]
        self.images = torch.from_numpy(np.concatenate(every)).to(device)
        self._copies = len(every)
        self._chosen = torch.zeros_like(self.labels)

    def redraw(self, generator: torch.Generator) -> None:
        device = generator.device
        size = (len(self),)
        self._chosen.copy_(torch.randint(0, self._copies, size, generator=generator, device=device))

    def batch(self, indices: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        copies = self._chosen.index_select(0, indices)
        images = self.images.index_select(0, copies * len(self) + indices)
        ready = normalise(images, self._mean, self._std)
        return ready, self.labels.index_select(0, indices)
