"""From the files that a source gives to the flat files that a run maps.

A layout says which files it needs and how they become `{train,test}-{images,labels}.u8`, or a
network's `weights.*`.
What a decoder makes is judged by its sha256 alone; it only has to fail cleanly on odd bytes.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
import math
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import IO, BinaryIO, Callable, ContextManager, Dict, List, Mapping, Tuple, cast

from narrowgauge_contract.datasets import DataSet
from narrowgauge_data.archives import DAMAGED, BadSourceError

__all__ = ["LAYOUTS", "Layout", "decode", "layouts_of"]

#: A picture of ImageNet, its number and its class.
_IMAGENET = re.compile(r"imagenet_(\d+)_(\d+)\.jpg")
#: Its shorter side before the middle is cropped.
_SHORTER = 256
_MOBILENET = "mobilenet_v2-b0353104.pth"

#: What a decoder writes from: files by their names.
Files = Mapping[str, Path]


@dataclass(frozen=True)
class Layout:
    """`wanted` matches the names of the files that `decode` reads; `library` is an import that it
    needs beside the standard library, and `package` what gives it."""

    name: str
    wanted: str
    decode: Callable[[Files, DataSet, Path], None]
    library: str = ""
    package: str = ""

    def wants(self, name: str) -> bool:
        return re.fullmatch(self.wanted, name) is not None

    def require_library(self) -> None:
        """Raises BadSourceError where it is missing: ask before 139 MB are fetched for nothing."""
        if self.library and importlib.util.find_spec(self.library) is None:
            raise BadSourceError(
                f"its files are read with {self.package}, which this Python lacks: "
                f"python3 -m pip install {self.package.lower()}"
            )


def layouts_of(dataset: DataSet) -> Tuple[Layout, ...]:
    """The layouts that this set's sources use, and the flat files themselves."""
    names = dict.fromkeys((*(source.layout for source in dataset.sources), "flat"))
    return tuple(LAYOUTS[name] for name in names)


def decode(layout: Layout, files: Files, dataset: DataSet, into: Path) -> None:
    """Write the flat files of `dataset` below `into`. Raises BadSourceError, OSError."""
    try:
        layout.decode(files, dataset, into)
    except KeyError as error:
        raise BadSourceError(f"it lacks the file {error.args[0]}") from error
    except ImportError as error:
        raise BadSourceError(f"{layout.name}: {error}; it needs {layout.package}") from error
    except DAMAGED as error:
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


def _open_idx(files: Files, name: str) -> ContextManager[IO[bytes]]:
    if name in files:
        return open(files[name], "rb")
    if f"{name}.gz" in files:
        return cast(BinaryIO, gzip.open(files[f"{name}.gz"], "rb"))
    raise KeyError(f"{name}.gz")


def _cifar_binary(files: Files, dataset: DataSet, into: Path) -> None:
    """Records of one label byte and then the planes of one image, as on Krizhevsky's page."""
    pixels = math.prod(dataset.file("train-images.u8").shape[1:])
    for part, names in _batches(files, "bin").items():
        labels_path = into / f"{part}-labels.u8"
        with open(into / f"{part}-images.u8", "wb") as images, open(labels_path, "wb") as labels:
            for name in names:
                content = files[name].read_bytes()
                if not content or len(content) % (1 + pixels):
                    raise ValueError(f"{name} is not a whole number of records")
                for start in range(0, len(content), 1 + pixels):
                    labels.write(content[start : start + 1])
                    images.write(content[start + 1 : start + 1 + pixels])


def _tfjs_png(files: Files, dataset: DataSet, into: Path) -> None:
    """One PNG per batch, a row per image, its pixels in height, width, channel order."""
    batches = _batches(files, "png")
    from narrowgauge_data.png import planes_of

    channels, height, width = dataset.file("train-images.u8").shape[1:]
    for part, names in batches.items():
        # The package itself misspells "labels".
        labels = json.loads(files[f"{part}_lables.json"].read_text(encoding="utf-8"))
        if not isinstance(labels, list) or not all(isinstance(label, int) for label in labels):
            raise ValueError(f"{part}_lables.json is not a list of numbers")
        (into / f"{part}-labels.u8").write_bytes(bytes(labels))
        with open(into / f"{part}-images.u8", "wb") as output:
            for name in names:
                output.write(planes_of(files[name], channels, height * width))


