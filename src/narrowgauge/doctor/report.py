"""Runs every check on a Situation and tells what they found: to people, to scripts, one by one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.doctor import checks_engine, checks_host, checks_project, checks_target
from narrowgauge.doctor.findings import Check, Finding, Severity
from narrowgauge.doctor.situation import Situation
from narrowgauge.errors import ExitCode, UnknownNameError

__all__ = ["CHECKS", "FORMAT", "Answer", "examine", "exit_code", "explain", "json_text", "table"]

#: Of the JSON document. 1: format, host, target, checks of id, severity, finding, remedy; counts.
FORMAT = 1

CHECKS: tuple[Check, ...] = (
    *checks_target.CHECKS,
    *checks_engine.CHECKS,
    *checks_project.CHECKS,
    *checks_host.CHECKS,
)
_WIDTH = 96


@dataclass(frozen=True)
class Answer:
    """One check and what it found."""

    check: Check
    found: Finding


def examine(situation: Situation) -> tuple[Answer, ...]:
    """Every check's answer, in the order of CHECKS."""
    return tuple(Answer(check, check.examine(situation)) for check in CHECKS)


def exit_code(answers: Sequence[Answer]) -> ExitCode:
    failed = any(answer.found.severity is Severity.ERROR for answer in answers)
    return ExitCode.HOST_UNFIT if failed else ExitCode.OK


def table(situation: Situation, answers: Sequence[Answer]) -> str:
    """One line a check, problems first; below each, its remedy."""
    lines = [f"host:   {situation.host.describe()}", f"target: {_target(situation)}", ""]
    wide = max(len(check.id) for check in CHECKS)
    for severity in Severity:
        for answer in answers:
            if answer.found.severity is severity:
                lines += _lines(answer, wide)
    counts = _counts(answers)
    told = [f"{counts[s.value]} {s.value}{'s' * (counts[s.value] != 1)}" for s in _TOLD]
    lines += ["", f"{', '.join(told)}. More on one: narrowgauge doctor --explain ID"]
    return "\n".join(lines)


def json_text(situation: Situation, answers: Sequence[Answer]) -> str:
    """The same for scripts."""
    body = {
        "format": FORMAT,
        "host": situation.host.describe(),
        "target": _target(situation) if situation.refused is None else None,
        "counts": _counts(answers),
        "checks": [
            {
                "id": answer.check.id,
                "severity": answer.found.severity.value,
                "finding": answer.found.finding,
                "remedy": answer.found.remedy,
            }
            for answer in answers
        ],
    }
    return json.dumps(body, indent=2)


def explain(name: str) -> str:
    """What a check asks, why that matters, how to mend it. Raises UnknownNameError."""
    found = next((check for check in CHECKS if check.id == name), None)
    if found is None:
        raise UnknownNameError("check", name, [check.id for check in CHECKS])
    parts = [f"{found.id}: {found.asks}.", found.why, f"To mend it: {found.mend}"]
    return "\n\n".join(textwrap.fill(part, _WIDTH, break_on_hyphens=False) for part in parts)


_TOLD = (Severity.ERROR, Severity.WARNING, Severity.NOTE)


def _target(situation: Situation) -> str:
    if situation.target is None:
        return "none fits"
    suffix = " (does not fit)" if situation.refused is not None else ""
    return f"{situation.target.name}{suffix}"


def _counts(answers: Sequence[Answer]) -> dict[str, int]:
    found = [answer.found.severity for answer in answers]
    return {severity.value: found.count(severity) for severity in Severity}


def _lines(answer: Answer, wide: int) -> list[str]:
    found = answer.found
    start = f"{found.severity.value:<8} {answer.check.id:<{wide}}  "
    blank = " " * len(start)
    lines = [f"{blank}{line}" for line in found.finding.splitlines()]
    lines[0] = start + lines[0].strip()
    lines += [f"{blank[:-3]}-> {line}" for line in found.remedy.splitlines()]
    return lines
