"""The store of weights: by content, named, with a recipe, and never trusted unread."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from result_cases import SPEC, job, record_of, with_row

from narrowgauge.errors import BadValueError, NarrowgaugeError, UnknownNameError, UsageError
from narrowgauge.store import RunFolder, Store
from narrowgauge.weights import (
    WeightsStore,
    default_root,
    require_one,
    require_saving,
    take_from_run,
)
from narrowgauge_contract.errors import DamagedRecordError, ExitCode
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import SideFile, Validity
from narrowgauge_contract.spec import parse_spec

NOW = 1.75e9


@pytest.fixture
def store(tmp_path: Path) -> WeightsStore:
    return WeightsStore(tmp_path / "store")


def _file(tmp_path: Path, content: bytes = b"weights") -> Path:
    path = tmp_path / "w.pt"
    path.write_bytes(content)
    return path


def test_what_was_added_is_found_by_name_and_by_hash(store: WeightsStore, tmp_path: Path) -> None:
    added = store.add(_file(tmp_path), name="r20", recipe="resnet depth=20", now=NOW)

    assert added.about.sha256 == sha256_file(tmp_path / "w.pt")
    assert (added.bytes, added.imported_utc) == (7, NOW)
    for name in ("r20", added.about.sha256[:8]):
        entry, path = store.find(name)
        assert entry == added
        assert path.read_bytes() == b"weights"
    assert list(store.all()) == [added]


def test_the_same_content_is_stored_once(store: WeightsStore, tmp_path: Path) -> None:
    first = store.add(_file(tmp_path), name="a", recipe="x", now=NOW)

    assert store.add(_file(tmp_path), name="b", recipe="y", now=NOW + 1) == first
    assert len(list(store.all())) == 1


def test_a_name_means_one_content(store: WeightsStore, tmp_path: Path) -> None:
    store.add(_file(tmp_path), name="a", recipe="x", now=NOW)

    with pytest.raises(BadValueError, match="other weights of the name 'a'"):
        store.add(_file(tmp_path, b"others"), name="a", recipe="y", now=NOW)


@pytest.mark.parametrize("name", ["", "a/b", ".hidden"])
def test_a_name_that_is_none_is_refused(store: WeightsStore, tmp_path: Path, name: str) -> None:
    with pytest.raises(BadValueError):
        store.add(_file(tmp_path), name=name, recipe="x", now=NOW)


def test_no_file_is_refused(store: WeightsStore, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is not a file"):
        store.add(tmp_path / "none", name="a", recipe="x", now=NOW)


def test_damaged_weights_are_not_handed_out(store: WeightsStore, tmp_path: Path) -> None:
    added = store.add(_file(tmp_path), name="a", recipe="train it", now=NOW)
    (store.root / added.about.sha256 / "weights.pt").write_bytes(b"altered")

    with pytest.raises(DamagedRecordError, match="missing or damaged") as caught:
        store.find("a")

    assert "train it" in caught.value.next_step


def test_an_unknown_name_names_the_nearest(store: WeightsStore, tmp_path: Path) -> None:
    store.add(_file(tmp_path), name="resnet20", recipe="x", now=NOW)

    with pytest.raises(UnknownNameError, match="did you mean 'resnet20'"):
        store.find("resnet21")


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ExitCode.DISK_FULL), (errno.EACCES, ExitCode.RESULTS_UNWRITABLE)],
)
def test_a_copy_that_fails_leaves_nothing(
    store: WeightsStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    code: ExitCode,
) -> None:
    def fail(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(number, os.strerror(number), str(target))

    monkeypatch.setattr("narrowgauge.weights.shutil.copyfile", fail)

    with pytest.raises(NarrowgaugeError) as caught:
        store.add(_file(tmp_path), name="a", recipe="x", now=NOW)

    assert caught.value.exit_code is code
    assert list(store.root.iterdir()) == []


class TestFromARun:
    @staticmethod
    def _run(tmp_path: Path, valid: bool = True) -> RunFolder:
        """A run whose rows 1 and 2 left weights."""
        folder = Store(tmp_path / "results").new_run(job(precision=["fp32"]))
        record = record_of(folder)
        for index in (1, 2):
            path = folder.out / f"row-{index}" / "weights.pt"
            path.write_bytes(f"weights of {index}".encode())
            side = SideFile(f"row-{index}/weights.pt", sha256_file(path), path.stat().st_size)
            record = with_row(record, index, side_files=(side,), validity=Validity(valid))
        folder.write_record(record)
        return folder

    def test_the_first_valid_row_that_left_some_gives_them(
        self, store: WeightsStore, tmp_path: Path
    ) -> None:
        stored = take_from_run(self._run(tmp_path), store, name="toy", now=NOW)

        assert store.find("toy")[1].read_bytes() == b"weights of 1"
        assert stored.about.recipe == (
            "toy epochs=3 precision=fp32 seed=1 (run 20261121T100000Z-toy-aaaaaa, row 1)"
        )

    def test_invalid_rows_give_none(self, store: WeightsStore, tmp_path: Path) -> None:
        with pytest.raises(NarrowgaugeError, match="left no weights"):
            take_from_run(self._run(tmp_path, valid=False), store, name="toy", now=NOW)

    def test_weights_that_changed_since_are_refused(
        self, store: WeightsStore, tmp_path: Path
    ) -> None:
        folder = self._run(tmp_path)
        (folder.out / "row-1" / "weights.pt").write_bytes(b"others")

        with pytest.raises(DamagedRecordError, match="was changed"):
            take_from_run(folder, store, name="toy", now=NOW)

        assert list(store.all()) == []


def test_an_experiment_that_saves_no_weights_is_told_apart() -> None:
    with pytest.raises(UsageError, match="does not save weights"):
        require_saving(parse_spec(SPEC))


def test_a_name_is_for_one_configuration() -> None:
    require_one([job(precision=["fp32"])])
    with pytest.raises(UsageError, match="make 2 configurations"):
        require_one([job()])
    runs = [job(precision=["fp32"]), job("b", precision=["bf16"])]
    with pytest.raises(UsageError, match="make 2 configurations"):
        require_one(runs)


@pytest.mark.parametrize(
    ("env", "root"),
    [
        ({}, "/home/u/.local/share/narrowgauge/weights"),
        ({"XDG_DATA_HOME": "/d"}, "/d/narrowgauge/weights"),
        ({"XDG_DATA_HOME": "relative"}, "/home/u/.local/share/narrowgauge/weights"),
    ],
)
def test_it_lies_beside_the_data(env: dict[str, str], root: str) -> None:
    assert default_root(env, Path("/home/u")) == Path(root)


@pytest.mark.parametrize("name", ["a", "", "a/b", ".a"])
def test_a_name_is_refused_before_the_training(
    store: WeightsStore, tmp_path: Path, name: str
) -> None:
    store.add(_file(tmp_path), name="a", recipe="x", now=NOW)

    with pytest.raises(BadValueError, match="name"):
        store.require_free(name)
    store.require_free("b")
