"""Several views of one object: tiles of an image, made-up cameras, and the MVMC archive.

A batch of views travels through feeds, drivers and costs as one image tensor: `pack` puts them and
a plane that says which are present on top of each other as channels, and a network's first step
(`Tiles`, `Packed`) makes `Views` of an image again. Which views are absent is part of the data.
"""

from __future__ import annotations

import dataclasses
import zipfile
import zlib
from pathlib import Path
from typing import List, Sequence, Tuple

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.datasets import DataSet
from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.data import FlatData
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = [
    "CAMERAS", "MVMC_CLASSES", "Packed", "Tiles", "Views", "cameras", "load_mvmc", "pack", "padded",
    "take_pictures",
]  # fmt: skip

MVMC_CLASSES = ("car", "bus", "person")
#: What the published program calls a camera that does not see the object, by version.
_MVMC_ABSENT = (-1, 3)
_MVMC_TRAINING = 0.8
#: How many cameras there are.
CAMERAS = 6
#: How often a made-up camera does not see an object.
_ABSENCE = 0.2


@dataclasses.dataclass(frozen=True)
class Views:
    """`images` float [B, V, C, H, W], zero where absent; `present` bool [B, V]."""

    images: torch.Tensor
    present: torch.Tensor


class Tiles(nn.Module):
    """Cuts images [B, C, H, W] into `columns` × `rows` tiles that do not overlap, all present: the
    left column from top to bottom, then the next one, as the published program counts devices.
    What does not fill a tile at the right or the bottom edge is left out, as there."""

    def __init__(self, columns: int = 3, rows: int = 2) -> None:
        super().__init__()
        self.columns, self.rows = columns, rows
        self.count = columns * rows

    def forward(self, images: torch.Tensor) -> Views:
        batch, channels = images.shape[:2]
        height, width = images.shape[2] // self.rows, images.shape[3] // self.columns
        if height < 1 or width < 1:
            raise BadValueError(
                f"an image of {images.shape[2]}×{images.shape[3]} has no {self.columns}×{self.rows}"
                " tiles"
            )
        whole = images[:, :, : height * self.rows, : width * self.columns]
        parts = whole.reshape(batch, channels, self.rows, height, self.columns, width)
        tiles = parts.permute(0, 4, 2, 1, 3, 5)
        shape = (batch, self.count, channels, height, width)
        present = torch.ones((batch, self.count), dtype=torch.bool, device=images.device)
        return Views(tiles.reshape(shape), present)


