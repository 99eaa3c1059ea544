"""The index: what the records say, whatever becomes of the index's own file."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from result_cases import host, job, record_of, recorded

import narrowgauge.index.database as module
from narrowgauge.index import INDEX_FILE, Index, Listed
from narrowgauge.index.listed import Witness
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.events import EventKind, EventLog, read_events
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import compose


def _listed(root: Path, **chosen: str) -> tuple[Listed, ...]:
    with Index(root) as index:
        return index.runs(**chosen)  # type: ignore[arg-type]


def _runs(root: Path, count: int = 3) -> list[RunFolder]:
    return [recorded(root, f"2026112{i}T100000Z-toy-{i:06x}") for i in range(1, count + 1)]


def _edit(folder: RunFolder, before: str, after: str) -> None:
    text = folder.record_path.read_text()
    assert before in text
    folder.record_path.chmod(0o644)
    folder.record_path.write_text(text.replace(before, after, 1))


def test_it_lists_what_the_store_finds_newest_first(tmp_path: Path) -> None:
    _runs(tmp_path)
    Store(tmp_path).new_run(job("20261124T100000Z-toy-dddddd"))

    found = _listed(tmp_path)

    assert [run.run_id for run in found] == [folder.name for folder in Store(tmp_path).all()]
    assert [run.status for run in found] == ["open", "complete", "complete", "complete"]
    newest = found[1]
    assert (newest.experiment, newest.profile, newest.target) == ("toy", "short", "cpu")
    assert (newest.device, newest.rows, newest.valid_rows) == ("EPYC", 6, 6)
    assert newest.headline.startswith("accuracy 98.")
    assert not newest.problem


def test_it_filters_and_limits(tmp_path: Path) -> None:
    _runs(tmp_path)
    Store(tmp_path).new_run(job("20261124T100000Z-toy-dddddd"))

    with Index(tmp_path) as index:
        assert len(index.runs(status="complete")) == 3
        assert len(index.runs(status="open", experiment="toy")) == 1
        assert index.runs(experiment="other") == ()
        assert len(index.runs(limit=2)) == 2


def test_records_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folders = _runs(tmp_path)
    _listed(tmp_path)
    read: list[str] = []
    true = module.listed

    def counted(root: Path, folder: RunFolder, *rest: Any) -> Listed:
        read.append(folder.name)
        return true(root, folder, *rest)

    monkeypatch.setattr(module, "listed", counted)
    assert len(_listed(tmp_path)) == 3
    assert read == []

    new = recorded(tmp_path, "20261129T100000Z-toy-eeeeee")
    shutil.rmtree(folders[0].path)
    assert _listed(tmp_path)[0].run_id == new.name
    assert read == [new.name]
    assert len(_listed(tmp_path)) == 3


def test_a_witness_sees_each_sound_record_that_is_read_and_no_other(tmp_path: Path) -> None:
    folders = _runs(tmp_path, 4)
    half, edited = folders[:2]
    _edit(half, half.record_path.read_text()[700:], "")
    _edit(edited, '"seed": 0', '"seed": 9')
    Store(tmp_path).new_run(job("20261129T100000Z-toy-eeeeee"))
    seen: dict[str, Any] = {}

    def witness(run: Listed, document: Any) -> None:
        seen[run.run_id] = document

    with Index(tmp_path, witness) as index:
        index.runs()
    assert set(seen) == {folder.name for folder in folders[2:]}
    assert all(folder.name not in seen or seen[folder.name] == json.loads(
        folder.record_path.read_text()) for folder in folders)  # fmt: skip

    seen.clear()
    _edit(folders[2], "99.", "98.")
    with Index(tmp_path, witness) as index:
        assert [run.problem for run in index.runs() if run.run_id == folders[3].name] == [""]
    assert seen == {}


def test_an_open_run_becomes_its_record(tmp_path: Path) -> None:
    folder = Store(tmp_path).new_run(job())
    assert _listed(tmp_path)[0].status == "open"

    folder.write_record(record_of(folder))

    assert _listed(tmp_path)[0].status == "complete"


@pytest.mark.parametrize(
    "content", [b"", b"not a database at all", b"SQLite format 3\0" + b"x" * 99]
)
def test_a_damaged_index_is_thrown_away(tmp_path: Path, content: bytes) -> None:
    _runs(tmp_path)
    (tmp_path / INDEX_FILE).write_bytes(content)

    assert len(_listed(tmp_path)) == 3
    assert len(_listed(tmp_path)) == 3
    with sqlite3.connect(tmp_path / INDEX_FILE) as connection:
        assert connection.execute("SELECT count(*) FROM runs").fetchone() == (3,)


def test_an_older_index_is_built_anew(tmp_path: Path) -> None:
    _runs(tmp_path)
    with sqlite3.connect(tmp_path / INDEX_FILE) as connection:
        connection.execute("CREATE TABLE runs (something)")
        connection.execute("PRAGMA user_version = 999")
    connection.close()

    assert len(_listed(tmp_path)) == 3


def test_a_folder_that_takes_no_file_is_listed_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs(tmp_path)

    def refuse(path: Path, timeout: float) -> sqlite3.Connection:
        if str(path) != ":memory:":
            raise sqlite3.OperationalError("unable to open database file")
        return true(path, timeout=timeout)

    true = sqlite3.connect
    monkeypatch.setattr(module.sqlite3, "connect", refuse)

    assert len(_listed(tmp_path)) == 3
    assert not (tmp_path / INDEX_FILE).exists()
    assert _listed(tmp_path / "nothing") == ()


def test_one_that_another_process_writes_is_waited_for_or_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _runs(tmp_path)
    _listed(tmp_path)
    recorded(tmp_path, "20261129T100000Z-toy-eeeeee")
    monkeypatch.setattr(module, "_PATIENCE_S", 0.05)
    other = sqlite3.connect(tmp_path / INDEX_FILE, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    try:
        assert len(_listed(tmp_path)) == 4
    finally:
        other.execute("ROLLBACK")
        other.close()
    assert (tmp_path / INDEX_FILE).is_file()
    assert len(_listed(tmp_path)) == 4


# Records that are none are refused by name, and the rest goes on.


def test_truncated_foreign_newer_and_edited_records_are_refused(tmp_path: Path) -> None:
    good, truncated, foreign, newer, edited = _runs(tmp_path, 5)
    for folder in (truncated, foreign, newer):
        folder.record_path.chmod(0o644)
    truncated.record_path.write_bytes(truncated.record_path.read_bytes()[:-100])
    foreign.record_path.write_text('{"format": 1, "from": "elsewhere"}')
    body = json.loads(newer.record_path.read_text())
    newer.record_path.write_text(json.dumps({**body, "format": 99}))
    _edit(edited, '"status": "complete"', '"statuss": "complete"')

    found = {run.run_id: run for run in _listed(tmp_path)}

    assert not found[good.name].problem
    for folder, word in (
        (truncated, "truncated"), (foreign, "unknown field"), (newer, "format 99"),
        (edited, "statuss"),
    ):  # fmt: skip
        run = found[folder.name]
        assert run.status == "damaged"
        assert word in run.problem
        assert str(folder.record_path) in run.problem


def test_a_figure_that_was_edited_is_seen_by_the_first_digest(tmp_path: Path) -> None:
    folder = _runs(tmp_path, 1)[0]
    _listed(tmp_path)
    _edit(folder, "99.0", "99.9")
    time.sleep(0.01)
    os.utime(folder.record_path)

    for _ in range(2):  # not forgotten the next time
        (run,) = _listed(tmp_path)
        assert run.status == "damaged"
        assert "edited after it was recorded" in run.problem


@pytest.mark.parametrize(
    ("before", "after", "named"),
    [
        ("99.0", "99.9", "rows"),
        ('"torch": "2.13.0"', '"torch": "2.12.0"', "inside"),
        ('"accelerator": null', '"accelerator": "NVIDIA H200"', "inside"),
        ('"profile": "short"', '"profile": "paper"', "profile"),
        ('"target": "cpu"', '"target": "desktop-next"', "target"),
        ('"synthetic": false', '"synthetic": true', "synthetic"),
        ("b" * 64, "a" * 64, "hashes"),
        ('"seconds": 190.0', '"seconds": 19.0', "seconds"),
    ],
)
def test_what_was_edited_is_seen_by_the_job_and_the_outcome(
    tmp_path: Path, before: str, after: str, named: str
) -> None:
    folder = recorded(tmp_path)
    assert not _listed(tmp_path)[0].problem
    _edit(folder, before, after)
    (tmp_path / INDEX_FILE).unlink()  # whatever the index knew

    (run,) = _listed(tmp_path)

    assert run.status == "damaged"
    assert "was edited" in run.problem
    assert named in run.problem
    assert str(folder.outcome_path) in run.problem


def test_a_complete_run_without_an_outcome_is_refused_and_a_killed_one_is_not(
    tmp_path: Path,
) -> None:
    folder = recorded(tmp_path)
    folder.outcome_path.unlink()
    killed = Store(tmp_path).new_run(job("20261122T100000Z-toy-bbbbbb"))
    whole = host(exit_code=137, status=Status.UNFINISHED)
    killed.write_record(compose(killed.job(), None, (), whole))

    found = {run.run_id: run for run in _listed(tmp_path)}

    assert "outcome.json is not there" in found[folder.name].problem
    assert found[killed.name].status == "unfinished"


@pytest.mark.parametrize("outcome", ["half", "another run's"])
def test_a_useless_outcome_leaves_the_events_to_compare_with(tmp_path: Path, outcome: str) -> None:
    folder = Store(tmp_path).new_run(job())
    planned = folder.job().rows[0]
    head = {"repeat": 0, "seed": planned.seed, "parameters": planned.parameters}
    taken = {
        "name": "accuracy", "unit": "%", "source": "count", "values": [99.0], "index": "",
        "conditions": {},
    }  # fmt: skip
    with EventLog(folder.events_path) as log:
        log.emit(EventKind.ROW_START, 0, **head)
        log.emit(EventKind.METRIC, 0, **taken)
        log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0)
    if outcome == "half":
        folder.outcome_path.write_text('{"format": 1')
    else:
        record_of(folder)
        text = folder.outcome_path.read_text()
        folder.outcome_path.write_text(text.replace(folder.name, "20200101T000000Z-toy-ffffff"))
    failed = host(exit_code=11, status=Status.FAILED)
    folder.write_record(compose(folder.job(), None, read_events(folder.events_path), failed))
    assert not _listed(tmp_path)[0].problem
    (tmp_path / INDEX_FILE).unlink()
    _edit(folder, "99.0", "99.9")

    (run,) = _listed(tmp_path)

    assert "other values of rows" in run.problem
    assert str(folder.events_path) in run.problem


def test_text_that_no_json_has_equal_is_compared_as_values(tmp_path: Path) -> None:
    """An outcome that writes its numbers otherwise is the same outcome."""
    folder = recorded(tmp_path)
    outcome = json.loads(folder.outcome_path.read_text())
    outcome["rows"][0].pop("error")  # a default, which a reader fills in
    folder.outcome_path.write_text(json.dumps(outcome))

    assert not _listed(tmp_path)[0].problem


def test_rows_of_the_same_letters_do_not_hide_the_rest(tmp_path: Path) -> None:
    """Where record and outcome have their rows in common, all else is still compared."""
    folder = recorded(tmp_path)
    _edit(folder, '"torch": "2.', '"torch": "3.')

    (run,) = _listed(tmp_path)

    assert "other values of inside" in run.problem


def test_half_a_copy_does_not_brand_the_whole(tmp_path: Path) -> None:
    folder = recorded(tmp_path)
    whole = folder.record_path.read_bytes()
    folder.record_path.chmod(0o644)
    folder.record_path.write_bytes(whole[:500])
    assert _listed(tmp_path)[0].status == "damaged"
    folder.record_path.write_bytes(whole)

    (run,) = _listed(tmp_path)

    assert (run.status, run.problem) == ("complete", "")


def test_a_touched_record_of_the_same_bytes_is_none_the_worse(tmp_path: Path) -> None:
    folder = _runs(tmp_path, 1)[0]
    _listed(tmp_path)
    os.utime(folder.record_path, (1, 1))

    assert _listed(tmp_path)[0].status == "complete"


@settings(
    max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.binary(max_size=200), st.integers(0, 3000))
def test_any_bytes_in_a_record_hide_no_other(tmp_path: Path, junk: bytes, place: int) -> None:
    root = tmp_path / "results"
    shutil.rmtree(root, ignore_errors=True)
    good, bad = _runs(root, 2)
    content = bad.record_path.read_bytes()
    bad.record_path.chmod(0o644)
    bad.record_path.write_bytes(content[:place] + junk + content[place + len(junk) + 1 :])

    found = {run.run_id: run for run in _listed(root)}

    assert not found[good.name].problem
    assert bad.name in found


@pytest.mark.slow
def test_a_hundred_thousand_are_listed_and_filtered_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records are links to one, and are read once for all: building the index is not timed."""
    seed = recorded(tmp_path / "seed")
    root = tmp_path / "results"
    for number in range(100_000):
        folder = root / f"race{number % 10}" / f"20261121T100000Z-race-{number:06x}"
        folder.mkdir(parents=True)
        (folder / "record.json").symlink_to(seed.record_path)
    one = _listed(tmp_path / "seed")[0]

    def quick(
        base: Path, folder: RunFolder, size: int, mtime_ns: int, witness: Witness | None
    ) -> Listed:
        place = str(folder.path.relative_to(base))
        values = {**vars(one), "folder": place, "size": size, "mtime_ns": mtime_ns}
        return Listed(**{**values, "run_id": folder.name, "age": folder.name})

    monkeypatch.setattr(module, "listed", quick)
    _listed(root)

    begun = time.process_time()
    with Index(root) as index:
        assert len(index.runs(limit=20, status="complete", experiment="toy")) == 20
    assert time.process_time() - begun < 1.0
