"""From the files that a source gives to the flat files that a run maps.

A layout says which files it needs and how they become `{train,test}-{images,labels}.u8`.
What a decoder makes is judged by its sha256 alone; it only has to fail cleanly on odd bytes.
"""

from __future__ import annotations

import gzip
import json
import math
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, cast

from narrowgauge_contract.datasets import DataSet

__all__ = ["LAYOUTS", "BadSourceError", "Layout", "collect", "decode", "layouts_of"]

#: Everything that reading a damaged file of these formats raises.
_DAMAGED = (EOFError, KeyError, ValueError, gzip.BadGzipFile, tarfile.TarError, zlib.error)
#: A decoder writes `part` ("train" or "test") from the named files.
Files = Mapping[str, Path]


class BadSourceError(Exception):
    """A source gave something that cannot be decoded; the text says what."""


@dataclass(frozen=True)
class Layout:
    """`wanted` matches the names of the files it reads; `parts` needs at least these."""

    name: str
    wanted: str
    decode: Callable[[Files, DataSet, Path], None]

    def wants(self, name: str) -> bool:
        return re.fullmatch(self.wanted, name) is not None


def collect(sources: Iterable[Path], layouts: Iterable[Layout], into: Path) -> dict[str, Path]:
    """The files that any of `layouts` wants, by base name: out of archives, or as they lie.

    Archives are unpacked below `into` by base name alone, so no path in them leads anywhere.
    Raises BadSourceError for a damaged archive, OSError as the file system gives it.
    """
    chosen = tuple(layouts)
    found: dict[str, Path] = {}
    for path in sources:
        if not path.name.endswith((".tgz", ".tar.gz")):
            if any(layout.wants(path.name) for layout in chosen):
                found.setdefault(path.name, path)
            continue
        try:
            for name, unpacked in _unpack(path, chosen, into):
                found.setdefault(name, unpacked)
        except _DAMAGED as error:
            raise BadSourceError(f"{path.name} is damaged: {error}") from error
    return found


def _unpack(path: Path, layouts: tuple[Layout, ...], into: Path) -> Iterable[tuple[str, Path]]:
    with tarfile.open(path, "r:gz") as archive:
        for member in archive:
            name = Path(member.name).name
            if not member.isfile() or not any(layout.wants(name) for layout in layouts):
                continue
            content = archive.extractfile(member)
            assert content is not None
            target = into / name
            with content, open(target, "wb") as output:
                shutil.copyfileobj(content, output, 1 << 20)
            yield name, target


def layouts_of(dataset: DataSet) -> tuple[Layout, ...]:
    """The layouts that this set's sources use, and the flat files themselves."""
    names = dict.fromkeys(source.layout for source in dataset.sources)
    return tuple(LAYOUTS[name] for name in (*names, "flat"))


def decode(layout: Layout, files: Files, dataset: DataSet, into: Path) -> None:
    """Write the flat files of `dataset` below `into`. Raises BadSourceError, OSError."""
    try:
        layout.decode(files, dataset, into)
    except KeyError as error:
        raise BadSourceError(f"it lacks the file {error.args[0]}") from error
    except _DAMAGED as error:
        raise BadSourceError(f"{layout.name}: {error}") from error


def _idx(files: Files, dataset: DataSet, into: Path) -> None:
    """LeCun's format: two zero bytes, a type (8: uint8), the rank, the extents, the values."""
    for part, prefix in (("train", "train"), ("test", "t10k")):
        for kind, rank in (("images", 3), ("labels", 1)):
            name = f"{prefix}-{kind}-idx{rank}-ubyte"
            flat = dataset.file(f"{part}-{kind}.u8")
            with _open_idx(files, name) as stream:
                head = stream.read(4 + 4 * rank)
                if head[:4] != bytes((0, 0, 8, rank)):
                    raise ValueError(f"{name} has no idx header of rank {rank}")
                extents = [int.from_bytes(head[i : i + 4], "big") for i in range(4, len(head), 4)]
                if math.prod(extents) != flat.bytes:
                    raise ValueError(f"{name} has extents {extents}, expected {list(flat.shape)}")
                with open(into / flat.name, "wb") as output:
                    shutil.copyfileobj(stream, output, 1 << 20)


def _open_idx(files: Files, name: str) -> AbstractContextManager[IO[bytes]]:
    if name in files:
        return open(files[name], "rb")
    if f"{name}.gz" in files:
        return cast(BinaryIO, gzip.open(files[f"{name}.gz"], "rb"))
    raise KeyError(f"{name}.gz")


def _cifar_binary(files: Files, dataset: DataSet, into: Path) -> None:
    """Records of one label byte and then the planes of one image, as on Krizhevsky's page."""
    pixels = math.prod(dataset.file("train-images.u8").shape[1:])
    for part, names in _batches(files, "bin").items():
        with (
            open(into / f"{part}-images.u8", "wb") as images,
            open(into / f"{part}-labels.u8", "wb") as labels,
        ):
            for name in names:
                content = files[name].read_bytes()
                if not content or len(content) % (1 + pixels):
                    raise ValueError(f"{name} is not a whole number of records")
                for start in range(0, len(content), 1 + pixels):
                    labels.write(content[start : start + 1])
                    images.write(content[start + 1 : start + 1 + pixels])


def _tfjs_png(files: Files, dataset: DataSet, into: Path) -> None:
    """One PNG per batch, a row per image, its pixels in height, width, channel order."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    channels, height, width = dataset.file("train-images.u8").shape[1:]
    for part, names in _batches(files, "png").items():
        # The package itself misspells "labels".
        labels = json.loads(files[f"{part}_lables.json"].read_text(encoding="utf-8"))
        (into / f"{part}-labels.u8").write_bytes(bytes(labels))
        with open(into / f"{part}-images.u8", "wb") as output:
            for name in names:
                try:
                    with Image.open(files[name]) as picture:
                        pixels = np.asarray(picture)
                except (UnidentifiedImageError, SyntaxError) as error:
                    raise ValueError(f"{name} is not a PNG: {error}") from error
                images = pixels.reshape(-1, height, width, channels).transpose(0, 3, 1, 2)
                output.write(images.tobytes())


def _batches(files: Files, suffix: str) -> dict[str, list[str]]:
    """The batches of each part in their order; KeyError names the first that is missing."""
    numbered = [name for name in files if re.fullmatch(rf"data_batch_\d+\.{suffix}", name)]
    train = [f"data_batch_{i}.{suffix}" for i in range(1, max(len(numbered), 1) + 1)]
    for name in (*train, f"test_batch.{suffix}"):
        files[name]
    return {"train": train, "test": [f"test_batch.{suffix}"]}


def _flat(files: Files, dataset: DataSet, into: Path) -> None:
    """The flat files themselves, as another host's data folder has them."""
    for flat in dataset.files:
        shutil.copyfile(files[flat.name], into / flat.name)


#: Every layout by its name in `narrowgauge_contract.datasets`.
LAYOUTS: dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("idx", r"(train|t10k)-(images-idx3|labels-idx1)-ubyte(\.gz)?", _idx),
        Layout("cifar-binary", r"(data_batch_\d+|test_batch)\.bin", _cifar_binary),
        Layout(
            "tfjs-png", r"(data_batch_\d+|test_batch)\.png|(train|test)_lables\.json", _tfjs_png
        ),
        Layout("flat", r"(train|test)-(images|labels)\.u8", _flat),
    )
}