class Packed(nn.Module):
    """Makes views of what `pack` packed: images [B, V · (C + 1), H, W], the views normalised by
    whoever feeds them, the planes as 0 or 1. Absent views become zeros."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, images: torch.Tensor) -> Views:
        batch, channels, height, width = images.shape
        if channels % self.count or channels <= self.count:
            raise BadValueError(f"{channels} channels are not {self.count} packed views")
        # Not reshaped by -1, so that a batch of none has its shape too.
        parts = images.reshape(batch, self.count, channels // self.count, height, width)
        # The centre: crops pad the edges with 0.
        present = parts[:, :, -1, height // 2, width // 2] > 0.5
        seen = parts[:, :, :-1] * present[:, :, None, None, None].to(images.dtype)
        return Views(seen, present)


def pack(views: np.ndarray, present: np.ndarray) -> np.ndarray:
    """uint8 [N, V, C, H, W] and bool [N, V] as uint8 [N, V · (C + 1), H, W]: after each view a
    plane of 255 where it is present, else of 0; absent views are black."""
    count, number, channels, height, width = views.shape
    packed = np.zeros((count, number, channels + 1, height, width), dtype=np.uint8)
    packed[:, :, :channels] = views * present[:, :, None, None, None]
    packed[:, :, channels] = np.where(present, 255, 0)[:, :, None, None]
    return packed.reshape(count, number * (channels + 1), height, width)


def _packed_data(data: FlatData, name: str, images: Sequence[np.ndarray], number: int) -> FlatData:
    declared = data.declaration
    return FlatData(
        dataclasses.replace(
            declared,
            name=name,
            mean=(*declared.mean, 0.0) * number,
            std=(*declared.std, 1.0) * number,
        ),
        images[0],
        data.train_labels,
        images[1],
        data.test_labels,
    )


def padded(data: FlatData, pixels: int) -> FlatData:
    """The same images in black frames of so many pixels, training and test images alike: the
    published program padded the ones and not the others."""
    frame = ((0, 0), (0, 0), (pixels, pixels), (pixels, pixels))
    return dataclasses.replace(
        data,
        train_images=np.pad(data.train_images, frame),
        test_images=np.pad(data.test_images, frame),
    )


def cameras(data: FlatData, seed: int) -> FlatData:
    """Each image as six made-up cameras see it, packed; a stand-in for real ones, no measurement of
    any. Which cameras miss an object is drawn from `seed`, one of five on average; one at least
    sees it."""
    packed = []
    for position, images in enumerate((data.train_images, data.test_images)):
        random = np.random.RandomState(np.array([seed, position], dtype=np.uint32))
        present = random.random_sample((len(images), CAMERAS)) >= _ABSENCE
        unseen = ~present.any(axis=1)
        present[unseen, random.randint(0, CAMERAS, int(unseen.sum()))] = True
        packed.append(pack(take_pictures(np.asarray(images)), present))
    return _packed_data(data, f"{data.declaration.name}-cameras", packed, CAMERAS)


def take_pictures(images: np.ndarray) -> np.ndarray:
    """uint8 [N, C, H, W] as uint8 [N, 6, C, H, W]: as it is, at 0.4 of its brightness, its middle
    enlarged, its left half covered, blurred by a mean over 5×5, and mirrored without its lower
    third."""
    height, width = images.shape[2:]
    views = np.repeat(images[:, None], CAMERAS, axis=1)
    views[:, 1] = (images * 0.4).astype(np.uint8)
    rows = height // 4 + np.arange(height) // 2
    columns = width // 4 + np.arange(width) // 2
    views[:, 2] = images[:, :, rows][:, :, :, columns]
    views[:, 3, :, :, : width // 2] = 0
    views[:, 4] = _blurred(images)
    views[:, 5] = images[:, :, :, ::-1]
    views[:, 5, :, height - height // 3 :] = 0
    return views


def _blurred(images: np.ndarray) -> np.ndarray:
    """The mean over 5×5, edges repeated; by running sums along either side."""
    total = images.astype(np.uint32)
    for axis in (2, 3):
        frame = [(0, 0)] * 4
        frame[axis] = (2, 2)
        wide = np.pad(total, frame, mode="edge")
        size = images.shape[axis]
        total = sum(wide.take(range(at, at + size), axis=axis) for at in range(5))
    return (total // 25).astype(np.uint8)


def load_mvmc(path: Path, seed: int = 0) -> FlatData:
    """The multi-view multi-camera set of the user's own `MVMC.npz`, packed: X float [N, 6, 3, 32,
    32] in 0 to 1, y int [N, 6], the class in each camera's view, 3 or -1 where it sees nothing.

    The first four fifths of a permutation by `seed` are for training; it is not the published
    program's. Raises DataUnavailableError where there is no file, DataCorruptError for another one.
    """
    images, classes = _mvmc_arrays(path)
    present = ~np.isin(classes, _MVMC_ABSENT)
    labels = np.where(present, classes, -1).max(axis=1)
    other = np.where(present, classes, labels[:, None]) != labels[:, None]
    if not present.any(axis=1).all() or other.any():
        raise _no_mvmc(path, "an object is in no view, or of another class in another view")
    pixels = np.rint(255.0 * np.clip(images, 0.0, 1.0)).astype(np.uint8)
    order = np.random.RandomState(seed).permutation(len(labels))
    training = int(_MVMC_TRAINING * len(labels))
    packed = pack(pixels, present)
    parts = order[:training], order[training:]
    seen = pixels[parts[0]][present[parts[0]]] / 255.0
    declaration = DataSet(
        name="mvmc",
        title="multi-view multi-camera (the user's file)",
        classes=MVMC_CLASSES,
        mean=tuple(float(each) for each in seen.mean(axis=(0, 2, 3))),
        std=tuple(max(float(each), 1e-3) for each in seen.std(axis=(0, 2, 3))),
        files=(),
        sources=(),
        licence="unknown",
        citation="Roig et al. 2011, as cropped by Teerapittayanon et al. 2017 (DDNN)",
    )
    flat: List[np.ndarray] = [labels[part].astype(np.uint8) for part in parts]
    data = FlatData(declaration, packed[parts[0]], flat[0], packed[parts[1]], flat[1])
    return _packed_data(data, "mvmc", (data.train_images, data.test_images), CAMERAS)


def _mvmc_arrays(path: Path) -> Tuple[np.ndarray, np.ndarray]:
    try:
        # Opened here: NumPy leaves a file open that turns out to be no archive.
        with path.open("rb") as stream:
            archive = np.load(stream, allow_pickle=False)
            if isinstance(archive, np.ndarray):
                raise _no_mvmc(path, "it is one array, not an archive of arrays")
            with archive:
                images, classes = archive["X"], archive["y"]
    except OSError as error:
        raise DataUnavailableError(
            f"the archive MVMC.npz is not here: no {path}",
            why=error.strerror or str(error),
            next_step="no public source has it; with a copy of your own, put it into "
            "experiments/ddnn/ as MVMC.npz, or give -p archive=PATH: arrays X [N, 6, 3, 32, 32] "
            "from 0 to 1 and y [N, 6] (0 car, 1 bus, 2 person, 3 or -1 absent)",
        ) from error
    except (EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        raise _no_mvmc(path, str(error)) from error
    shape = (CAMERAS, 3, 32, 32)
    if images.ndim != 5 or images.shape[1:] != shape or classes.shape != images.shape[:2]:
        raise _no_mvmc(path, f"X is {images.shape}, y is {classes.shape}")
    known = (*_MVMC_ABSENT, *range(len(MVMC_CLASSES)))
    if len(images) < 5 or not np.isin(classes, known).all() or not np.isfinite(images).all():
        raise _no_mvmc(path, "it has fewer than 5 objects, or classes or pixels that there are not")
    return images, classes.astype(np.int64)


def _no_mvmc(path: Path, why: str) -> DataCorruptError:
    return DataCorruptError(
        f"{path} is not the multi-view multi-camera set",
        why=why,
        next_step="it has arrays X [N, 6, 3, 32, 32] from 0 to 1 and y [N, 6], as the DDNN "
        "authors' process_mvmc.py writes them",
    )
