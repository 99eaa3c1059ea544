"""CIFAR-100, whose own files are its flat files: the archive placed by hand, missing, or wrong."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Dict

import numpy as np
import pytest
from data_cases import asking, assert_nothing, fetch_set, files_answer, serving, tarball, write

from narrowgauge_contract.datasets import DATA_SETS, Artifact, DataSet, FlatFile
from narrowgauge_contract.errors import DataUnavailableError
from narrowgauge_data import decode, fetch, local

_random = np.random.default_rng(11)
#: Some records in CIFAR-100's own form: a coarse class, a class, and 3 planes of 32×32.
RECORDS = {
    "train.bin": _random.integers(0, 100, (12, 3074), dtype=np.uint8),
    "test.bin": _random.integers(0, 100, (4, 3074), dtype=np.uint8),
}
ARCHIVE = "cifar-100-binary.tar.gz"


def _files() -> Dict[str, bytes]:
    """What lies in the archive: the records, and two files that nobody reads."""
    names = {"fine_label_names.txt": b"apple\n", "coarse_label_names.txt": b"fish\n"}
    return {**{name: array.tobytes() for name, array in RECORDS.items()}, **names}


def _small(root: str = "https://x") -> DataSet:
    """The declaration of CIFAR-100 with fewer images and another address."""
    files = tuple(
        FlatFile(name, array.shape, hashlib.sha256(array.tobytes()).hexdigest())
        for name, array in RECORDS.items()
    )
    source = dataclasses.replace(
        DATA_SETS["cifar100"].sources[0], artifacts=(Artifact(f"{root}/{ARCHIVE}"),)
    )
    return dataclasses.replace(DATA_SETS["cifar100"], files=files, sources=(source,))


def _assert_whole(root: Path) -> None:
    for name, array in RECORDS.items():
        assert (root / "cifar100" / name).read_bytes() == array.tobytes()


def test_what_is_declared() -> None:
    declared = DATA_SETS["cifar100"]

    assert [flat.bytes for flat in declared.files] == [50000 * 3074, 10000 * 3074]
    assert len(set(declared.classes)) == 100
    assert declared.classes == tuple(sorted(declared.classes))  # as the archive numbers them
    (artifact,) = declared.sources[0].artifacts
    assert artifact.locator.endswith(f"/{ARCHIVE}")
    assert artifact.sha256 is not None


def test_its_layouts_are_one() -> None:
    assert [layout.name for layout in decode.layouts_of(DATA_SETS["cifar100"])] == ["flat"]


@pytest.mark.parametrize("form", ["archive", "loose"])
def test_it_is_taken_from_a_folder(tmp_path: Path, form: str) -> None:
    archive = {ARCHIVE: tarball(_files(), folder="cifar-100-binary")}
    given = write(tmp_path / "given", archive if form == "archive" else _files())

    fetch.fetch_from(_small(), tmp_path / "data", given, asking())

    _assert_whole(tmp_path / "data")
    assert local.check(_small(), tmp_path / "data", thorough=True).complete


def test_it_is_fetched(tmp_path: Path) -> None:
    answer = files_answer({ARCHIVE: tarball(_files(), folder="cifar-100-binary")})
    with serving(answer) as server:
        fetch_set(_small(server.root), tmp_path / "data")

    _assert_whole(tmp_path / "data")


def test_an_archive_that_is_not_there_is_named_and_how_to_place_it(tmp_path: Path) -> None:
    (tmp_path / "given").mkdir()

    with pytest.raises(DataUnavailableError, match="does not hold cifar100") as caught:
        fetch.fetch_from(_small(), tmp_path / "data", tmp_path / "given", asking())

    assert ARCHIVE in caught.value.next_step
    assert "--from FOLDER" in caught.value.next_step
    assert_nothing(tmp_path / "data", "cifar100")


@pytest.mark.parametrize("fault", ["another", "truncated", "one missing"])
def test_files_that_are_not_its_own_are_refused(tmp_path: Path, fault: str) -> None:
    files = _files()
    if fault == "one missing":
        del files["test.bin"]
    else:
        content = files["train.bin"]
        files["train.bin"] = content[:-9] if fault == "truncated" else bytes(len(content))
    given = write(tmp_path / "given", {ARCHIVE: tarball(files)})

    with pytest.raises(DataUnavailableError) as caught:
        fetch.fetch_from(_small(), tmp_path / "data", given, asking())

    named = "the file test.bin" if fault == "one missing" else "train.bin has sha256"
    assert named in caught.value.why
    assert_nothing(tmp_path / "data", "cifar100")
