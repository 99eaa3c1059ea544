"""Flat files: mapped, checked, and explained when they are not there."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
from functools import partial
from pathlib import Path
from typing import Callable

import numpy as np
import pytest

from narrowgauge_contract import datasets
from narrowgauge_contract.datasets import DataSet
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab import data
from narrowgauge_lab.data import check_data, open_data, synthetic_data
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DataSet:
    """MNIST's declaration with three images in each file, and those files in `tmp_path`."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    real = datasets.data_set("mnist")
    files = []
    for number, flat in enumerate(real.files):
        shape = (3, *flat.shape[1:])
        content = bytes((number + i) % 10 for i in range(int(np.prod(shape))))
        (folder / flat.name).write_bytes(content)
        digest = hashlib.sha256(content).hexdigest()
        files.append(dataclasses.replace(flat, shape=shape, sha256=digest))
    declaration = dataclasses.replace(real, files=tuple(files))
    monkeypatch.setitem(datasets.DATA_SETS, "mnist", declaration)
    return declaration


@pytest.mark.usefixtures("small")
def test_files_are_mapped_and_read_only(tmp_path: Path) -> None:
    data = open_data("mnist", tmp_path)

    assert data.train_images.shape == (3, 1, 28, 28)
    assert data.test_labels.tolist() == [3, 4, 5]
    assert isinstance(data.train_images, np.memmap)
    assert data.declaration.mean == (0.1307,)
    with pytest.raises(ValueError, match="read-only"):
        data.train_images[0] = 1


@pytest.mark.usefixtures("small")
def test_whole_sets_pass_the_check(tmp_path: Path) -> None:
    check_data(["mnist"], tmp_path)
    check_data([], None)
    with pytest.raises(UnknownNameError, match="mnits"):
        check_data(["mnits"], tmp_path)


def test_a_missing_set_names_the_command_and_the_files(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError) as caught:
        open_data("cifar10", tmp_path)
    said = str(caught.value)
    assert "narrowgauge data fetch cifar10" in said
    assert "train-images.u8  153600000 bytes" in said
    assert f"{tmp_path}/cifar10/train-images.u8 is not there" in said
    with pytest.raises(DataUnavailableError) as caught:
        check_data(["mnist"], None)
    assert "no --data folder" in caught.value.why


@pytest.mark.usefixtures("small")
def test_in_a_container_the_next_step_is_one_that_its_host_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NARROWGAUGE_TARGET", "jetson")

    with pytest.raises(DataUnavailableError) as missing:
        open_data("cifar10", tmp_path)
    (tmp_path / "mnist" / "test-labels.u8").write_bytes(b"12")
    with pytest.raises(DataCorruptError) as corrupt:
        check_data(["mnist"], tmp_path)

    assert missing.value.next_step.startswith("docker compose run --rm data-fetch cifar10.\n")
    assert "NARROWGAUGE_DATA=DIR in .env" in missing.value.next_step
    assert corrupt.value.next_step.startswith("docker compose run --rm data-fetch mnist ")
    for error in (missing, corrupt):
        assert "narrowgauge data" not in str(error.value)


@pytest.mark.usefixtures("small")
def test_a_truncated_file_is_corrupt(tmp_path: Path) -> None:
    (tmp_path / "mnist" / "test-labels.u8").write_bytes(b"12")

    for look in (lambda: open_data("mnist", tmp_path), lambda: check_data(["mnist"], tmp_path)):
        with pytest.raises(DataCorruptError) as caught:
            look()
        assert "it has 2 bytes; 3 is 3" in str(caught.value)
        assert "narrowgauge data verify mnist --repair" in str(caught.value)


def test_wrong_content_of_the_right_size_is_corrupt(tmp_path: Path, small: DataSet) -> None:
    flat = small.file("test-images.u8")
    (tmp_path / "mnist" / flat.name).write_bytes(bytes(flat.bytes))

    with pytest.raises(DataCorruptError) as caught:
        check_data(["mnist"], tmp_path)
    assert flat.sha256 in str(caught.value)


def test_made_up_data_is_the_same_every_time_and_can_be_learnt() -> None:
    one, two = (
        synthetic_data(3, channels=2, size=5, classes=4, train=256, test=64) for _ in range(2)
    )

    assert one.train_images.shape == (256, 2, 5, 5)
    assert one.test_images.dtype == one.train_labels.dtype == np.uint8
    assert (one.train_images == two.train_images).all()
    assert (one.test_images[:64] != one.train_images[:64]).any()
    assert one.declaration.classes == ("0", "1", "2", "3")
    # The nearest class mean of the training images says the class of the test images.
    means = np.stack([one.train_images[one.train_labels == k].mean(0) for k in range(4)]).reshape(
        4, -1
    )
    distances = ((one.test_images.reshape(64, 1, -1) - means) ** 2).sum(2)
    assert (distances.argmin(1) == one.test_labels).mean() > 0.95


@pytest.mark.parametrize(
    "read", [lambda root: check_data(["mnist"], root), partial(open_data, "mnist")]
)
@pytest.mark.usefixtures("small")
def test_a_file_that_may_not_be_read_is_not_an_unwritable_one(
    read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without this, its PermissionError was taken for one of the output folder's."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(data, "sha256_file", refuse)
    monkeypatch.setattr(np, "memmap", refuse)
    with pytest.raises(DataUnavailableError, match="cannot be read") as caught:
        read(tmp_path)

    assert "Permission denied" in caught.value.why
    assert str(tmp_path) in caught.value.why
