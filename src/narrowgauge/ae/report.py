"""Checks every criterion and tells what was found: to people, to scripts, one by one."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.ae import available, functional, reproduced
from narrowgauge.ae.artifact import Artifact
from narrowgauge.ae.findings import Criterion, Finding, Standing
from narrowgauge.errors import ExitCode, UnknownNameError
from narrowgauge.terminal import plain

__all__ = ["CRITERIA", "FORMAT", "Answer", "examine", "exit_code", "explain", "json_text", "table"]

#: Of the JSON document. 1: format, criteria of id, badge, asks, standing, finding, remedy; counts.
FORMAT = 1

CRITERIA: tuple[Criterion, ...] = (
    *available.CRITERIA,
    *functional.CRITERIA,
    *reproduced.CRITERIA,
)
_WIDTH = 100


@dataclass(frozen=True)
class Answer:
    """One criterion and what was found."""

    criterion: Criterion
    found: Finding


def examine(artifact: Artifact, wanted: Sequence[str] = ()) -> tuple[Answer, ...]:
    """The answers to the criteria `wanted`, or to all, in their order. UnknownNameError."""
    for name in wanted:
        _named(name)
    chosen = [each for each in CRITERIA if not wanted or each.id in wanted]
    return tuple(Answer(each, each.examine(artifact)) for each in chosen)


def exit_code(answers: Sequence[Answer]) -> ExitCode:
    """`partly` is no failure: a reviewer decides on it."""
    lacks = any(answer.found.standing is Standing.MISSING for answer in answers)
    return ExitCode.CRITERION_UNMET if lacks else ExitCode.OK


def explain(name: str) -> str:
    """What a criterion asks, and who asks it. Raises UnknownNameError."""
    found = _named(name)
    parts = [f"{found.id} ({found.badge}): {found.asks}.", found.why]
    return "\n\n".join(textwrap.fill(part, _WIDTH) for part in parts)


def table(answers: Sequence[Answer]) -> str:
    """A line for each criterion, in the chairs' order; below it finding and remedy."""
    lines = []
    for answer in answers:
        lines.append(
            f"{answer.criterion.id}  {answer.found.standing.value:<8}  {answer.criterion.asks}"
        )
        lines += _filled(answer.found.finding, "              ")
        if answer.found.remedy:
            lines += _filled(answer.found.remedy, "           -> ")
    counts = _counts(answers)
    told = ", ".join(f"{count} {word}" for word, count in counts.items() if count)
    lines += ["", f"{told}. More on one: narrowgauge ae check --explain ID"]
    return "\n".join(lines)


def json_text(answers: Sequence[Answer]) -> str:
    """The same for scripts."""
    body = {
        "format": FORMAT,
        "counts": _counts(answers),
        "criteria": [
            {
                "id": answer.criterion.id,
                "badge": answer.criterion.badge,
                "asks": answer.criterion.asks,
                "standing": answer.found.standing.value,
                "finding": answer.found.finding,
                "remedy": answer.found.remedy,
            }
            for answer in answers
        ],
    }
    return json.dumps(body, indent=2)


def _filled(text: str, begin: str) -> list[str]:
    # Findings quote files and records, and problems are several lines.
    words = plain(" ".join(text.split()))
    return textwrap.wrap(
        words, _WIDTH, initial_indent=begin, subsequent_indent=" " * len(begin),
        break_on_hyphens=False,
    )  # fmt: skip


def _counts(answers: Sequence[Answer]) -> dict[str, int]:
    found = [answer.found.standing for answer in answers]
    return {standing.value: found.count(standing) for standing in Standing}


def _named(name: str) -> Criterion:
    found = next((each for each in CRITERIA if each.id == name), None)
    if found is None:
        raise UnknownNameError("criterion", name, [each.id for each in CRITERIA])
    return found
