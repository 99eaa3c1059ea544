"""The folder a run writes to: held by one process, with room kept for its last words."""

from __future__ import annotations

import fcntl
import os
from contextlib import contextmanager
from pathlib import Path
from typing import Callable, Iterator, TypeVar

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_lab.errors import BusyError, ResultsUnwritableError, is_disk_full

__all__ = ["hold", "last_words", "mend_events", "release_reserve"]

_LOCK_FILE = ".lock"
_RESERVE_FILE = ".reserve"
#: Enough for the end of a row and of a run, and for the outcome of most.
_RESERVE_BYTES = 128 << 10

T = TypeVar("T")


@contextmanager
def hold(out: Path, *, resume: bool) -> Iterator[None]:
    """Make the folder, lock it, and keep some room in it, until the block ends.

    Two processes appending to the same events would make one false run, so the second gets
    BusyError. The lock is the kernel's and goes with its process, a row's process included.
    Raises ResultsUnwritableError; UsageError where the folder holds a run and nobody said `resume`;
    OSError where there is no room.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        stream = open(out / _LOCK_FILE, "w", encoding="utf-8")
    except OSError as error:
        if is_disk_full(error):
            raise
        raise _unwritable(out, error) from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BusyError(
                f"another run is writing to {out}",
                why="its lock is held by a living process",
                next_step="wait for it to end, or give another --out",
            ) from None
        try:
            _begin(out, resume)
            yield
        finally:
            release_reserve(out)


def last_words(out: Path, write: Callable[[], T]) -> T:
    """Do `write`; where the disk is full, give up the room that was kept and do it once more."""
    try:
        return write()
    except OSError as error:
        if not is_disk_full(error):
            raise
    release_reserve(out)
    mend_events(out)
    return write()


def release_reserve(out: Path) -> None:
    """Give up the room that was kept."""
    try:
        (out / _RESERVE_FILE).unlink()
    except FileNotFoundError:
        pass


def mend_events(out: Path) -> None:
    """End a torn last line, so that the next event does not become a part of it."""
    path = out / EVENTS_FILE
    if not path.exists() or path.stat().st_size == 0:
        return
    with open(path, "r+b") as stream:
        stream.seek(-1, os.SEEK_END)
        if stream.read(1) != b"\n":
            stream.write(b"\n")


def _begin(out: Path, resume: bool) -> None:
    if (out / EVENTS_FILE).exists() and not resume:
        raise UsageError(
            f"{out} already holds a run",
            why="results are never overwritten",
            next_step="--resume goes on with it; another --out starts anew",
        )
    mend_events(out)
    with open(out / _RESERVE_FILE, "wb") as stream:
        # Random, so that a file system that compresses keeps the room too.
        stream.write(os.urandom(_RESERVE_BYTES))
        stream.flush()
        os.fsync(stream.fileno())


def _unwritable(out: Path, error: OSError) -> ResultsUnwritableError:
    return ResultsUnwritableError(
        f"cannot write to {out}",
        why=error.strerror or str(error),
        next_step="give an --out folder that this user may write",
    )
