"""Whether a run without a record goes on: told by the locks of its lab and its launcher."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
from result_cases import job, record_of, recorded
from rich.console import Console

from narrowgauge import lock
from narrowgauge.executors.base import HANDLE_FORMAT, Handle, save
from narrowgauge.liveness import Liveness, liveness_of
from narrowgauge.noise import Floors
from narrowgauge.show import print_results, show_run
from narrowgauge.store import RunFolder, Store
from narrowgauge.view import load_view, to_json
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_lab import folder as lab_folder

RUN = "20261121T100000Z-toy-aaaaaa"


@pytest.fixture
def host_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NARROWGAUGE_LOCK", str(tmp_path / "lock"))
    return tmp_path / "lock"


def _begun(root: Path, executor: str = "native") -> RunFolder:
    """A run in its second row of six."""
    folder = Store(root).new_run(job(RUN))
    save(folder.handle_path, Handle(HANDLE_FORMAT, executor, RUN, {}))
    with EventLog(folder.events_path) as log:
        for row in folder.job().rows[:2]:
            head = {"repeat": row.repeat, "seed": row.seed, "parameters": row.parameters}
            log.emit(EventKind.ROW_START, row.index, **head)
            metric = {"name": "accuracy", "unit": "%", "source": "count", "values": [75.0]}
            log.emit(EventKind.METRIC, row.index, **metric)
            if row.index == 0:
                log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
    return folder


def _launcher(stack: ExitStack, path: Path, folder: RunFolder) -> None:
    holder = lock.Holder(folder.name, str(folder.path), os.getpid())
    stack.enter_context(
        lock.hold(path, holder, still_running=lambda _: False, wait=False, note=print)
    )


def _killed_launcher(path: Path, folder: RunFolder) -> None:
    """One that had no time to clear its name."""
    with suppress(KeyboardInterrupt), ExitStack() as stack:
        _launcher(stack, path, folder)
        raise KeyboardInterrupt


@contextmanager
def _as(folder: RunFolder, path: Path, launcher: str, lab: str) -> Iterator[None]:
    with ExitStack() as stack:
        if launcher == "killed":
            _killed_launcher(path, folder)
        if launcher == "alive":
            _launcher(stack, path, folder)
        if lab == "alive":
            stack.enter_context(lab_folder.hold(folder.out, resume=True))
        if lab == "ended":
            with lab_folder.hold(folder.out, resume=True):
                pass
        yield


@pytest.mark.parametrize(
    ("launcher", "lab", "executor", "found"),
    [
        ("alive", "alive", "native", Liveness.WATCHED),
        ("alive", "ended", "native", Liveness.WATCHED),  # it is about to record it
        ("alive", "unknown", "docker", Liveness.WATCHED),
        ("killed", "alive", "docker", Liveness.ALONE),
        ("none", "alive", "native", Liveness.RUNNING),
        ("killed", "ended", "native", Liveness.CUT_OFF),
        ("none", "ended", "docker", Liveness.CUT_OFF),
        ("none", "ended", "ssh", Liveness.UNKNOWN),  # the locks are over there
        ("none", "unknown", "native", Liveness.UNKNOWN),
    ],
)
def test_the_locks_say_who_lives(
    tmp_path: Path, host_lock: Path, launcher: str, lab: str, executor: str, found: Liveness
) -> None:
    folder = _begun(tmp_path / "results", executor)

    with _as(folder, host_lock, launcher, lab):
        assert liveness_of(folder, host_lock) is found


def test_the_lock_of_another_run_says_nothing_of_this_one(tmp_path: Path, host_lock: Path) -> None:
    folder = _begun(tmp_path / "results")
    copy = _begun(tmp_path / "elsewhere")

    with _as(copy, host_lock, "alive", "unknown"):
        assert liveness_of(folder, host_lock) is Liveness.UNKNOWN
        assert liveness_of(copy, host_lock) is Liveness.WATCHED


def test_no_lock_is_asked_for_that_a_lab_may_be_about_to_take(
    tmp_path: Path, host_lock: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store(tmp_path).new_run(job())
    (folder.out / ".lock").touch()
    asked: list[Path] = []
    monkeypatch.setattr("narrowgauge.liveness.is_held", asked.append)

    assert liveness_of(folder, host_lock) is Liveness.UNKNOWN
    assert asked == []


def test_to_ask_takes_no_lock_away_and_makes_no_file(tmp_path: Path, host_lock: Path) -> None:
    assert lock.is_held(host_lock) is None
    assert lock.last_holder(host_lock) is None
    assert not host_lock.exists()
    folder = _begun(tmp_path / "results")
    _killed_launcher(host_lock, folder)
    assert lock.is_held(host_lock) is False
    os.mkfifo(tmp_path / "pipe")
    assert lock.last_holder(tmp_path / "pipe") is None

    with _as(folder, host_lock, "alive", "alive"):
        assert lock.is_held(host_lock) is True


def test_what_the_lab_fills_alone_runs_while_its_lock_is_held(
    tmp_path: Path, host_lock: Path
) -> None:
    launched = _begun(tmp_path / "results")
    alone = RunFolder(launched.out)
    alone.job_path.write_bytes(launched.job_path.read_bytes())

    with lab_folder.hold(alone.out, resume=True):
        assert liveness_of(alone, host_lock) is Liveness.RUNNING
    assert liveness_of(alone, host_lock) is Liveness.CUT_OFF


def _screen(folder: RunFolder) -> str:
    stream = io.StringIO()
    show_run(folder, Console(file=stream, width=120), Floors.none())
    return stream.getvalue()


def test_a_run_that_goes_on_is_shown_as_such(tmp_path: Path, host_lock: Path) -> None:
    folder = _begun(tmp_path)

    with _as(folder, host_lock, "alive", "alive"):
        screen = _screen(folder)
        assert to_json(load_view(folder))["running"] is True

    for part in ("… running, its launcher is alive", "on cpu · ", "4 of 6 rows have not begun"):
        assert part in screen, part
    (line,) = [line for line in screen.splitlines() if line.startswith("  1 ")]
    assert line.split()[-1] == "running"
    assert "its launcher records it when it has ended" in screen
    for part in ("INVALID", "did not complete", "no launcher", "attach"):
        assert part not in screen, part


def test_a_run_that_was_cut_off_has_unfinished_rows_and_is_to_be_recorded(
    tmp_path: Path, host_lock: Path
) -> None:
    folder = _begun(tmp_path)

    with _as(folder, host_lock, "killed", "ended"):
        screen = _screen(folder)
        assert to_json(load_view(folder))["running"] is False

    assert "no record: nothing of it runs any more" in screen
    assert "unfinished" in screen
    assert f"next: narrowgauge attach {RUN}" in screen
    assert "INVALID" not in screen


def test_what_a_row_said_against_itself_counts_before_it_ends(
    tmp_path: Path, host_lock: Path
) -> None:
    folder = _begun(tmp_path)
    with EventLog(folder.events_path) as log:
        log.emit(EventKind.INVALID, 1, reason="too hot")

    with _as(folder, host_lock, "alive", "alive"):
        screen = _screen(folder)

    assert "INVALID" in screen
    assert "row 1: too hot" in screen


def test_what_the_lab_says_at_its_end_is_no_end_without_a_record(
    tmp_path: Path, host_lock: Path
) -> None:
    folder = Store(tmp_path).new_run(job(RUN))
    record_of(folder)  # writes the outcome

    with _as(folder, host_lock, "alive", "unknown"):
        assert "… running" in _screen(folder)


def test_before_its_first_row_a_run_has_begun_none(tmp_path: Path, host_lock: Path) -> None:
    folder = Store(tmp_path).new_run(job(RUN))

    with _as(folder, host_lock, "alive", "unknown"):
        assert "no row has begun yet" in _screen(folder)


@pytest.mark.parametrize(
    ("launcher", "lab", "words"),
    [
        ("alive", "alive", "… running"),
        ("killed", "ended", "no record, cut off"),
        ("none", "unknown", "no record yet"),
    ],
)
def test_the_list_says_which_runs_go_on(
    tmp_path: Path, host_lock: Path, launcher: str, lab: str, words: str
) -> None:
    recorded(tmp_path, "20261120T100000Z-toy-bbbbbb")
    folder = _begun(tmp_path)
    stream = io.StringIO()

    with _as(folder, host_lock, launcher, lab):
        print_results(list(Store(tmp_path).entries()), Console(file=stream, width=120))

    newest, older = [line for line in stream.getvalue().splitlines() if "Z-toy-" in line]
    assert newest.split("short")[1].strip() == words
    assert "complete" in older
