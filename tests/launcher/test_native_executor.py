"""The native executor with real processes and a lab that does as it is told."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_lab
import pytest
from launching import Quiet, facts, tiny_job

from narrowgauge.errors import ExitCode, ToolchainMissing
from narrowgauge.executors.base import Handle, load_handle
from narrowgauge.executors.native import NativeExecutor
from narrowgauge.plan import Places
from narrowgauge.runner import Session, StopRequest, attach, run_job
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.events import Event, EventKind
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return fake_lab.install(tmp_path / "src")


def executor(source: Path) -> NativeExecutor:
    return NativeExecutor(source, dict(os.environ), ensure_python=lambda: Path(sys.executable))


def session(tmp_path: Path, native: NativeExecutor) -> Session:
    return Session(
        executor=native,
        store=Store(tmp_path / "results"),
        experiments=tmp_path,
        data=tmp_path,
        start_facts=lambda engine: facts(),
        reporter=Quiet(),
        stop=StopRequest(),
    )


def job(width: int) -> Job:
    return tiny_job(f"width={width}")


def started(tmp_path: Path, source: Path, width: int) -> tuple[RunFolder, Handle, NativeExecutor]:
    """A run that is going, past its first metric."""
    native = executor(source)
    folder = Store(tmp_path / "results").new_run(job(width))
    handle = native.start(job(width), Places(folder.path, tmp_path, None))
    until(lambda: folder.events_path.exists() and "metric" in folder.events_path.read_text())
    return folder, handle, native


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not true():
        assert time.monotonic() < deadline, "it did not happen in 120 s"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process is no more, or only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("Z", "X")
    except OSError:
        return True


def test_a_run_is_recorded_with_the_labs_words(tmp_path: Path, source: Path) -> None:
    folder, record = run_job(job(fake_lab.FINE), session(tmp_path, executor(source)))

    assert record.status is Status.COMPLETE
    assert record.host is not None
    assert record.host.executor == "native"
    assert record.host.image is None
    assert record.host.log_tail == "the lab speaks\n"
    assert json.loads(folder.handle_path.read_text())["identity"]["folder"] == str(folder.path)


def test_a_failed_row_is_exit_30(tmp_path: Path, source: Path) -> None:
    _, record = run_job(job(fake_lab.FAILS), session(tmp_path, executor(source)))

    assert (record.exit_code, record.status) == (ExitCode.RUN_FAILED, Status.FAILED)


def test_a_lab_that_dies_early_is_quoted(tmp_path: Path, source: Path) -> None:
    _, record = run_job(job(fake_lab.SILENT), session(tmp_path, executor(source)))

    assert record.exit_code == ExitCode.RUN_FAILED
    assert record.error is not None
    assert "exit status 7" in record.error.why
    assert "the lab speaks" in record.error.why


def test_a_stop_lets_the_lab_write_its_outcome(tmp_path: Path, source: Path) -> None:
    world = session(tmp_path, executor(source))

    class Stopper(Quiet):
        def event(self, event: Event) -> None:
            # Not at the first event: the lab may not have measured anything yet.
            world.stop.requested |= event.kind is EventKind.METRIC

    world = dataclasses.replace(world, reporter=Stopper())
    folder, record = run_job(job(fake_lab.SLOW), world)

    assert (record.exit_code, record.status) == (ExitCode.INTERRUPTED, Status.INTERRUPTED)
    assert folder.outcome() is not None
    assert record.rows[0].metric("loss") is not None


def test_a_lab_that_does_not_stop_is_killed(tmp_path: Path, source: Path) -> None:
    folder, handle, native = started(tmp_path, source, fake_lab.STUBBORN)
    native.cancel(handle, timeout_s=1)

    assert not native.alive(handle)
    assert native.collect(handle, folder.path).exit_code == ExitCode.KILLED


def test_killed_from_outside_takes_the_rows_along(tmp_path: Path, source: Path) -> None:
    folder, handle, native = started(tmp_path, source, fake_lab.SPAWNS)
    until(lambda: (folder.out / "grandchild").exists())
    os.kill(handle.identity["pid"], signal.SIGKILL)
    list(native.stream(handle, folder.out))
    ending = native.collect(handle, folder.path)

    assert ending.exit_code == ExitCode.KILLED
    until(lambda: gone(int((folder.out / "grandchild").read_text())))


def test_another_launcher_attaches_and_stops_it(tmp_path: Path, source: Path) -> None:
    folder, handle, first = started(tmp_path, source, fake_lab.SLOW)
    child = first._children.pop(handle.identity["pid"])  # as if the launcher were gone
    second = executor(source)
    world = session(tmp_path, second)
    world.stop.requested = True

    assert second.alive(load_handle(folder.handle_path))
    record = attach(folder, world)
    child.wait()
    assert record.exit_code == ExitCode.INTERRUPTED
    assert record.rows[0].metric("loss") is not None


def test_attach_after_the_end_takes_the_outcomes_word(tmp_path: Path, source: Path) -> None:
    folder, handle, first = started(tmp_path, source, fake_lab.FAILS)
    first._children.pop(handle.identity["pid"]).wait()
    record = attach(folder, session(tmp_path, executor(source)))

    assert record.exit_code == ExitCode.RUN_FAILED


def test_attach_after_a_kill_rebuilds_from_the_events(tmp_path: Path, source: Path) -> None:
    folder, handle, first = started(tmp_path, source, fake_lab.SLOW)
    child = first._children.pop(handle.identity["pid"])
    child.kill()
    child.wait()
    record = attach(folder, session(tmp_path, executor(source)))

    assert record.exit_code == ExitCode.KILLED
    assert record.status is Status.UNFINISHED
    assert record.rows[0].metric("loss") is not None


def test_a_reused_pid_is_somebody_else(tmp_path: Path, source: Path) -> None:
    folder = Store(tmp_path / "results").new_run(job(0))
    identity = {"pid": os.getpid(), "start_ticks": 1, "boot": "", "folder": "", "python": ""}
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    handle = Handle(1, "native", "r", {**identity, "boot": boot})
    native = executor(source)

    assert not native.alive(handle)
    native.cancel(handle, timeout_s=1)  # must not kill this very test
    assert native.collect(handle, folder.path).exit_code == ExitCode.KILLED


def test_a_python_that_is_not_there_is_named(tmp_path: Path, source: Path) -> None:
    native = NativeExecutor(source, {}, ensure_python=lambda: tmp_path / "no-python")

    with pytest.raises(ToolchainMissing, match="no-python"):
        run_job(job(0), session(tmp_path, native))
    assert list(Store(tmp_path / "results").all()) == []
