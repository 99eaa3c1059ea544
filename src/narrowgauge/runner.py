"""Runs a Job on an executor, and takes over a run whose launcher is gone. No Docker in here."""

from __future__ import annotations

import functools
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Protocol, TypeAlias

from narrowgauge.errors import (
    Busy,
    NarrowgaugeError,
    UsageError,
    disk_full,
    ended_badly,
    results_unwritable,
)
from narrowgauge.executors.base import (
    ENDING_FILE,
    STOP_TIMEOUT_S,
    Executor,
    Handle,
    load_ending,
    load_handle,
    save,
)
from narrowgauge.plan import Places
from narrowgauge.progress import Reporter
from narrowgauge.recording import StartFacts, interrupted, load_start_facts, record_run
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import Record

__all__ = [
    "ArrayExecutor",
    "Session",
    "StopRequest",
    "assist_job",
    "attach",
    "check_results",
    "check_results_early",
    "run_array",
    "run_job",
    "stop_signals",
]

#: What a run needs at least for its events and its record; less is a full disk already.
_LEAST_FREE_BYTES = 64 << 20


class StopRequest:
    """Whether somebody asked to stop: a flag, since an exception could strike anywhere."""

    def __init__(self) -> None:
        self.requested = False


@dataclass(frozen=True)
class Session:
    """Everything a run needs of the world. `start_facts` gets the engine's version; `elsewhere`:
    the run is on another machine, which writes them itself, and these are for where it could not.
    """

    executor: Executor
    store: Store
    experiments: Path
    data: Path
    start_facts: Callable[[str | None], StartFacts]
    reporter: Reporter
    stop: StopRequest
    elsewhere: bool = False


#: Called with `timeout_s=0` where a run is to be killed at once.
_Cancel: TypeAlias = Callable[..., None]


class ArrayExecutor(Executor, Protocol):
    """An executor that starts and cancels several jobs by one request."""

    def start_all(self, runs: Sequence[tuple[Job, Places]]) -> list[Handle]:
        """Start jobs; all or none."""

    def cancel_all(self, handles: Sequence[Handle], timeout_s: int = STOP_TIMEOUT_S) -> None:
        """Cancel them, as `cancel` does one."""


def check_results(root: Path) -> None:
    """Prove, before anything is started, that results can be written; or ResultsUnwritable,
    DiskFull."""
    probe = root / ".narrowgauge-probe"
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"")
        probe.unlink(missing_ok=True)  # another launcher may probe here too
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise results_unwritable(root, error.strerror or str(error)) from error
    if free < _LEAST_FREE_BYTES:
        raise disk_full(
            root, f"a run: {free >> 20} MiB are left of {_LEAST_FREE_BYTES >> 20} needed"
        )


def check_results_early(root: Path) -> None:
    """Refuse a folder that cannot be written before anything is downloaded or built for it.

    Makes nothing, so that a mistyped command leaves no folder behind. ResultsUnwritable.
    """
    existing = next(folder for folder in (root, *root.parents) if folder.exists())
    if not existing.is_dir():
        raise results_unwritable(root, f"{existing} is not a folder")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise results_unwritable(root, f"{existing} may not be written to")


@contextmanager
def stop_signals(stop: StopRequest) -> Iterator[None]:
    """Ctrl-C and SIGTERM set the flag; a second one kills the run at once.

    The handlers are set even where the signal came ignored (`&` in a script): then it is sent on
    purpose.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        del number, frame
        if stop.requested:
            raise KeyboardInterrupt
        stop.requested = True

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run_job(job: Job, session: Session) -> tuple[RunFolder, Record]:
    """Start one job, watch it to its end, record it. Nothing is left where it never started."""
    folder = session.store.new_run(job)
    data = session.data if job.data_sets else None
    places = Places(folder.path.resolve(), session.experiments, data)
    try:
        handle = session.executor.start(job, places)
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)  # nothing ran, so nothing is lost
        raise
    return folder, _watch(folder, job, handle, session)


def assist_job(job: Job, session: Session) -> None:
    """Do this machine's part of a job that another machine records. Its folder stays only where
    that failed. Raises the error of the lab's exit code, and what starting raises."""
    folder = session.store.new_run(job)
    data = session.data if job.data_sets else None
    try:
        handle = session.executor.start(
            job, Places(folder.path.resolve(), session.experiments, data)
        )
    except BaseException:
        shutil.rmtree(folder.path, ignore_errors=True)
        raise
    cancel = functools.partial(session.executor.cancel, handle)
    try:
        session.reporter.begin(job)
        _follow(folder, handle, session, cancel)
    except KeyboardInterrupt:
        cancel(timeout_s=0)
    finally:
        session.reporter.end()
    ending = session.executor.collect(handle, folder.path)
    if ending.exit_code != ExitCode.OK:
        what = ending.error.what if ending.error else "this machine's part of the run failed"
        raise ended_badly(
            ending.exit_code,
            what,
            why=ending.log_tail[-2000:].strip(),
            next_step=f"its log is in {folder.path}",
        )
    shutil.rmtree(folder.path, ignore_errors=True)
    session.reporter.note("this machine's part is done; node 0 records the run")


