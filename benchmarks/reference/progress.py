"""How far the jobs are that run, and how long they take at this pace: from their events."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jobs import DROPPED, RUNNING
from packing import EVENTS

__all__ = ["running", "runs", "share_done"]

#: The pace is that of the last so many seconds: what shares a GPU comes and goes.
RECENT_S = 120.0


def running(out: Path) -> list[str]:
    """A line for each job of `out` that runs."""
    folders = sorted(path.parent for path in out.glob(f"*/{RUNNING}"))
    return [f"{each.name:40} {_said(each)}" for each in folders if runs(each)]


def runs(folder: Path) -> bool:
    """Whether a job runs, and has not been told to end."""
    return (folder / RUNNING).is_file() and not (folder / DROPPED).is_file()


def share_done(folder: Path) -> float:
    """How much of what a run was last at is done, from 0 to 1; 0 where nothing says."""
    steps = _steps(folder)
    done, total = (steps[-1]["data"][name] for name in ("done", "total")) if steps else (0, 0)
    return min(1.0, done / total) if total else 0.0


def _steps(folder: Path) -> list[dict[str, Any]]:
    return [each for each in _events(folder / EVENTS) if each.get("kind") == "progress"]


def _said(folder: Path) -> str:
    steps = _steps(folder)
    if not steps:
        return "no progress yet"
    last = first = steps[-1]
    for each in reversed(steps):
        # Where the next row or stage begins, what is done begins at 0 again.
        apart = each["row"] != last["row"] or each["data"]["done"] > first["data"]["done"]
        if apart or last["t"] - each["t"] > RECENT_S:
            break
        first = each
    done, total = last["data"]["done"], last["data"]["total"]
    said = f"row {last['row']}, {last['data']['phase'] or last['data']['unit']}"
    if total:
        said += f", {done / total:.0%}"
    gained, spent = done - first["data"]["done"], last["t"] - first["t"]
    if gained > 0 and spent > 0 and total > done:
        said += f"; at this pace {(total - done) * spent / gained:.0f} s more"
    return said


def _events(path: Path) -> list[dict[str, Any]]:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        try:
            found.append(json.loads(line))
        except ValueError:  # the last one may be half written
            continue
    return found
