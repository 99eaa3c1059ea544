"""From a run's folder to its record: composed once, by whoever started or attached to the run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from narrowgauge.errors import NarrowgaugeError, NoValidRow, ended_badly
from narrowgauge.executors.base import Ending, Handle
from narrowgauge.store import RunFolder
from narrowgauge_contract.codec import decode, read_json
from narrowgauge_contract.errors import DamagedRecordError, ExitCode
from narrowgauge_contract.events import EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import ErrorInfo, Outcome, Status
from narrowgauge_contract.record import (
    GitFacts,
    HostFacts,
    MachineFacts,
    Record,
    SchedulerFacts,
    compose,
)

__all__ = [
    "SCHEDULER_FILE",
    "StartFacts",
    "compose_record",
    "interrupted",
    "load_start_facts",
    "problem_of",
    "record_run",
]

#: Where a cluster's node writes what its scheduler gave the run.
SCHEDULER_FILE = "scheduler.json"


@dataclass(frozen=True)
class StartFacts:
    """What host.json keeps from the moment a run was started."""

    machine: MachineFacts
    git: GitFacts | None


def load_start_facts(folder: RunFolder) -> StartFacts | None:
    """What the launcher saw at the start; None where it was killed before it wrote that down."""
    try:
        return decode(StartFacts, read_json(folder.host_path), str(folder.host_path))
    except (OSError, DamagedRecordError):
        return None


def interrupted(ending: Ending) -> Ending:
    """The ending of a run that this launcher cancelled, unless the lab had already ended well."""
    if ending.exit_code in (ExitCode.OK, ExitCode.INTERRUPTED):
        return ending
    error = ErrorInfo("interrupted", "the run was interrupted and killed", ending_why(ending))
    return Ending(int(ExitCode.INTERRUPTED), Status.INTERRUPTED, ending.log_tail, error)


def ending_why(ending: Ending) -> str:
    return ending.error.what if ending.error else ""


def record_run(folder: RunFolder, handle: Handle, ending: Ending, start: StartFacts) -> Record:
    """Compose the record and write it. Raises UsageError where there is one, DiskFull,
    ResultsUnwritable; the events stay where they are, and `attach` can try again."""
    record = compose_record(folder, handle, ending, start)
    try:
        folder.write_record(record)
    except NarrowgaugeError as error:
        if error.exit_code in (ExitCode.DISK_FULL, ExitCode.RESULTS_UNWRITABLE):
            error.next_step = (
                f"nothing is lost: the events are in {folder.out}; when that is mended,"
                f" `narrowgauge attach {folder.name}` writes the record"
            )
        raise
    return record


def compose_record(folder: RunFolder, handle: Handle, ending: Ending, start: StartFacts) -> Record:
    """The record of a run that is over. Pure but for reading the run's folder."""
    job = folder.job()
    outcome, exceptions = _outcome(folder, job)
    facts = HostFacts(
        executor=handle.executor,
        machine=start.machine,
        exit_code=ending.exit_code,
        status=ending.status,
        image=handle.image,
        git=start.git,
        cache_cold=handle.cache_cold,
        exceptions=(*handle.exceptions, *ending.exceptions, *exceptions),
        log_tail=ending.log_tail,
        error=ending.error,
        scheduler=_scheduler(folder),
        board=handle.board,
    )
    tail = EventTail(folder.events_path)
    record = compose(job, outcome, tail.poll(), facts)
    if outcome is None:
        # Only after `compose` has read them is it known how many lines were no events.
        damaged = tail.damaged + (1 if tail.unfinished else 0)
        record = dataclasses.replace(record, events_damaged=damaged)
        record = _without_outcome(record, ending)
    return record


def problem_of(record: Record, folder: RunFolder) -> NarrowgaugeError | None:
    """The error a launcher ends with for this record; None for a run that went well."""
    if record.exit_code == ExitCode.OK:
        if record.rows and not record.valid_rows():
            reasons = dict.fromkeys(r for row in record.rows for r in row.validity.reasons)
            return NoValidRow(
                f"no row of {record.run_id} is valid",
                why="\n".join(reasons),
                next_step=_show(folder),
            )
        return None
    error = record.error or next((row.error for row in record.rows if row.error), None)
    error = error or (record.host.error if record.host else None)
    return ended_badly(
        record.exit_code,
        error.what if error else f"the run {record.run_id} {record.status.value}",
        why=error.why if error else "",
        next_step="\n".join(filter(None, [error.next_step if error else "", _show(folder)])),
    )


def _outcome(folder: RunFolder, job: Job) -> tuple[Outcome | None, tuple[str, ...]]:
    """The lab's outcome, unless it is damaged or of another run: the events say the same."""
    try:
        outcome = folder.outcome()
    except DamagedRecordError as error:
        return None, (f"outcome.json was damaged, so the rows come from the events: {error.what}",)
    if outcome is not None and outcome.run_id != job.run_id:
        return None, (f"outcome.json belonged to {outcome.run_id}; the rows come from the events",)
    return outcome, ()


def _without_outcome(record: Record, ending: Ending) -> Record:
    """A lab that exits well leaves an outcome; a missing one is a failure, never a success."""
    if ending.exit_code != ExitCode.OK:
        return record
    error = ErrorInfo(
        "run-failed",
        "the lab ended without an outcome",
        "exit status 0, and no readable outcome.json",
    )
    return dataclasses.replace(
        record, status=Status.FAILED, exit_code=int(ExitCode.RUN_FAILED), error=error
    )


def _scheduler(folder: RunFolder) -> SchedulerFacts | None:
    """What the cluster's node wrote down; None for a run that no scheduler started."""
    path = folder.path / SCHEDULER_FILE
    try:
        return decode(SchedulerFacts, read_json(path), str(path))
    except (OSError, DamagedRecordError):
        return None


def _show(folder: RunFolder) -> str:
    return f"narrowgauge show {folder.name} has all that is known of it"
