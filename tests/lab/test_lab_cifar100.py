"""CIFAR-100 as the lab maps it, out of small files of its own format."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path

import numpy as np
import pytest

from narrowgauge_contract import datasets
from narrowgauge_lab.data import check_data, open_data
from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError


def _write(root: Path, monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """A small CIFAR-100 below `root`, declared in its stead; its training records."""
    random = np.random.RandomState(2)
    (root / "cifar100").mkdir()
    records = {
        name: random.randint(0, 100, (count, 3074)).astype(np.uint8)
        for name, count in (("train.bin", 7), ("test.bin", 3))
    }
    files = []
    for name, array in records.items():
        (root / "cifar100" / name).write_bytes(array.tobytes())
        digest = hashlib.sha256(array.tobytes()).hexdigest()
        files.append(datasets.FlatFile(name, array.shape, digest))
    declared = dataclasses.replace(datasets.DATA_SETS["cifar100"], files=tuple(files))
    monkeypatch.setitem(datasets.DATA_SETS, "cifar100", declared)
    return records["train.bin"]


def test_records_become_images_and_the_fine_labels(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = _write(tmp_path, monkeypatch)

    check_data(["cifar100"], tmp_path)
    data = open_data("cifar100", tmp_path)

    assert data.train_images.shape == (7, 3, 32, 32)
    assert data.test_images.shape == (3, 3, 32, 32)
    assert data.test_labels.shape == (3,)
    assert np.array_equal(data.train_labels, records[:, 1])  # byte 0 is the coarse class
    plane = records[4, 2 + 1024 : 2 + 2048].reshape(32, 32)
    assert np.array_equal(data.train_images[4, 1], plane)
    assert len(data.declaration.classes) == 100


def test_it_is_mapped_and_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch)

    data = open_data("cifar100", tmp_path)

    assert isinstance(data.train_images, np.memmap)
    assert not data.train_images.flags.writeable


def test_what_is_missing_is_named_with_its_archive(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError) as missing:
        open_data("cifar100", tmp_path)

    said = missing.value.next_step
    assert "data fetch cifar100" in said
    assert "cifar-100-binary.tar.gz" in said
    assert "train.bin  153700000 bytes" in said
    # They are the archive's own files, records with labels in them, and no arrays of images.
    assert "unpacked and as they are" in said
    assert "C order" not in said
    assert "channels" not in said


def test_what_is_no_archives_own_is_told_as_arrays(tmp_path: Path) -> None:
    with pytest.raises(DataUnavailableError) as missing:
        open_data("cifar10", tmp_path)

    assert "uint8 in C order" in missing.value.next_step
    assert "as they are" not in missing.value.next_step


def test_a_set_that_was_altered_is_corrupt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch)
    path = tmp_path / "cifar100" / "test.bin"
    path.write_bytes(bytes(len(path.read_bytes())))

    with pytest.raises(DataCorruptError, match=r"test\.bin"):
        check_data(["cifar100"], tmp_path)
