"""What every executor does, and the values that pass between it and the launcher.

A handle and an ending are files in the run's folder, so that another launcher can take over where
one was killed.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from narrowgauge.errors import DamagedRecordError, disk_full, results_unwritable
from narrowgauge.plan import Places
from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.events import Event
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import ErrorInfo, Status
from narrowgauge_contract.record import BoardFacts, ImageFacts

__all__ = [
    "ENDING_FILE",
    "HANDLE_FORMAT",
    "LOG_LINES",
    "POLL_S",
    "STOP_TIMEOUT_S",
    "Ending",
    "Executor",
    "ExecutorFacts",
    "Handle",
    "load_ending",
    "load_handle",
    "save",
]

#: 1: first.
HANDLE_FORMAT = 1
ENDING_FILE = "ending.json"
#: How many lines of the lab's output a record keeps.
LOG_LINES = 200
#: How often a stream looks for new events. Ten times a second costs 0.1 % of a core.
POLL_S = 0.1
#: How long the lab has, after SIGTERM, to stop its row and to write its outcome.
STOP_TIMEOUT_S = 30


@dataclass(frozen=True)
class ExecutorFacts:
    """What `probe` found. `version` is the engine's or the interpreter's."""

    name: str
    version: str
    runtimes: tuple[str, ...] = ()
    cdi: bool = False


@dataclass(frozen=True)
class Handle:
    """How to find a started run again, from any process on this host.

    `identity` is the executor's own: a container id, or a process with its start time.
    """

    format: int
    executor: str
    run_id: str
    identity: dict[str, Any]
    image: ImageFacts | None = None
    engine: str | None = None
    cache_cold: bool | None = None
    exceptions: tuple[str, ...] = ()
    board: BoardFacts | None = None


@dataclass(frozen=True)
class Ending:
    """How a run ended, as its executor saw it. `exit_code` is one of ours, already translated.
    `exceptions`: what the record must say of how it was collected."""

    exit_code: int
    status: Status
    log_tail: str
    error: ErrorInfo | None = None
    exceptions: tuple[str, ...] = ()


class Executor(Protocol):
    """Starts Jobs and finds them again. Every method may raise a NarrowgaugeError."""

    name: str

    def probe(self) -> ExecutorFacts:
        """Whether this executor can work here at all."""

    def prepare(self) -> None:
        """Make what every job needs (an image, an environment), once."""

    def start(self, job: Job, places: Places) -> Handle:
        """Start a job; returns when it runs. What was half made is removed when this fails."""

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        """The events, in order; None when nothing is new. Ends when the run has ended."""

    def alive(self, handle: Handle) -> bool:
        """Whether the run is still going."""

    def cancel(self, handle: Handle, timeout_s: int = STOP_TIMEOUT_S) -> None:
        """Ask the lab to stop, and kill it after `timeout_s`. Returns when it is gone."""

    def collect(self, handle: Handle, dest: Path) -> Ending:
        """The ending of a run that is over, kept in `dest`; then `discard`."""

    def discard(self, handle: Handle) -> None:
        """Remove what ran it, if it is still there."""

    def running(self) -> tuple[str, ...]:
        """The ids of the runs that the engine knows to be going, whoever started them."""


def load_handle(path: Path) -> Handle:
    """Read handle.json. Raises DamagedRecordError."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("format") != HANDLE_FORMAT:
        raise DamagedRecordError(f"{path} has handle format {data.get('format')!r}")
    return decode(Handle, data, str(path))


def load_ending(path: Path) -> Ending | None:
    """Read ending.json; None where there is none, or a damaged one: it can be asked for again."""
    if not path.exists():
        return None
    try:
        return decode(Ending, read_json(path), str(path))
    except DamagedRecordError:
        return None


def save(path: Path, value: Any) -> None:
    """Write one document of a run's folder. Raises DiskFull or ResultsUnwritable."""
    try:
        write_json_atomic(path, value)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(
                path.parent,
                path.name,
                next_step="free some space; if the run has started: narrowgauge attach RUN",
            ) from error
        raise results_unwritable(path.parent, error.strerror or str(error)) from error
