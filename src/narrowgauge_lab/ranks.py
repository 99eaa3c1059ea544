"""Processes that do one thing together: forked, watched, and ended together.

Whoever starts them takes no part: it waits. A process that waits inside a library for one that died
cannot say anything, nor end; this one can do both, as torchrun's agent can.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, SkippedError
from narrowgauge_contract.outcome import ErrorInfo
from narrowgauge_lab.console import flush
from narrowgauge_lab.endings import why_silent
from narrowgauge_lab.errors import describe
from narrowgauge_lab.forking import die_with, fork
from narrowgauge_lab.oom import oom_kills

__all__ = ["RankError", "log_of", "run_ranks"]

_POLL_S = 0.02
_ELSEWHERE_S = 0.5
#: How long to look on after the first failure: of those that it takes with it, one may be seen
#: before it.
_AFTERMATH_S = 0.2
#: From SIGTERM to SIGKILL; below `stopping.GRACE_S`, after which the row itself is killed.
_GRACE_S = 2.0
_LOG_CHARACTERS = 4000


class RankError(NarrowgaugeError):
    """One of the processes that share a row failed; it has the exit code of what failed there."""

    exit_code = ExitCode.RUN_FAILED


class _RemoteTraceError(Exception):
    """The trace of another process, as the cause of the error that is raised here for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def __str__(self) -> str:
        return "\n" + self._text


@dataclasses.dataclass(frozen=True)
class _End:
    """How one process ended: its wait status, and what it said itself, if it could."""

    rank: int
    status: int
    said: Dict[str, Any]

    @property
    def failed(self) -> bool:
        return self.status != 0

    @property
    def order(self) -> Tuple[bool, float]:
        """What failed first sorts first: who is killed says nothing, and those who miss it do."""
        return bool(self.said), float(self.said.get("at", 0.0))


def log_of(folder: Path, rank: int) -> Path:
    """What a process printed (all but the first, which prints where the row prints), and the trace
    that native code left when it killed the process."""
    return folder / f"rank-{rank}.log"


def run_ranks(
    count: int,
    live: Callable[[int], None],
    folder: Path,
    out: Path,
    elsewhere: Callable[[], str] = str,
) -> None:
    """Call `live(rank)` in `count` processes forked here; return when all have ended well.

    `folder`: an empty one for their logs (`log_of`); `out`: where the run writes, for messages;
    `elsewhere`: asked now and then what failed on another machine, empty: nothing.
    Where one fails, the others are ended. Raises RankError for the one that failed first, or
    SkippedError where that is what it raised. However this ends, no process is left.
    """
    kills = oom_kills()
    parent = os.getpid()
    living: Dict[int, int] = {}
    ends: List[_End] = []
    try:
        for rank in range(count):
            child = fork()
            if child == 0:
                _be(rank, live, parent, folder, out)
            living[rank] = child
        deadline = float("inf")
        asked = time.monotonic()
        while living and time.monotonic() < deadline:
            if time.monotonic() - asked > _ELSEWHERE_S:
                asked = time.monotonic()
                there = elsewhere()
                if there:
                    raise RankError(there, why="the processes here waited for those there")
            ended = _reap(living, folder)
            ends += ended
            if deadline == float("inf") and any(end.failed for end in ended):
                deadline = time.monotonic() + _AFTERMATH_S
            elif not ended:
                time.sleep(_POLL_S)
    finally:
        _end_all(living)
    failed = sorted((end for end in ends if end.failed), key=lambda end: end.order)
    if failed:
        raise _error(failed[0], count, kills, folder, out)


def _be(rank: int, live: Callable[[int], None], parent: int, folder: Path, out: Path) -> None:
    """The whole life of a forked process; never returns."""
    code = int(ExitCode.INTERNAL)
    try:
        die_with(parent)
        if rank > 0:  # the first has files to finish, and is told so as the row is
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _log_to(log_of(folder, rank), speaks=rank == 0)
        live(rank)
        code = 0
    # Whatever it is, whoever forked this says it; it cannot be raised there.
    except BaseException as error:
        info, code = describe(error, out)
        said = dataclasses.asdict(info)
        said.update(at=time.monotonic(), skipped=isinstance(error, SkippedError), code=int(code))
        _said_in(folder, rank).write_text(json.dumps(said), encoding="utf-8")
    finally:
        flush()
        os._exit(int(code))


def _log_to(path: Path, *, speaks: bool) -> None:
    stream = open(path, "w", encoding="utf-8", buffering=1)
    faulthandler.enable(stream)
    if not speaks:
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.fileno(), 2)
        sys.stdout = sys.stderr = stream


def _said_in(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.json"


def _reap(living: Dict[int, int], folder: Path) -> List[_End]:
    """Those of `living` that have ended by now, which leave it."""
    ends = []
    for rank, child in tuple(living.items()):
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            del living[rank]
            ends.append(_End(rank, status, _said(folder, rank)))
    return ends


def _said(folder: Path, rank: int) -> Dict[str, Any]:
    """Nothing, where it was killed before the last word was written."""
    try:
        said: Dict[str, Any] = json.loads(_said_in(folder, rank).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return said


def _end_all(living: Dict[int, int]) -> None:
    for child in living.values():
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + _GRACE_S
    while living and time.monotonic() < deadline:
        for rank, child in tuple(living.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del living[rank]
        time.sleep(_POLL_S)
    for child in living.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _error(
    end: _End, count: int, kills: Optional[int], folder: Path, out: Path
) -> NarrowgaugeError:
    """The error to raise here for one that ended badly there."""
    who = f"rank {end.rank} of {count}"
    if not end.said:
        silent = why_silent(end.status, kills, oom_kills(), out, who)
        error: NarrowgaugeError = RankError(silent.what, why=silent.why, next_step=silent.next_step)
        error.exit_code = silent.exit_code
        trace = ""
    else:
        names = {field.name for field in dataclasses.fields(ErrorInfo)}
        info = ErrorInfo(**{name: text for name, text in end.said.items() if name in names})
        kind = SkippedError if end.said["skipped"] else RankError
        what = f"{who}: {info.kind}: {info.what}"
        error = kind(what, why=info.why, next_step=info.next_step)
        error.exit_code = ExitCode(end.said["code"])
        trace = info.trace
    parts = filter(None, (trace, _log_tail(folder, end.rank)))
    error.__cause__ = _RemoteTraceError("\n".join(parts))
    return error


def _log_tail(folder: Path, rank: int) -> str:
    """The end of a log; where native code died, what it printed last and the innermost calls."""
    text = log_of(folder, rank).read_text(encoding="utf-8", errors="replace")
    fatal = text.rfind("Fatal Python error")
    end = len(text) if fatal < 0 else fatal + _LOG_CHARACTERS // 2
    shown = text[max(0, end - _LOG_CHARACTERS) : end]
    return f"its log:\n{shown}" if shown else ""
