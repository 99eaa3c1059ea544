"""Short lines for whoever watches. The events are the record; these may be lost."""

from __future__ import annotations

import sys
from typing import TextIO

from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.outcome import ErrorInfo

__all__ = ["complain", "flush", "row_ended", "say"]


def say(text: str) -> None:
    """A line to standard output."""
    _write(sys.stdout, text)


def complain(text: str) -> None:
    """A line to standard error."""
    _write(sys.stderr, text)


def row_ended(index: int, what: str, error: ErrorInfo) -> str:
    """How a row ended that did not end well: what happened, why, and what to do next."""
    said = NarrowgaugeError(f"row {index}: {what}", why=error.why, next_step=error.next_step)
    return str(said).replace("\n", "\n  ")


def flush() -> None:
    """Send what is buffered, so that a fork does not send it twice."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            continue


def _write(stream: TextIO, text: str) -> None:
    """A log on a full disk, or a reader that went away, must not end the run."""
    try:
        stream.write(text + "\n")
        stream.flush()
    except (OSError, ValueError):
        return
