"""Whose turn it is on a board: what a lease says, and what is said to whoever must wait. Pure."""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from typing import Any

from narrowgauge.errors import Busy
from narrowgauge_contract.job import Job

__all__ = ["DEAD_AFTER_S", "holder_text", "left_note", "taken_error"]

#: A launcher that was not heard for so long is gone: three of its pulses.
DEAD_AFTER_S = 30


def holder_text(job: Job, folder: Path, home: str) -> str:
    """What the lease holds while `job` runs: what a host's own lock would, and whose it is."""
    return json.dumps(
        {
            "run_id": job.run_id,
            "folder": str(folder),
            "pid": os.getpid(),
            "by": f"{_user()}@{socket.gethostname()}",
            "beat": f"{home}/beat",
        }
    )


def taken_error(board: str, word: str, text: str) -> Busy:
    """The error for a board's `busy AGE HOLDER` or `measuring RUN`."""
    if word == "measuring":
        return Busy(
            f"the board {board} is measuring {text}, and nobody holds its lease",
            why="its launcher and its connection are gone; the container goes on",
            next_step=f"--wait starts when it has ended; narrowgauge attach {text} watches it"
            " (where its results folder is)",
        )
    age, _, rest = text.partition(" ")
    holder = _holder(rest)
    run = str(holder.get("run_id") or "another run")
    by = f" for {holder['by']}" if holder.get("by") else ""
    if age == "gone" or (age.isdigit() and int(age) > DEAD_AFTER_S):
        heard = "its connection has ended" if age == "gone" else f"not heard for {age} s"
        return Busy(
            f"the board {board} is measuring {run}{by}, whose launcher is gone",
            why=f"{heard}; the run goes on and keeps the lease until it has ended",
            next_step=f"narrowgauge attach {run} watches and collects it (where its results"
            " folder is); --wait starts when it has ended",
        )
    return Busy(
        f"the board {board} is measuring {run}{by}",
        why="one run at a time on a device, or they measure each other",
        next_step="--wait starts when it has ended",
    )


def left_note(board: str, text: str) -> str:
    """What is said where a lease was found that nobody holds, and nothing of it runs."""
    holder = _holder(text)
    return (
        f"{board}: the lease of {holder.get('run_id', 'a run')} was left by a launcher that is"
        " gone; nothing of it runs any more, so it is taken"
    )


def _holder(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())