def _batches(files: Files, suffix: str) -> Dict[str, List[str]]:
    """The batches of each part in their order; KeyError names the first that is missing."""
    numbered = [name for name in files if re.fullmatch(rf"data_batch_\d+\.{suffix}", name)]
    train = [f"data_batch_{i}.{suffix}" for i in range(1, max(len(numbered), 1) + 1)]
    for name in (*train, f"test_batch.{suffix}"):
        files[name]
    return {"train": train, "test": [f"test_batch.{suffix}"]}


def _imagenet_jpeg(files: Files, dataset: DataSet, into: Path) -> None:
    """`imagenet_NUMBER_CLASS.jpg`, scaled and cropped as networks for 224×224 are tested."""
    from narrowgauge_data.png import square_of

    count, _, side, _ = dataset.file("test-images.u8").shape
    named = {}
    for name in files:
        match = _IMAGENET.fullmatch(name)
        if match is not None:
            named[int(match.group(1))] = (name, int(match.group(2)))
    if sorted(named) != list(range(count)):
        numbers = ", ".join(map(str, sorted(named)))
        raise ValueError(f"pictures 0 to {count - 1} are wanted, and these are there: {numbers}")
    with open(into / "test-images.u8", "wb") as output:
        for number in range(count):
            output.write(square_of(files[named[number][0]], side, _SHORTER))
    labels = b"".join(named[number][1].to_bytes(2, "little") for number in range(count))
    (into / "test-labels.u8").write_bytes(labels)


def _torch_weights(files: Files, dataset: DataSet, into: Path) -> None:
    """A state dict as `torch.save` wrote it; it is opened only once its sha256 is known."""
    del dataset
    shutil.copyfile(files[_MOBILENET], into / "weights.pth")


def _tfjs_weights(files: Files, dataset: DataSet, into: Path) -> None:
    """What TensorFlow.js loads: a description, and the weights in shards one after another."""
    del dataset
    description = json.loads(files["model.json"].read_text(encoding="utf-8"))
    (manifest,) = description["weightsManifest"]
    (into / "weights.json").write_bytes(json.dumps(manifest["weights"]).encode())
    with open(into / "weights.bin", "wb") as output:
        for shard in manifest["paths"]:
            output.write(files[shard].read_bytes())


def _flat(files: Files, dataset: DataSet, into: Path) -> None:
    """The flat files themselves: as another host's data folder has them, or CIFAR-100's archive."""
    for flat in dataset.files:
        shutil.copyfile(files[flat.name], into / flat.name)


#: Every layout by its name in `narrowgauge_contract.datasets`.
LAYOUTS: Dict[str, Layout] = {
    layout.name: layout
    for layout in (
        Layout("idx", r"(train|t10k)-(images-idx3|labels-idx1)-ubyte(\.gz)?", _idx),
        Layout("cifar-binary", r"(data_batch_\d+|test_batch)\.bin", _cifar_binary),
        Layout(
            "tfjs-png",
            r"(data_batch_\d+|test_batch)\.png|(train|test)_lables\.json",
            _tfjs_png,
            library="PIL",
            package="Pillow",
        ),
        Layout("imagenet-jpeg", _IMAGENET.pattern, _imagenet_jpeg, library="PIL", package="Pillow"),
        Layout("torch-weights", re.escape(_MOBILENET), _torch_weights),
        Layout("tfjs-weights", r"model\.json|group1-shard\d+of\d+\.bin", _tfjs_weights),
        Layout("flat", r"(train|test)(-(images|labels)\.u8|\.bin)|weights\.(pth|json|bin)", _flat),
    )
}
