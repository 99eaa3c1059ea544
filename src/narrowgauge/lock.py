"""One measuring run per host: two at once would measure each other.

The lock is a `flock` on a file that all users share. The file's text names the run that holds it,
or that held it when its launcher was killed; such a run may still go on, and then it counts too.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import Busy, results_unwritable

__all__ = ["Holder", "default_lock_file", "hold", "is_held", "last_holder"]

_WAIT_S = 1.0
_FOLDERS = ("/run/lock", "/var/lock", "/tmp")


@dataclass(frozen=True)
class Holder:
    """Which run holds the host. `folder` is where its handle lies."""

    run_id: str
    folder: str
    pid: int


def default_lock_file(env: Mapping[str, str]) -> Path:
    """`$NARROWGAUGE_LOCK`, or `narrowgauge.lock` in the host's folder for locks."""
    named = env.get("NARROWGAUGE_LOCK")
    if named:
        return Path(named)
    writable = (Path(folder) for folder in _FOLDERS if os.access(folder, os.W_OK | os.X_OK))
    return next(writable, Path("/tmp")) / "narrowgauge.lock"


@contextmanager
def hold(
    path: Path,
    holder: Holder,
    *,
    still_running: Callable[[Holder], bool],
    wait: bool,
    note: Callable[[str], None],
    sleep: Callable[[float], None] = time.sleep,
) -> Iterator[Callable[[Holder], None]]:
    """Hold the host for the block; the value given renames the holder (the next job of a list).

    `still_running` says whether a run whose launcher is gone still goes on. Raises Busy, naming the
    run, unless `wait`.
    """
    descriptor = _open(path)
    try:
        _acquire(descriptor, path, holder, still_running, wait, note, sleep)
        _write(descriptor, holder)
        yield lambda renamed: _write(descriptor, renamed)
        # Only an orderly end clears the name; what another end leaves is looked up the next time.
        os.ftruncate(descriptor, 0)
    finally:
        os.close(descriptor)


def last_holder(path: Path) -> Holder | None:
    """Whom the file names: who holds it, or whose launcher was killed while it did. None without a
    file."""
    try:
        with _to_ask(path) as descriptor:
            return _read(descriptor)
    except OSError:
        return None


def is_held(path: Path) -> bool | None:
    """Whether a living process holds the lock of a file; None where that cannot be told.

    A free one is ours for a moment, shared: whoever asks for it just then and does not wait is
    refused. So ask only about one that its holder would have by now.
    """
    try:
        with _to_ask(path) as descriptor:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    return False


@contextmanager
def _to_ask(path: Path) -> Iterator[int]:
    """Open what may be anything: makes nothing, and waits for nobody."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(
    descriptor: int,
    path: Path,
    holder: Holder,
    still_running: Callable[[Holder], bool],
    wait: bool,
    note: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    told = False
    while True:
        found = _try(descriptor, holder, still_running)
        if found is None:
            return
        other, left_behind = found
        name = other.run_id or "another run"
        if not wait:
            way_out = "--wait starts when it has ended"
            # Only a run whose launcher is gone can be taken over.
            way_out += f"; narrowgauge attach {name} watches it" if left_behind else ""
            raise Busy(
                f"this host is measuring {name}",
                why=f"one run at a time, or they measure each other ({path})",
                next_step=way_out,
            )
        if not told:
            note(f"waiting for {name} to end")
            told = True
        sleep(_WAIT_S)


def _try(
    descriptor: int, holder: Holder, still_running: Callable[[Holder], bool]
) -> tuple[Holder, bool] | None:
    """Take the lock; None once it is ours, else the holder that is in the way, and whether its
    launcher is gone."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read(descriptor) or Holder("", "", 0), False
    left = _read(descriptor)
    if left is None or left.run_id == holder.run_id or not still_running(left):
        return None
    fcntl.flock(descriptor, fcntl.LOCK_UN)
    return left, True


def _open(path: Path) -> int:
    """Open without O_CREAT first: in a sticky folder the kernel refuses that for another's file."""
    for attempt in range(2):
        try:
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            if attempt:
                raise
        except OSError as error:
            raise results_unwritable(path, f"the host's lock: {error.strerror}") from error
        _create(path)
    raise AssertionError("unreachable")


def _create(path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    except FileExistsError:
        return
    except OSError as error:
        reason = f"the host's lock: {error.strerror}"
        if error.errno == errno.ENOENT:
            reason = "the host's lock: its folder does not exist"
        raise results_unwritable(path, reason) from error
    os.fchmod(descriptor, 0o666)  # whatever the umask: other users take the same lock
    os.close(descriptor)


def _read(descriptor: int) -> Holder | None:
    text = os.pread(descriptor, 4096, 0)
    try:
        data = json.loads(text)
        return Holder(str(data["run_id"]), str(data["folder"]), int(data["pid"]))
    except (ValueError, KeyError, TypeError):
        return None


def _write(descriptor: int, holder: Holder) -> None:
    text = {"run_id": holder.run_id, "folder": holder.folder, "pid": holder.pid}
    payload = json.dumps(text).encode()
    os.pwrite(descriptor, payload, 0)
    os.ftruncate(descriptor, len(payload))
