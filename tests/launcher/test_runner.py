"""A run from its start to its record, on an executor without a process."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launching import FakeExecutor, Quiet, facts, tiny_job, write_outcome, write_run

from narrowgauge import recording, runner
from narrowgauge.errors import (
    ContainerRefused,
    DiskFull,
    ExitCode,
    Interrupted,
    Killed,
    NoValidRow,
    OutOfMemory,
    ResultsUnwritable,
    RunFailed,
    UsageError,
)
from narrowgauge.executors.base import Executor, Handle
from narrowgauge.recording import problem_of
from narrowgauge.runner import (
    Session,
    StopRequest,
    attach,
    check_results,
    run_job,
    stop_signals,
)
from narrowgauge.store import Store
from narrowgauge_contract.events import Event, EventKind, EventLog
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status


def session(tmp_path: Path, executor: Executor) -> Session:
    return Session(
        executor=executor,
        store=Store(tmp_path / "results"),
        experiments=tmp_path,
        data=tmp_path,
        start_facts=lambda engine: facts(),
        reporter=Quiet(),
        stop=StopRequest(),
    )


def test_a_run_that_goes_well_is_recorded_once(tmp_path: Path) -> None:
    fake = FakeExecutor()
    folder, record = run_job(tiny_job("precision=fp32,bf16"), session(tmp_path, fake))

    assert fake.calls == ["start", "stream", "collect"]
    assert record.status is Status.COMPLETE
    assert record.exit_code == 0
    assert [row.metric("accuracy").values for row in record.rows] == [(90.0, 91.0, 92.0)] * 2  # type: ignore[union-attr]
    assert record.host is not None
    assert record.host.executor == "fake"
    assert record.host.cache_cold is True
    assert record.host.log_tail == "last words\n"
    assert record.hashes.image == "sha256:aa"
    assert folder.record() == record
    assert problem_of(record, folder) is None


def test_a_start_that_failed_leaves_no_folder(tmp_path: Path) -> None:
    fake = FakeExecutor(start_error=ContainerRefused("no"))
    with pytest.raises(ContainerRefused):
        run_job(tiny_job(), session(tmp_path, fake))

    assert list(Store(tmp_path / "results").all()) == []


@pytest.mark.parametrize(
    ("status", "code", "error"),
    [
        (137, ExitCode.KILLED, Killed),
        (31, ExitCode.OUT_OF_MEMORY, OutOfMemory),
        (22, ExitCode.DISK_FULL, DiskFull),
        (1, ExitCode.RUN_FAILED, RunFailed),
        (139, ExitCode.KILLED, Killed),
    ],
)
def test_without_an_outcome_the_rows_come_from_the_events(
    tmp_path: Path, status: int, code: ExitCode, error: type[Exception]
) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job, end=False)
        return status

    folder, record = run_job(tiny_job(), session(tmp_path, FakeExecutor(lab)))

    assert record.exit_code == code
    assert record.rows[0].status is Status.UNFINISHED
    assert record.rows[0].metric("accuracy") is not None
    assert not record.rows[0].validity.valid
    assert isinstance(problem_of(record, folder), error)


def test_exit_status_0_without_an_outcome_is_no_success(tmp_path: Path) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job)
        return 0

    _, record = run_job(tiny_job(), session(tmp_path, FakeExecutor(lab)))

    assert record.status is Status.FAILED
    assert record.exit_code == ExitCode.RUN_FAILED


def test_a_truncated_outcome_costs_nothing(tmp_path: Path) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job)
        write_outcome(out, job)
        text = (out / "outcome.json").read_text()
        (out / "outcome.json").write_text(text[: len(text) // 2])
        return 0

    _, record = run_job(tiny_job(), session(tmp_path, FakeExecutor(lab)))

    assert record.rows[0].metric("accuracy") is not None
    assert record.host is not None
    assert "outcome.json was damaged" in record.host.exceptions[0]


def test_an_unfinished_event_line_is_counted(tmp_path: Path) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job, end=False)
        with open(out / "events.jsonl", "a") as stream:
            stream.write('not json\n{"kind": "prog')
        return 137

    _, record = run_job(tiny_job(), session(tmp_path, FakeExecutor(lab)))

    assert record.events_damaged == 2


def test_a_run_without_a_valid_row_ends_with_its_own_code(tmp_path: Path) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job, end=False)
        with EventLog(out / "events.jsonl") as log:
            log.emit(EventKind.INVALID, 0, reason="it diverged")
            log.emit(EventKind.ROW_END, 0, status="complete", seconds=1.0, error=None)
        write_outcome(out, job)
        return 0

    folder, record = run_job(tiny_job(), session(tmp_path, FakeExecutor(lab)))
    problem = problem_of(record, folder)

    assert isinstance(problem, NoValidRow)
    assert problem.why == "it diverged"


def _stop_on_first_event(fake: FakeExecutor, world: Session) -> None:
    class Stopper(Quiet):
        def event(self, event: Event) -> None:
            world.stop.requested = True

    object.__setattr__(world, "reporter", Stopper())
    fake.forever = True


@pytest.mark.parametrize("stops_with", [130, 137])
def test_a_stop_cancels_and_records_what_there_is(tmp_path: Path, stops_with: int) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job, end=False)
        return 0

    fake = FakeExecutor(lab, stops_with=stops_with)
    world = session(tmp_path, fake)
    _stop_on_first_event(fake, world)
    folder, record = run_job(tiny_job(), world)

    assert fake.calls == ["start", "stream", "cancel 30", "collect"]
    assert record.status is Status.INTERRUPTED
    assert record.exit_code == ExitCode.INTERRUPTED
    assert record.rows[0].metric("accuracy") is not None
    assert isinstance(problem_of(record, folder), Interrupted)


def test_a_second_stop_kills_at_once(tmp_path: Path) -> None:
    class Impatient(FakeExecutor):
        def cancel(self, handle: Handle, timeout_s: int = 30) -> None:
            super().cancel(handle, timeout_s)
            if timeout_s:
                raise KeyboardInterrupt

    fake = Impatient(stops_with=137)
    world = session(tmp_path, fake)
    _stop_on_first_event(fake, world)
    _, record = run_job(tiny_job(), world)

    assert fake.calls[-3:] == ["cancel 30", "cancel 0", "collect"]
    assert record.status is Status.COMPLETE or record.exit_code == ExitCode.INTERRUPTED


def test_signals_set_the_flag_even_where_they_came_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    stop = StopRequest()
    try:
        with stop_signals(stop):
            os.kill(os.getpid(), signal.SIGINT)
            assert stop.requested
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_launcher_that_breaks_leaves_the_run_for_attach(tmp_path: Path) -> None:
    class Broken(FakeExecutor):
        def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
            yield from super().stream(handle, out)
            raise ValueError("a bug")

    world = session(tmp_path, Broken())
    with pytest.raises(ValueError, match="a bug"):
        run_job(tiny_job(), world)
    folder = world.store.find("latest")

    assert not folder.recorded
    assert "narrowgauge attach" in world.reporter.notes[0]  # type: ignore[attr-defined]
    watcher = FakeExecutor()
    record = attach(folder, session(tmp_path, watcher))
    assert record.status is Status.COMPLETE
    assert watcher.calls == ["stream", "collect"]


def test_attach_refuses_what_is_recorded_or_never_started(tmp_path: Path) -> None:
    world = session(tmp_path, FakeExecutor())
    folder, _ = run_job(tiny_job(), world)
    with pytest.raises(UsageError, match="already recorded"):
        attach(folder, world)

    unstarted = world.store.new_run(tiny_job(run_id="20261121T101501Z-tiny-def456"))
    with pytest.raises(UsageError, match="was never started"):
        attach(unstarted, world)

    write_run(unstarted.out, unstarted.job(), end=False)
    with pytest.raises(UsageError, match="nothing says how") as error:
        attach(unstarted, world)
    assert "narrowgauge show" in error.value.next_step
    assert "remove" not in error.value.next_step


def test_a_full_disk_at_the_record_keeps_the_events_and_attach_writes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import narrowgauge.store

    def full(path: Path, record: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    fake = FakeExecutor()
    world = session(tmp_path, fake)
    with monkeypatch.context() as patched:
        patched.setattr(narrowgauge.store, "write_record", full)
        with pytest.raises(DiskFull) as error:
            run_job(tiny_job(), world)
    folder = world.store.find("latest")

    assert "narrowgauge attach" in error.value.next_step
    assert str(folder.out) in error.value.next_step
    watcher = FakeExecutor()
    assert attach(folder, session(tmp_path, watcher)).status is Status.COMPLETE
    assert watcher.calls == ["discard"]  # it was collected before: only what is left goes


def test_a_record_is_never_overwritten(tmp_path: Path) -> None:
    fake = FakeExecutor()
    world = session(tmp_path, fake)
    folder, record = run_job(tiny_job(), world)
    ending = runner.load_ending(folder.path / "ending.json")
    assert ending is not None

    with pytest.raises(UsageError, match="already recorded"):
        recording.record_run(folder, runner.load_handle(folder.handle_path), ending, facts())
    assert folder.record() == record


def test_an_unwritable_results_folder_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(ResultsUnwritable) as error:
        check_results(tmp_path / "file" / "results")
    assert "--results" in error.value.next_step
    check_results(tmp_path / "new" / "results")
    assert list((tmp_path / "new" / "results").iterdir()) == []


def test_a_full_disk_is_told_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner, "_LEAST_FREE_BYTES", 1 << 62)

    with pytest.raises(DiskFull, match="are left of"):
        check_results(tmp_path)
