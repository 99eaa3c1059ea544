"""What a criterion is and what a check of it finds."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowgauge.ae.artifact import Artifact

__all__ = ["Criterion", "Finding", "Standing", "listed", "met", "missing", "partly", "to_judge"]

_SHOWN = 6


class Standing(str, enum.Enum):
    """`missing`: a chair would ask for it. `partly`: it is there, and something of it is not.
    `to-judge`: nothing a program can tell; a person has to look."""

    MISSING = "missing"
    PARTLY = "partly"
    TO_JUDGE = "to-judge"
    MET = "met"


@dataclass(frozen=True)
class Finding:
    """One check's answer. `remedy`: what to do; only `missing` and `partly` must have one."""

    standing: Standing
    finding: str
    remedy: str = ""


@dataclass(frozen=True)
class Criterion:
    """One thing that artifact evaluation asks for. `badge`: what it is asked for; `asks`: what;
    `why`: who asks, in which words."""

    id: str
    badge: str
    asks: str
    why: str
    examine: Callable[[Artifact], Finding]


def met(finding: str) -> Finding:
    return Finding(Standing.MET, finding)


def partly(finding: str, remedy: str) -> Finding:
    return Finding(Standing.PARTLY, finding, remedy)


def missing(finding: str, remedy: str) -> Finding:
    return Finding(Standing.MISSING, finding, remedy)


def to_judge(finding: str, remedy: str = "") -> Finding:
    return Finding(Standing.TO_JUDGE, finding, remedy)


def listed(names: Sequence[str]) -> str:
    """The first few of them, and how many more."""
    shown = ", ".join(names[:_SHOWN])
    more = len(names) - _SHOWN
    return f"{shown} and {more} more" if more > 0 else shown
