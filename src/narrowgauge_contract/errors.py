"""Every fatal error of Narrowgauge: a class, an exit code, and a next step.

The base class and the exit codes live in the contract because the launcher and the lab share them:
a container's exit status is the lab's exit code, and the launcher turns it back into an error.
"""

from __future__ import annotations

import difflib
import enum
from typing import Iterable, List, Optional

__all__ = [
    "BadValueError",
    "ClaimsError",
    "DamagedRecordError",
    "DataCorruptError",
    "DataUnavailableError",
    "DiskFullError",
    "ExitCode",
    "ExperimentFileError",
    "NarrowgaugeError",
    "NotApplicableError",
    "PlanFileError",
    "SkippedError",
    "UnknownNameError",
    "UsageError",
    "nearest",
]


class ExitCode(enum.IntEnum):
    """What a process of ours may exit with. One number, one meaning, on host and in image."""

    OK = 0
    INTERNAL = 1
    USAGE = 2
    NOT_APPLICABLE = 3
    HOST_UNFIT = 4
    DOCKER_UNAVAILABLE = 10
    DOCKER_PERMISSION = 11
    BASE_UNREACHABLE = 12
    BUILD_FAILED = 13
    TOOLCHAIN_MISSING = 14
    CONTAINER_REFUSED = 15
    DOCKER_TOO_OLD = 16
    UNRESOLVED_PINS = 17
    DATA_UNAVAILABLE = 20
    DATA_CORRUPT = 21
    DISK_FULL = 22
    RESULTS_UNWRITABLE = 23
    RECORD_DAMAGED = 24
    BUSY = 25
    RUN_FAILED = 30
    OUT_OF_MEMORY = 31
    KILLED = 32
    NO_VALID_ROW = 33
    CRITERION_UNMET = 34
    CLUSTER_UNREACHABLE = 40
    CLUSTER_REFUSED = 41
    NODES_APART = 42
    BOARD_UNREACHABLE = 43
    HOST_KEY_REFUSED = 44
    INTERRUPTED = 130


class NarrowgaugeError(Exception):
    """What happened, why, and what to do next.

    `what` is one sentence without a full stop at its end; `why` and `next_step` may span lines.
    """

    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next_step = next_step

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append("why:  " + self.why.replace("\n", "\n      "))
        if self.next_step:
            lines.append("next: " + self.next_step.replace("\n", "\n      "))
        return "\n".join(lines)


class UsageError(NarrowgaugeError):
    """The command line asks for something that is not there or not possible."""

    exit_code = ExitCode.USAGE


class UnknownNameError(UsageError):
    """A name is not known; the message gives the nearest known one and the list, of which the
    nearest where it is longer than a screen."""

    def __init__(self, kind: str, name: str, known: Iterable[str], *, where: str = "") -> None:
        names = sorted(known)
        close = nearest(name, names)
        hint = f"did you mean '{close}'? " if close else ""
        listing = _listing(name, names) if names else "none"
        suffix = f" {where}" if where else ""
        super().__init__(
            f"unknown {kind} '{name}'{suffix}",
            next_step=f"{hint}Known: {listing}",
        )
        self.name = name
        self.nearest = close


class BadValueError(UsageError):
    """A parameter got a value of the wrong type or out of range."""


class ExperimentFileError(NarrowgaugeError):
    """An experiment.toml does not say what it must, or says something unknown."""

    exit_code = ExitCode.USAGE


class PlanFileError(NarrowgaugeError):
    """A placement plan does not say what it must, or says something unknown or impossible."""

    exit_code = ExitCode.USAGE


class ClaimsError(NarrowgaugeError):
    """A claims.toml does not follow its schema."""

    exit_code = ExitCode.USAGE


class NotApplicableError(NarrowgaugeError):
    """The experiment cannot run on this target or host; the message names what can."""

    exit_code = ExitCode.NOT_APPLICABLE


class SkippedError(NotApplicableError):
    """A row's host lacks what the row was to measure, as hosts may: the row is skipped, with the
    reason, and the run is none the worse for it."""


class DamagedRecordError(NarrowgaugeError):
    """A record, job or outcome file is truncated, is not JSON, or breaks its schema."""

    exit_code = ExitCode.RECORD_DAMAGED


class DataUnavailableError(NarrowgaugeError):
    """A data set is not here, or cannot be fetched or read."""

    exit_code = ExitCode.DATA_UNAVAILABLE


class DataCorruptError(NarrowgaugeError):
    """A data file is not what its declaration says."""

    exit_code = ExitCode.DATA_CORRUPT


class DiskFullError(NarrowgaugeError):
    """A file system has no room left."""

    exit_code = ExitCode.DISK_FULL


#: More names are no help on a screen.
_MOST_NAMES = 60
_NEAREST_NAMES = 12


def _listing(name: str, known: List[str]) -> str:
    if len(known) <= _MOST_NAMES:
        return ", ".join(known)
    close = difflib.get_close_matches(name, known, n=_NEAREST_NAMES, cutoff=0.0)
    return f"{', '.join(close)} and {len(known) - len(close)} more"


#: What others call it; by its letters `gpu` is nearest to `cpu`.
_MEANT = {"gpu": "accelerator", "cuda": "accelerator"}


def nearest(name: str, known: Iterable[str]) -> Optional[str]:
    """The known name that means the same or is most like `name`, or None when nothing is close."""
    names = list(known)
    meant = _MEANT.get(name)
    if meant in names:
        return meant
    matches = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return matches[0] if matches else None
