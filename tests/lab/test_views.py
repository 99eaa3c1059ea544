"""Views of one object: tiles, made-up cameras, packing, and the MVMC archive of the user's own."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Tuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import BadValueError, ExitCode
from narrowgauge_lab.anytime.views import (
    CAMERAS,
    Packed,
    Tiles,
    cameras,
    load_mvmc,
    pack,
    padded,
    take_pictures,
)
from narrowgauge_lab.augment import crop_and_flip
from narrowgauge_lab.data import FlatData, synthetic_data
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError


def _data(channels: int = 1, size: int = 28) -> FlatData:
    return synthetic_data(3, channels=channels, size=size, classes=10, train=40, test=20)


def _archive(folder: Path, count: int = 25, seed: int = 0) -> Tuple[Path, np.ndarray, np.ndarray]:
    """A small file of the format: X, and y with 3 where a camera sees nothing."""
    random = np.random.RandomState(seed)
    classes = random.randint(0, 3, count)
    present = random.random_sample((count, 6)) < 0.6
    present[:, 2] |= ~present.any(1)
    images = random.random_sample((count, 6, 3, 32, 32)).astype(np.float32)
    images *= present[:, :, None, None, None]
    seen = np.where(present, classes[:, None], 3).astype(np.int32)
    path = folder / "MVMC.npz"
    np.savez_compressed(path, X=images, y=seen)
    return path, images, seen


def test_tiles_go_down_the_columns_and_leave_the_rest_out() -> None:
    """As the published program counts devices: 2 and 3 are the middle column."""
    images = torch.arange(32 * 32, dtype=torch.float32).view(1, 1, 32, 32).repeat(2, 3, 1, 1)
    views = Tiles()(images)

    assert views.images.shape == (2, 6, 3, 16, 10)
    assert views.present.shape == (2, 6)
    assert bool(views.present.all())
    for number, (top, left) in enumerate([(0, 0), (16, 0), (0, 10), (16, 10), (0, 20), (16, 20)]):
        expected = images[:, :, top : top + 16, left : left + 10]
        assert torch.equal(views.images[:, number], expected)


def test_an_image_too_small_for_its_tiles_is_refused() -> None:
    with pytest.raises(BadValueError, match="tiles"):
        Tiles()(torch.zeros(1, 1, 1, 8))
    assert Tiles()(torch.zeros(0, 1, 32, 32)).images.shape == (0, 6, 1, 16, 10)


def test_training_and_test_images_get_the_same_frame() -> None:
    """The published program padded the ones only: tiles of 16×10 to learn from, 14×9 to test."""
    data = _data()
    wide = padded(data, 2)

    for before, after in (
        (data.train_images, wide.train_images),
        (data.test_images, wide.test_images),
    ):
        assert after.shape[1:] == (1, 32, 32)
        assert np.array_equal(after[:, :, 2:-2, 2:-2], before)
        assert not after[:, :, :2].any()
        assert not after[:, :, :, -2:].any()
    assert np.array_equal(wide.test_labels, data.test_labels)


def test_what_is_packed_comes_out_again_without_what_is_absent() -> None:
    random = np.random.RandomState(1)
    views = random.randint(0, 256, (4, 6, 3, 8, 8)).astype(np.uint8)
    present = random.random_sample((4, 6)) < 0.5
    packed = pack(views, present)
    unpacked = Packed(6)(torch.from_numpy(packed).float() / 255.0)

    assert packed.shape == (4, 24, 8, 8)
    assert packed.dtype == np.uint8
    assert np.array_equal(unpacked.present.numpy(), present)
    expected = views * present[:, :, None, None, None] / 255.0
    assert np.allclose(unpacked.images.numpy(), expected, atol=1e-6)


def test_absence_survives_crops_and_flips_and_becomes_zeros_after_normalising() -> None:
    views = np.full((2, 6, 1, 16, 16), 90, dtype=np.uint8)
    present = np.array([[True, False] * 3, [False, True] * 3])
    moved = crop_and_flip(
        torch.from_numpy(pack(views, present)),
        torch.tensor([True, False]),
        torch.tensor([0, 8]),
        torch.tensor([8, 0]),
        4,
    )
    scaled = moved.float() / 255.0
    scaled.view(2, 6, 2, 16, 16)[:, :, 0].sub_(0.7)  # as a feed subtracts the mean of pixels
    unpacked = Packed(6)(scaled)

    assert np.array_equal(unpacked.present.numpy(), present)
    assert not unpacked.images[~unpacked.present].any()


def test_channels_that_are_no_packed_views_are_refused() -> None:
    for channels in (7, 6):
        with pytest.raises(BadValueError, match="packed"):
            Packed(6)(torch.zeros(1, channels, 8, 8))
    assert Packed(6)(torch.zeros(0, 12, 8, 8)).present.shape == (0, 6)


def test_cameras_see_what_they_are_said_to_see() -> None:
    images = np.random.RandomState(2).randint(0, 256, (3, 2, 32, 32)).astype(np.uint8)
    seen = take_pictures(images)

    assert seen.shape == (3, CAMERAS, 2, 32, 32)
    assert np.array_equal(seen[:, 0], images)
    assert np.array_equal(seen[:, 1], (images * 0.4).astype(np.uint8))
    assert np.array_equal(seen[:, 2, :, ::2, ::2], images[:, :, 8:24, 8:24])
    assert not seen[:, 3, :, :, :16].any()
    assert np.array_equal(seen[:, 3, :, :, 16:], images[:, :, :, 16:])
    middle = images[:, :, 5:10, 9:14].astype(int).mean((2, 3))
    assert np.array_equal(seen[:, 4, :, 7, 11], np.floor(middle).astype(np.uint8))
    corner = np.pad(images, ((0, 0), (0, 0), (2, 2), (2, 2)), mode="edge")[:, :, :5, :5]
    assert np.array_equal(seen[:, 4, :, 0, 0], corner.mean((2, 3)).astype(np.uint8))
    assert np.array_equal(seen[:, 5, :, :22], images[:, :, :22, ::-1])
    assert not seen[:, 5, :, 22:].any()


def test_made_up_cameras_miss_objects_alike_every_time_and_one_sees_each() -> None:
    data = synthetic_data(3, channels=1, size=16, classes=10, train=400, test=200)
    first, again, other = cameras(data, 0), cameras(data, 0), cameras(data, 1)
    planes = first.train_images.reshape(400, 6, 2, 16, 16)[:, :, 1, 0, 0] > 0

    assert np.array_equal(first.train_images, again.train_images)
    assert not np.array_equal(first.train_images, other.train_images)
    assert planes.any(1).all()
    assert 0.75 < planes.mean() < 0.85
    assert first.declaration.name == "synthetic-cameras"
    assert len(first.declaration.mean) == len(first.declaration.std) == 12
    assert first.declaration.mean[1::2] == (0.0,) * 6
    assert first.declaration.std[1::2] == (1.0,) * 6
    assert np.array_equal(first.test_labels, data.test_labels)


def test_the_archive_becomes_four_fifths_to_train_on_and_a_fifth_to_test(tmp_path: Path) -> None:
    path, images, seen = _archive(tmp_path)
    data = load_mvmc(path)
    parts = np.concatenate([data.train_images, data.test_images]).reshape(25, 6, 4, 32, 32)
    order = np.random.RandomState(0).permutation(25)

    assert (len(data.train_images), len(data.test_images)) == (20, 5)
    assert data.declaration.classes == ("car", "bus", "person")
    assert np.array_equal(parts[:, :, :3], np.rint(255 * images[order]).astype(np.uint8))
    assert np.array_equal(parts[:, :, 3, 5, 5] == 255, seen[order] != 3)
    labels = np.concatenate([data.train_labels, data.test_labels])
    assert np.array_equal(labels, np.where(seen == 3, -1, seen).max(1)[order])
    again = load_mvmc(path)
    assert np.array_equal(again.train_images, data.train_images)


def test_absent_may_be_written_as_minus_one(tmp_path: Path) -> None:
    path, images, seen = _archive(tmp_path)
    expected = load_mvmc(path)
    np.savez(path, X=images, y=np.where(seen == 3, -1, seen))

    assert np.array_equal(load_mvmc(path).train_images, expected.train_images)
    assert np.array_equal(load_mvmc(path).test_labels, expected.test_labels)


def test_a_missing_archive_is_named_with_how_to_place_it(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError, match=r"MVMC\.npz") as caught:
        load_mvmc(tmp_path / "MVMC.npz")

    assert caught.value.exit_code == ExitCode.DATA_UNAVAILABLE
    for word in ("experiments/ddnn/", "archive=PATH", "[N, 6, 3, 32, 32]"):
        assert word in caught.value.next_step


def _changed(images: np.ndarray, seen: np.ndarray, how: str) -> Any:
    if how == "no labels":
        return {"X": images}
    if how == "five cameras":
        return {"X": images[:, :5], "y": seen[:, :5]}
    if how == "not finite":
        return {"X": np.where(images > 0.99, np.nan, images), "y": seen}
    if how == "in no view":
        return {"X": images, "y": np.where(np.arange(25)[:, None] == 4, 3, seen)}
    if how == "two classes":
        return {"X": images, "y": np.tile(np.arange(6) % 3, (25, 1))}
    if how == "a class too many":
        return {"X": images, "y": np.where(seen == 2, 4, seen)}
    return {"X": images[:4], "y": seen[:4]}


@pytest.mark.parametrize(
    "how",
    [
        "no labels", "five cameras", "not finite", "in no view", "two classes", "a class too many",
        "four objects",
    ],
)  # fmt: skip
def test_another_archive_is_refused(how: str, tmp_path: Path) -> None:
    path, images, seen = _archive(tmp_path)
    np.savez(path, **_changed(images, seen, how))

    with pytest.raises(DataCorruptError, match="multi-view") as caught:
        load_mvmc(path)
    assert "process_mvmc" in caught.value.next_step


def test_one_array_instead_of_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "MVMC.npz"
    stream = io.BytesIO()
    np.save(stream, np.zeros(3))
    path.write_bytes(stream.getvalue())

    with pytest.raises(DataCorruptError, match="multi-view"):
        load_mvmc(path)


@settings(max_examples=25, deadline=None)
@given(cut=st.integers(0, 4000), noise=st.binary(max_size=8))
def test_damaged_bytes_are_refused_or_whole(
    cut: int, noise: bytes, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is cut off or written over: the set, or an error of ours."""
    path = tmp_path_factory.getbasetemp() / "damaged.npz"
    small = tmp_path_factory.getbasetemp() / "mvmc-whole"
    if not small.is_dir():
        small.mkdir()
        _archive(small, count=5)
    whole = (small / "MVMC.npz").read_bytes()
    place = len(whole) * cut // 4000
    path.write_bytes(whole[:place] + noise)
    try:
        data = load_mvmc(path)
    except (DataCorruptError, DataUnavailableError):
        return
    assert len(data.train_images) == 4
