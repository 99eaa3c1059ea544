"""The data sets as memory-mapped arrays. Fetching and decoding is the launcher's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Optional

import numpy as np

from narrowgauge_contract.datasets import DataSet, FlatFile, data_set
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = ["FlatData", "open_data", "synthetic_data"]


@dataclasses.dataclass(frozen=True)
class FlatData:
    """Images as uint8 [count, channels, height, width], labels as uint8 [count]. Read-only."""

    declaration: DataSet
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def open_data(name: str, root: Optional[Path], verify: bool = False) -> FlatData:
    """Map the flat files of a declared set under `root`.

    Sizes are always checked, contents (sha256) where `verify` says so: the launcher has checked
    them before it started the run.
    Raises UnknownNameError, DataUnavailableError, DataCorruptError.
    """
    declaration = data_set(name)
    arrays = [_open(declaration, flat, root, verify) for flat in declaration.files]
    return FlatData(declaration, *arrays)


def _open(declaration: DataSet, flat: FlatFile, root: Optional[Path], verify: bool) -> np.ndarray:
    path = (root or Path("data")) / declaration.name / flat.name
    if root is None or not path.is_file():
        raise _missing(declaration, path, root)
    size = path.stat().st_size
    if size != flat.bytes:
        raise _corrupt(declaration, path, f"it has {size} bytes, its shape {flat.shape} needs {flat.bytes}")
    if verify:
        found = sha256_file(path)
        if found != flat.sha256:
            raise _corrupt(declaration, path, f"sha256 is {found}, declared is {flat.sha256}")
    return np.memmap(path, dtype=np.uint8, mode="r", shape=flat.shape)


def _missing(declaration: DataSet, path: Path, root: Optional[Path]) -> DataUnavailableError:
    needed = "\n".join(f"{flat.name}  {flat.bytes} bytes" for flat in declaration.files)
    where = "no --data folder was given" if root is None else f"{path} is not there"
    return DataUnavailableError(
        f"the data set '{declaration.name}' is not here",
        why=where,
        next_step=(
            f"narrowgauge data fetch {declaration.name}, then --data with the folder it names.\n"
            f"By hand: put these files into <data>/{declaration.name}/ (uint8, C order):\n{needed}"
        ),
    )


def _corrupt(declaration: DataSet, path: Path, why: str) -> DataCorruptError:
    return DataCorruptError(
        f"{path} is not the declared {declaration.title}",
        why=why,
        next_step=f"delete it and fetch it again: narrowgauge data fetch {declaration.name}",
    )


def synthetic_data(
    seed: int, *, channels: int, size: int, classes: int, train: int, test: int
) -> FlatData:
    """Made-up images that can be learnt: a fixed random pattern per class, under noise.

    Equal arguments give equal data. It shows that training works; it stands in for no real set.
    """
    random = np.random.RandomState(seed)
    patterns = random.randint(0, 256, (classes, channels, size, size))
    parts = []
    for count in (train, test):
        labels = random.randint(0, classes, count).astype(np.uint8)
        noise = random.randint(0, 256, (count, channels, size, size))
        parts += [((patterns[labels] + noise) // 2).astype(np.uint8), labels]
    declaration = DataSet(
        name="synthetic",
        title="made-up patterns",
        classes=tuple(str(index) for index in range(classes)),
        mean=(0.5,) * channels,
        std=(0.2,) * channels,
        files=(),
        sources=(),
        licence="none",
        citation="",
    )
    return FlatData(declaration, *parts)
