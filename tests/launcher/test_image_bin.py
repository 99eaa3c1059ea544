"""Pictures to the artefact's files of images and back, and what is no such file."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from narrowgauge.cli.app import run_program
from narrowgauge.errors import BadValueError, UsageError
from narrowgauge.image_bin import FITS, Format, pack, pixels_of, unpack
from narrowgauge_contract.errors import DataCorruptError, ExitCode
from narrowgauge_contract.image_bin import IMAGE_BYTES, ORDERS, PREPROCESSING, SIDE, count_of


def _picture(path: Path, width: int = SIDE, height: int = SIDE, seed: int = 0) -> Path:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path)
    return path


def _values(file: Path) -> np.ndarray:
    return np.fromfile(file, "<f4").reshape(-1, SIDE, SIDE, 3)


def _run(*words: str | Path) -> int:
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        return run_program(["image-bin", *map(str, words)], os.environ, nowhere)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("preprocessing", PREPROCESSING)
def test_pictures_come_back_as_they_were(tmp_path: Path, order: str, preprocessing: str) -> None:
    pictures = [_picture(tmp_path / f"{seed}.png", seed=seed) for seed in range(2)]
    how = Format(order, preprocessing)

    written = pack(pictures, tmp_path / "two.bin", how)
    back = list(unpack(tmp_path / "two.bin", tmp_path, how))

    assert written == (tmp_path / "two.bin").stat().st_size == 2 * IMAGE_BYTES
    assert [path.name for path in back] == ["two-0.png", "two-1.png"]
    for before, after in zip(pictures, back, strict=True):
        assert np.array_equal(np.asarray(Image.open(before)), np.asarray(Image.open(after)))


def test_values_are_what_the_format_says(tmp_path: Path) -> None:
    Image.new("RGB", (SIDE, SIDE), (10, 20, 30)).save(tmp_path / "flat.png")

    found = {}
    for order, preprocessing in (("bgr", "raw"), ("rgb", "torchvision"), ("bgr", "caffe")):
        pack([tmp_path / "flat.png"], tmp_path / "one.bin", Format(order, preprocessing))
        found[preprocessing] = _values(tmp_path / "one.bin")[0, 5, 7]

    assert found["raw"].tolist() == [30, 20, 10]
    expected = [(10 - 123.675) / 58.395, (20 - 116.28) / 57.12, (30 - 103.53) / 57.375]
    assert found["torchvision"] == pytest.approx(expected, rel=1e-6)
    assert found["caffe"] == pytest.approx([30 - 103.939, 20 - 116.779, 10 - 123.68], rel=1e-6)


def test_a_batch_is_one_image_after_another(tmp_path: Path) -> None:
    pictures = [_picture(tmp_path / f"{seed}.png", seed=seed) for seed in range(3)]
    for number, picture in enumerate(pictures):
        pack([picture], tmp_path / f"{number}.bin", Format())
    pack(pictures, tmp_path / "all.bin", Format())

    alone = b"".join((tmp_path / f"{number}.bin").read_bytes() for number in range(3))
    assert (tmp_path / "all.bin").read_bytes() == alone


@pytest.mark.parametrize(("width", "height"), [(300, 200), (60, 448), (224, 224), (500, 1)])
@pytest.mark.parametrize("fit", FITS)
def test_a_picture_of_any_shape_becomes_a_square(
    tmp_path: Path, width: int, height: int, fit: str
) -> None:
    path = tmp_path / "white.png"
    Image.new("L", (width, height), 255).save(path)

    pixels = pixels_of(path, fit)

    assert (pixels.shape, pixels.dtype) == ((SIDE, SIDE, 3), np.uint8)
    if fit != "pad":
        assert pixels.min() == 255
        return
    # As the artefact's images are: the longer side fits, black below it or to its right.
    scale = SIDE / max(width, height)
    right, below = max(1, round(width * scale)), max(1, round(height * scale))
    assert pixels[:below, :right].min() == 255
    assert pixels[below:].max(initial=0) == pixels[:, right:].max(initial=0) == 0


@pytest.mark.parametrize("length", [0, 1, IMAGE_BYTES - 4, IMAGE_BYTES + 1])
def test_a_file_of_the_wrong_length_is_refused(tmp_path: Path, length: int) -> None:
    (tmp_path / "bad.bin").write_bytes(bytes(length))

    with pytest.raises(DataCorruptError, match=f"it has {length} bytes"):
        list(unpack(tmp_path / "bad.bin", tmp_path, Format()))
    assert _run("unpack", tmp_path / "bad.bin", "--out", tmp_path) == ExitCode.DATA_CORRUPT
    assert not list(tmp_path.glob("*.png"))


@settings(max_examples=30, deadline=None)
@given(st.integers(min_value=1, max_value=10**9))
def test_whole_images_alone_are_counted(length: int) -> None:
    if length % IMAGE_BYTES == 0:
        assert count_of(length, "it") * IMAGE_BYTES == length
    else:
        with pytest.raises(DataCorruptError):
            count_of(length, "it")
    assert count_of(7 * IMAGE_BYTES, "it") == 7


def test_values_that_are_no_picture(tmp_path: Path) -> None:
    values = np.zeros((SIDE, SIDE, 3), "<f4")
    values[0, 0, 0] = np.nan
    values.tofile(tmp_path / "nan.bin")
    np.full((SIDE, SIDE, 3), 999, "<f4").tofile(tmp_path / "bright.bin")

    with pytest.raises(DataCorruptError, match="not finite"):
        list(unpack(tmp_path / "nan.bin", tmp_path, Format()))
    (path,) = unpack(tmp_path / "bright.bin", tmp_path, Format())
    assert np.asarray(Image.open(path)).min() == 255


def test_what_cannot_be_packed(tmp_path: Path) -> None:
    whole = _picture(tmp_path / "whole.png")
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "cut.png").write_bytes(whole.read_bytes()[:5000])
    out = tmp_path / "out.bin"

    for name, error, said in (
        ("none.png", UsageError, "is not there"),
        ("text.png", DataCorruptError, "no picture"),
        ("cut.png", DataCorruptError, "cannot be read"),
    ):
        with pytest.raises(error, match=said):
            pack([whole, tmp_path / name], out, Format())
    with pytest.raises(UsageError, match="no picture was given"):
        pack([], out, Format())
    with pytest.raises(UsageError, match="cannot write"):
        pack([whole], tmp_path / "nowhere" / "out.bin", Format())
    for wrong in (
        lambda: Format("rbg"),
        lambda: Format("rgb", "vgg"),
        lambda: pixels_of(whole, ""),
    ):
        with pytest.raises(BadValueError, match="is no"):
            wrong()
    assert not out.exists()
    assert not list(tmp_path.glob("*.partial"))


def test_the_command_packs_and_unpacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture, file = _picture(tmp_path / "a.png"), tmp_path / "a.bin"

    assert _run("pack", picture, picture, "--out", file) == ExitCode.OK
    assert _run("pack", picture, "--out", file) == ExitCode.USAGE
    assert _run("pack", picture, "--out", file, "--force", "--order", "rgb") == ExitCode.OK
    assert file.stat().st_size == IMAGE_BYTES
    assert _run("unpack", file, "--out", tmp_path / "nowhere") == ExitCode.USAGE
    assert _run("unpack", tmp_path / "none.bin", "--out", tmp_path) == ExitCode.USAGE
    capsys.readouterr()
    assert _run("unpack", file, "--out", tmp_path, "--order", "rgb") == ExitCode.OK
    assert capsys.readouterr().out == f"{tmp_path / 'a-0.png'}\n"
    pixels = np.asarray(Image.open(tmp_path / "a-0.png"))
    assert np.array_equal(pixels, np.asarray(Image.open(picture)))