def run_array(
    jobs: Sequence[Job], executor: ArrayExecutor, session: Session
) -> Iterator[tuple[RunFolder, Record]]:
    """Start jobs at once, and watch and record one after the other, in their order.

    Where a stop is asked for, all that are left are cancelled, and recorded as they ended; those
    behind first, or the end of one would let the next begin. Where one has waited too long for room
    (Busy), so are they, for `attach` to record.
    """
    folders = [session.store.new_run(job) for job in jobs]
    places = [
        Places(each.path.resolve(), session.experiments, session.data if job.data_sets else None)
        for each, job in zip(folders, jobs, strict=True)
    ]
    try:
        handles = executor.start_all(list(zip(jobs, places, strict=True)))
    except BaseException:
        for folder in folders:
            shutil.rmtree(folder.path, ignore_errors=True)
        raise
    for index, (folder, job, handle) in enumerate(zip(folders, jobs, handles, strict=True)):
        cancel = functools.partial(executor.cancel_all, handles[index:][::-1])
        try:
            record = _watch(folder, job, handle, session, cancel)
        except Busy:
            session.reporter.note(f"{len(handles) - index - 1} runs behind it are cancelled too")
            executor.cancel_all(handles[index + 1 :])
            raise
        yield folder, record


def attach(folder: RunFolder, session: Session) -> Record:
    """Watch, collect and record a run that another launcher started.

    Raises UsageError where it is recorded already, or where nothing says how it was started.
    """
    if folder.recorded:
        raise UsageError(
            f"the run {folder.name} is already recorded",
            next_step=f"narrowgauge show {folder.name}",
        )
    if not folder.handle_path.is_file():
        if folder.events_path.is_file():
            # The lab wrote here without a launcher: what it measured must not be called nothing.
            raise UsageError(
                f"nothing says how the run {folder.name} was started",
                why=f"it has events, but no {folder.handle_path.name}",
                next_step=f"narrowgauge show {folder.name} has what was measured; where the lab was"
                f" started without the launcher, its --resume --out {folder.out} goes on, and\n"
                f"{folder.how_to_record} records it as it is",
            )
        raise UsageError(
            f"the run {folder.name} was never started",
            why=f"it has no {folder.handle_path.name}",
            next_step=f"remove its folder: {folder.path}",
        )
    job, handle = folder.job(), load_handle(folder.handle_path)
    ending = load_ending(folder.path / ENDING_FILE)
    if ending is not None:
        # Collected before; its launcher was killed, or had no room, before the record was written.
        start = load_start_facts(folder) or session.start_facts(handle.engine)
        session.executor.discard(handle)
        return record_run(folder, handle, ending, start)
    return _watch(folder, job, handle, session)


def _watch(
    folder: RunFolder, job: Job, handle: Handle, session: Session, cancel: _Cancel | None = None
) -> Record:
    """From a running job to its record. `cancel`: what a stop does, where that is more than to
    cancel this run."""
    start: StartFacts | None = None
    cancel = cancel or functools.partial(session.executor.cancel, handle)
    try:
        if not session.elsewhere:
            start = _start_facts(folder, handle, session)
        session.reporter.begin(job)
        _follow(folder, handle, session, cancel)
    except KeyboardInterrupt:
        session.reporter.note("killing the run")
        cancel(timeout_s=0)
    except NarrowgaugeError:
        raise
    except Exception:
        session.reporter.note(
            f"the run goes on without this launcher: narrowgauge attach {folder.name}"
        )
        raise
    finally:
        session.reporter.end()
    ending = session.executor.collect(handle, folder.path)
    if session.stop.requested:
        ending = interrupted(ending)
        save(folder.path / ENDING_FILE, ending)
    return record_run(folder, handle, ending, start or _start_facts(folder, handle, session))


def _follow(folder: RunFolder, handle: Handle, session: Session, cancel: _Cancel) -> None:
    stopping = False
    for event in session.executor.stream(handle, folder.out):
        if event is not None:
            session.reporter.event(event)
            continue
        session.reporter.tick()
        if session.stop.requested and not stopping:
            stopping = True
            session.reporter.note("stopping; once more kills at once")
            cancel()


def _start_facts(folder: RunFolder, handle: Handle, session: Session) -> StartFacts:
    """Gathered while the run is already running, and kept for an `attach` where there is room."""
    known = load_start_facts(folder)
    if known is not None:
        return known
    facts = session.start_facts(handle.engine)
    try:
        save(folder.host_path, facts)
    except NarrowgaugeError as error:
        session.reporter.note(f"host.json is not kept: {error.what}")
    return facts
