"""What a check is and what it finds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass

from narrowgauge.doctor.situation import Situation

__all__ = ["Check", "Finding", "Severity", "error", "note", "ok", "skipped", "warning"]


class Severity(str, enum.Enum):
    """`error`: a run here fails. `warning`: it works, and something is wrong with it or its
    numbers. `note`: worth knowing. `skipped`: does not concern this host, or could not be told."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    OK = "ok"
    SKIPPED = "skipped"


@dataclass(frozen=True)
class Finding:
    """One check's answer. `remedy` says what to do; only an error or a warning must have one."""

    severity: Severity
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class Check:
    """One question about the host. `why` is why it matters for a run or its numbers; `mend` how to
    put it right."""

    id: str
    asks: str
    why: str
    mend: str
    examine: Callable[[Situation], Finding]


def ok(finding: str) -> Finding:
    return Finding(Severity.OK, finding)


def note(finding: str, remedy: str = "") -> Finding:
    return Finding(Severity.NOTE, finding, remedy)


def warning(finding: str, remedy: str) -> Finding:
    return Finding(Severity.WARNING, finding, remedy)


def error(finding: str, remedy: str) -> Finding:
    return Finding(Severity.ERROR, finding, remedy)


def skipped(reason: str) -> Finding:
    return Finding(Severity.SKIPPED, reason)
