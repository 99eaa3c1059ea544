"""The results folder: runs are found again, records are written once, damage is never hidden."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from result_cases import job, record_of, recorded

from narrowgauge.store import RunState, Store, read_entry, status_word
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, ExitCode, UnknownNameError, UsageError

ONE, TWO, THREE = (
    "20261121T100000Z-toy-aaaaaa",
    "20261121T100000Z-toy-bbbbbb",
    "20261122T100000Z-toy-cccccc",
)


def test_a_new_run_has_its_job_and_a_place_to_write(tmp_path: Path) -> None:
    folder = Store(tmp_path / "results").new_run(job(ONE))

    assert folder.path == tmp_path / "results" / "toy" / ONE
    assert folder.job() == job(ONE)
    assert folder.out == folder.path / "out"
    assert folder.out.is_dir()
    assert not folder.recorded


def test_a_run_id_is_used_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.new_run(job(ONE))

    with pytest.raises(UsageError, match="exists already"):
        store.new_run(job(ONE))


def test_a_file_in_the_way_of_the_results_is_named(tmp_path: Path) -> None:
    (tmp_path / "toy").write_text("")

    with pytest.raises(Exception, match="cannot write the results folder") as caught:
        Store(tmp_path).new_run(job(ONE))

    assert caught.value.exit_code is ExitCode.RESULTS_UNWRITABLE  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("number", "code"),
    [(errno.ENOSPC, ExitCode.DISK_FULL), (errno.EACCES, ExitCode.RESULTS_UNWRITABLE)],
)
def test_what_keeps_a_run_from_being_made_has_its_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, code: ExitCode
) -> None:
    def fail(path: Path, value: object) -> None:
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr("narrowgauge.store.write_json_atomic", fail)

    with pytest.raises(Exception) as caught:  # noqa: PT011 (the code is what counts)
        Store(tmp_path).new_run(job(ONE))

    assert caught.value.exit_code is code  # type: ignore[attr-defined]


def test_a_record_is_written_once_and_is_read_only(tmp_path: Path) -> None:
    folder = recorded(tmp_path, ONE)
    before = folder.record_path.read_bytes()
    other = record_of(Store(tmp_path).new_run(job(TWO)))

    with pytest.raises(UsageError, match="already recorded"):
        folder.write_record(other)

    assert folder.record_path.read_bytes() == before
    assert folder.record_path.stat().st_mode & 0o222 == 0


class TestFind:
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        for run_id in (TWO, ONE, THREE):
            recorded(tmp_path, run_id)
        return Store(tmp_path)

    @pytest.mark.parametrize(
        ("word", "found"),
        [(ONE, ONE), (ONE[:23], ONE), ("20261122", THREE), ("bbbbbb", TWO), ("toy-bbbbbb", TWO),
         ("latest", THREE),
         ("latest:toy", THREE)],
    )  # fmt: skip
    def test_by_beginning_end_and_latest(self, store: Store, word: str, found: str) -> None:
        assert store.find(word).name == found

    def test_by_path(self, store: Store) -> None:
        assert store.find(str(store.root / "toy" / ONE)).name == ONE

    def test_an_ambiguous_beginning_lists_what_it_could_be(self, store: Store) -> None:
        with pytest.raises(UnknownNameError, match="begins 2 run ids") as caught:
            store.find("20261121")

        assert caught.value.next_step.partition("Known:")[2].split() == [ONE, TWO]

    def test_an_unknown_run_names_the_nearest(self, store: Store) -> None:
        with pytest.raises(UnknownNameError, match=f"did you mean '{ONE}'"):
            store.find(ONE.replace("aaaaaa", "aaaaab"))

    def test_of_many_runs_the_newest_are_named_one_a_line(self, tmp_path: Path) -> None:
        names = [f"202611{day}T100000Z-toy-aaaaaa" for day in range(10, 22)]
        for name in names:
            Store(tmp_path).new_run(job(name))

        with pytest.raises(UnknownNameError) as unknown:
            Store(tmp_path).find("nosuchrun")
        with pytest.raises(UnknownNameError) as ambiguous:
            Store(tmp_path).find("2026111")

        heads = ("Known, the newest 5 of 12:", "Known, the newest 5 of 10:")
        for caught, head, found in zip(
            (unknown, ambiguous), heads, (names, names[:10]), strict=True
        ):
            lines = caught.value.next_step.splitlines()
            assert lines[0].endswith(head)
            assert lines[1:] == [*found[:-6:-1], "narrowgauge results --limit 12 lists all"]

    @pytest.mark.parametrize("word", ["", "latest:mnist", "latestx", "toy", "-"])
    def test_what_names_no_run_is_refused(self, store: Store, word: str) -> None:
        with pytest.raises(UnknownNameError):
            store.find(word)

    def test_no_results_at_all(self, tmp_path: Path) -> None:
        with pytest.raises(UnknownNameError, match="Known: none"):
            Store(tmp_path / "none").find("latest")

    def test_newest_first_also_within_one_second(self, store: Store) -> None:
        """TWO and ONE share a second; TWO was made first."""
        assert [folder.name for folder in store.all()] == [THREE, ONE, TWO]


def test_a_folder_that_the_lab_filled_alone_is_found_too(tmp_path: Path) -> None:
    """`narrowgauge_lab run --out results/here` writes one level higher and has no `out`."""
    write_json_atomic((tmp_path / "here").mkdir() or tmp_path / "here" / "job.json", job(ONE))
    folder = Store(tmp_path).find("here")

    assert folder.out == tmp_path / "here"
    assert Store(tmp_path).find(ONE) == folder


def test_other_folders_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "toy" / "notes").mkdir(parents=True)
    (tmp_path / "readme.txt").write_text("x")

    assert list(Store(tmp_path).all()) == []


class TestEntries:
    def test_a_run_without_a_record_is_open(self, tmp_path: Path) -> None:
        folder = Store(tmp_path).new_run(job(ONE))

        entry = read_entry(folder)

        assert (entry.state, entry.experiment) == (RunState.OPEN, "toy")
        assert status_word(entry) == "open"
        with pytest.raises(DamagedRecordError, match="no record yet") as caught:
            folder.record()
        assert caught.value.next_step == f"narrowgauge attach {ONE}"

    @pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'{"format": 1}'])
    def test_a_damaged_record_is_listed_as_damaged(self, tmp_path: Path, content: bytes) -> None:
        folder = recorded(tmp_path, ONE)
        folder.record_path.chmod(0o644)
        folder.record_path.write_bytes(content)

        [entry] = Store(tmp_path).entries()

        assert entry.state is RunState.DAMAGED
        assert entry.job == job(ONE)
        assert entry.problem is not None
        assert str(folder.record_path) in entry.problem.what

    def test_a_damaged_job_is_listed_as_damaged(self, tmp_path: Path) -> None:
        folder = Store(tmp_path).new_run(job(ONE))
        folder.job_path.write_text("{")

        [entry] = Store(tmp_path).entries()

        assert (entry.state, entry.experiment) == (RunState.DAMAGED, "toy")


def test_runs_of_one_experiment_are_found_wherever_they_lie(tmp_path: Path) -> None:
    recorded(tmp_path, ONE)
    alone = tmp_path / "by-hand"
    alone.mkdir()
    write_json_atomic(alone / "job.json", job(THREE))
    store = Store(tmp_path)

    assert [folder.name for folder in store.of("toy")] == ["by-hand", ONE]
    assert list(store.of("mnist")) == []
