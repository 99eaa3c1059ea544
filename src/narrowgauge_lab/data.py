"""The data sets as memory-mapped arrays. Fetching and decoding is the host's."""

from __future__ import annotations

import dataclasses
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Dict, Iterator, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_contract.data_commands import CONTAINER, LAUNCHER, DataCommands, commands_in
from narrowgauge_contract.datasets import DataSet, FlatFile, data_set
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError

__all__ = ["FlatData", "check_data", "open_data", "open_files", "synthetic_data"]

#: The files of a set that lies as CIFAR-100's archive has it.
_RECORDS = ("train.bin", "test.bin")


@dataclasses.dataclass(frozen=True)
class FlatData:
    """Images as uint8 [count, channels, height, width], labels as uint8 [count]. Read-only."""

    declaration: DataSet
    train_images: np.ndarray
    train_labels: np.ndarray
    test_images: np.ndarray
    test_labels: np.ndarray


def check_data(names: Sequence[str], root: Optional[Path]) -> None:
    """See that every file of these sets is under `root` and has the declared content.

    Hashes them all: half a second for CIFAR-10, and the pages are then in memory for the rows.
    Raises UnknownNameError, DataUnavailableError, DataCorruptError.
    """
    for name in names:
        declaration = data_set(name)
        for flat in declaration.files:
            with _readable(declaration):
                path = _sized_file(declaration, flat, root)
                found = sha256_file(path)
            if found != flat.sha256:
                raise _corrupt(declaration, path, f"sha256 is {found}, declared is {flat.sha256}")


def open_data(name: str, root: Optional[Path]) -> FlatData:
    """Map the flat files of a declared set of images to train on under `root`.

    Raises what `open_files` raises.
    """
    files = open_files(name, root)
    if tuple(files) == _RECORDS:
        parts = [part for records in files.values() for part in _cut(records)]
        return FlatData(data_set(name), *parts)
    return FlatData(data_set(name), *files.values())


def _cut(records: np.ndarray) -> Tuple[np.ndarray, np.ndarray]:
    """Images and labels of records [count, 3074], as views: a coarse class, the class, and the
    planes of one image."""
    return records[:, 2:].reshape(-1, 3, 32, 32), records[:, 1]


def open_files(name: str, root: Optional[Path]) -> Dict[str, np.ndarray]:
    """Map every flat file of a declared set under `root`, by the files' names; checks their sizes,
    not their content.

    Raises UnknownNameError, DataUnavailableError, DataCorruptError.
    """
    declaration = data_set(name)
    with _readable(declaration):
        return {
            flat.name: np.memmap(
                _sized_file(declaration, flat, root), np.uint8, mode="r", shape=flat.shape
            )
            for flat in declaration.files
        }


def synthetic_data(
    seed: int, *, channels: int, size: int, classes: int, train: int, test: int
) -> FlatData:
    """Made-up images that can be learnt: a fixed random pattern per class, under noise.

    Equal arguments give equal data, on every machine. It shows that training works, and stands in
    for no real set.
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
        licence="none needed",
        citation="",
    )
    return FlatData(declaration, *parts)


def _sized_file(declaration: DataSet, flat: FlatFile, root: Optional[Path]) -> Path:
    if root is None:
        raise _missing(declaration, "no --data folder was given")
    path = root / declaration.name / flat.name
    if not path.is_file():
        raise _missing(declaration, f"{path} is not there")
    size = path.stat().st_size
    if size != flat.bytes:
        shape = " x ".join(map(str, flat.shape))
        raise _corrupt(declaration, path, f"it has {size} bytes; {shape} is {flat.bytes}")
    return path


@contextmanager
def _readable(declaration: DataSet) -> Iterator[None]:
    """What cannot be read (a permission, an I/O error) is data that is not available."""
    try:
        yield
    except OSError as error:
        raise DataUnavailableError(
            f"the data set '{declaration.name}' cannot be read",
            why=f"{error.filename or declaration.name}: {error.strerror or error}",
            next_step="see that the user who runs this may read the data folder and its files",
        ) from error


def _commands() -> DataCommands:
    """What to type where this runs. Asked of the process itself: only a message depends on it."""
    return commands_in(os.environ, LAUNCHER)


def _missing(declaration: DataSet, why: str) -> DataUnavailableError:
    commands = _commands()
    needed = "\n".join(f"  {flat.name}  {flat.bytes} bytes" for flat in declaration.files)
    archives = [each.locator for source in declaration.sources if source.layout == "flat"
                for each in source.artifacts]  # fmt: skip
    # Files that lie in an archive as they are wanted have its own form, whatever that is.
    what = (
        f"these files of {' or '.join(archives)}, unpacked and as they are,"
        if archives
        else "these (uint8 in C order, images as [count, channels, height, width])"
    )
    # A container has its data folder mounted already.
    mounted = "" if commands is CONTAINER else ", then --data with its data folder"
    return DataUnavailableError(
        f"the data set '{declaration.name}' is not here",
        why=why,
        next_step=f"{commands.fetch.format(declaration.name)}{mounted}.\n"
        f"By hand: put {what} into "
        f"DIR/{declaration.name}/ and give {commands.elsewhere}:\n{needed}",
    )


def _corrupt(declaration: DataSet, path: Path, why: str) -> DataCorruptError:
    return DataCorruptError(
        f"{path} is not the declared {declaration.title}",
        why=why,
        next_step=f"{_commands().repair.format(declaration.name)} fetches the set again",
    )
