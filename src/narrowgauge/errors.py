"""The host's own errors: each has an exit code and tells the user what to do next.

`narrowgauge.cli.app.main` is the one place that turns them into exit codes.
"""

# ruff: noqa: N818 - these are named for what happened; all are a NarrowgaugeError

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from narrowgauge_contract.errors import (
    BadValueError,
    DamagedRecordError,
    ExitCode,
    NarrowgaugeError,
    NotApplicableError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_contract.errors import DataCorruptError as DataCorrupt
from narrowgauge_contract.errors import DataUnavailableError as DataUnavailable
from narrowgauge_contract.errors import DiskFullError as DiskFull

__all__ = [
    "BadValueError",
    "BaseUnreachable",
    "BuildFailed",
    "BundleDamaged",
    "Busy",
    "ClusterRefused",
    "ClusterUnreachable",
    "ContainerRefused",
    "DamagedRecordError",
    "DataCorrupt",
    "DataUnavailable",
    "DiskFull",
    "DockerPermission",
    "DockerTooOld",
    "DockerUnavailable",
    "ExitCode",
    "Interrupted",
    "Killed",
    "NarrowgaugeError",
    "NoCheckout",
    "NoValidRow",
    "NotApplicableError",
    "OutOfMemory",
    "ResultsUnwritable",
    "RunFailed",
    "StaleGenerated",
    "TargetsFileError",
    "ToolchainMissing",
    "UnknownNameError",
    "UnknownRun",
    "UnresolvedPins",
    "UsageError",
    "disk_full",
    "ended_badly",
    "results_unwritable",
]


class NoCheckout(UsageError):
    """No folder with docker/targets.toml and experiments/ was found."""


class TargetsFileError(UsageError):
    """docker/targets.toml does not say what it must, or says something unknown."""


class StaleGenerated(NarrowgaugeError):
    """A generated file is not what its generator gives now."""

    exit_code = ExitCode.BUILD_FAILED


class DockerUnavailable(NarrowgaugeError):
    """No Docker engine answers."""

    exit_code = ExitCode.DOCKER_UNAVAILABLE


class DockerPermission(NarrowgaugeError):
    """There is an engine, and this user may not talk to it."""

    exit_code = ExitCode.DOCKER_PERMISSION


class DockerTooOld(DockerUnavailable):
    """There is an engine, and it is older than what we use of it."""

    exit_code = ExitCode.DOCKER_TOO_OLD


class BaseUnreachable(NarrowgaugeError):
    """The base image is not here and its registry does not answer."""

    exit_code = ExitCode.BASE_UNREACHABLE


class BuildFailed(NarrowgaugeError):
    """An image or the native environment could not be built."""

    exit_code = ExitCode.BUILD_FAILED


class BundleDamaged(NarrowgaugeError):
    """A bundle is not what was sealed, or holds what no bundle holds."""

    exit_code = ExitCode.DATA_CORRUPT


class UnresolvedPins(NarrowgaugeError):
    """`--frozen` was asked for, and a pin of this target is unresolved."""

    exit_code = ExitCode.UNRESOLVED_PINS


class ToolchainMissing(NarrowgaugeError):
    """A compiler, python3-venv or another tool of the host is missing."""

    exit_code = ExitCode.TOOLCHAIN_MISSING


class ContainerRefused(NarrowgaugeError):
    """The engine answers but would not create or start this container."""

    exit_code = ExitCode.CONTAINER_REFUSED


class ResultsUnwritable(NarrowgaugeError):
    """The results folder cannot be written."""

    exit_code = ExitCode.RESULTS_UNWRITABLE


class Busy(NarrowgaugeError):
    """Another measuring run holds this host."""

    exit_code = ExitCode.BUSY


class RunFailed(NarrowgaugeError):
    """The run ended, and at least one row or the lab itself failed."""

    exit_code = ExitCode.RUN_FAILED


class OutOfMemory(NarrowgaugeError):
    """The run was killed for memory."""

    exit_code = ExitCode.OUT_OF_MEMORY


class Killed(NarrowgaugeError):
    """The run ended without a word: killed from outside, or its container was removed."""

    exit_code = ExitCode.KILLED


class ClusterUnreachable(NarrowgaugeError):
    """The scheduler's controller, or its commands, do not answer."""

    exit_code = ExitCode.CLUSTER_UNREACHABLE


class ClusterRefused(NarrowgaugeError):
    """The scheduler answers, and will not take this job or cannot run it."""

    exit_code = ExitCode.CLUSTER_REFUSED


class NoValidRow(NarrowgaugeError):
    """The run is complete, but no row may be used."""

    exit_code = ExitCode.NO_VALID_ROW


class Interrupted(NarrowgaugeError):
    """Ctrl-C or SIGTERM."""

    exit_code = ExitCode.INTERRUPTED


#: A folder of results holds hundreds of runs.
_MOST_RUNS = 5


class UnknownRun(UnknownNameError):
    """A name is no run's, or that of several: `known`, of which the newest are named, one a line.
    They come newest first; `of`: how many runs there are."""

    def __init__(self, run: str, known: Sequence[str], *, of: int, where: str) -> None:
        super().__init__("run", run, known, where=where)
        if not known:
            return
        hint = f"did you mean '{self.nearest}'? " if self.nearest else ""
        lines = ["Known:", *known[:_MOST_RUNS]]
        if len(known) > _MOST_RUNS:
            lines[0] = f"Known, the newest {_MOST_RUNS} of {len(known)}:"
            lines.append(f"narrowgauge results --limit {of} lists all")
        self.next_step = hint + "\n".join(lines)


#: What a run that did not go well is raised as, by the exit code its record holds.
_BY_CODE: dict[int, type[NarrowgaugeError]] = {
    int(kind.exit_code): kind
    for kind in (
        UsageError,
        NotApplicableError,
        ToolchainMissing,
        DataUnavailable,
        DataCorrupt,
        DiskFull,
        RunFailed,
        OutOfMemory,
        Killed,
        NoValidRow,
        Interrupted,
    )
}


def ended_badly(
    exit_code: int, what: str, *, why: str = "", next_step: str = ""
) -> NarrowgaugeError:
    """The error of the lab's exit code, which it ends with; RunFailed for one that is not ours."""
    error = _BY_CODE.get(exit_code, RunFailed)(what, why=why, next_step=next_step)
    if exit_code != ExitCode.OK and exit_code in set(ExitCode):
        # Codes that no class above is for too: what the record says is what a script is told.
        error.exit_code = ExitCode(exit_code)
    return error


def disk_full(place: Path, what: str, *, next_step: str = "") -> DiskFull:
    """The error for ENOSPC (or EDQUOT) while `what` was written at `place`."""
    return DiskFull(
        f"no room left to write {what}",
        why=f"the file system of {place} is full, or a quota is reached",
        next_step=next_step or "free some space, or choose another place: --results DIR",
    )


def results_unwritable(place: Path, reason: str) -> ResultsUnwritable:
    """The error for a results folder that cannot be made or written."""
    return ResultsUnwritable(
        f"cannot write the results folder {place}",
        why=reason,
        next_step="make it writable for your user, or choose another: --results DIR",
    )
