"""Why a process of a row ended without saying so itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Optional

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab.errors import OutOfMemoryError, RowCrashedError, disk_full

__all__ = ["why_silent"]


def why_silent(
    status: int, before: Optional[int], now: Optional[int], out: Path, who: str = "the row"
) -> NarrowgaugeError:
    """Why the process of `who` ended without recording its end. `status` is what `waitpid` gave;
    `before` and `now`: `oom_kills` when it began and after it ended."""
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == ExitCode.DISK_FULL:
        return disk_full(out)
    if os.WIFEXITED(status):
        return RowCrashedError(
            f"{who}'s process ended without a word",
            why=f"something in it called exit({os.WEXITSTATUS(status)}) behind Python's back",
        )
    number = os.WTERMSIG(status)
    name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
    if number == signal.SIGKILL:
        return _killed(before, now, who)
    return RowCrashedError(
        f"{who} crashed with {name}",
        why="native code (torch, a kernel, a driver) crashed",
        next_step="the trace in the record has the Python line that called it",
    )


def _killed(before: Optional[int], now: Optional[int], who: str) -> NarrowgaugeError:
    known = now is not None and before is not None
    if known and now == before:
        return RowCrashedError(
            f"{who} was killed by SIGKILL",
            why="not for memory, by the kernel's own count: somebody killed it",
            next_step="run it again; --resume keeps the rows that are complete",
        )
    return OutOfMemoryError(
        f"{who} ran out of memory" if known else f"{who} was killed by SIGKILL",
        why="the kernel's out-of-memory killer ended it"
        if known
        else "usually that is the kernel's out-of-memory killer; its count cannot be read here",
        next_step="use less memory: a smaller batch or a smaller model; or give it more",
    )
