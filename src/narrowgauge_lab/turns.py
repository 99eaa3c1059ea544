"""Runs that share a GPU: all may work on it at once, and what is timed has it alone.

Whoever starts several runs on one GPU, as `benchmarks/reference/take.py` does, names a folder in
`NARROWGAUGE_TURNS`. There a row holds the file `floor` together with the others while it works. One
that is about to time something takes the file `gate` for itself and sends the others a signal,
SIGUSR2: wherever in its Python code each of them is then, it waits for its work on the GPU to end,
and leaves the floor until the gate is free again. One that is capturing a graph does so after that.
Both files are held by flock(2), so that a process which dies lets go.

How long an epoch took is nobody's figure there, and is not recorded; see `sharing`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from narrowgauge_contract.errors import UsageError

__all__ = ["ENV", "Turns", "alone", "begin", "facts", "sharing"]

#: The folder of the two files; unset where a run has the GPU to itself.
ENV = "NARROWGAUGE_TURNS"


_SIGNAL = signal.SIGUSR2
#: Between two signals to those who have not left the floor yet.
_PATIENCE_S = 0.01


class Turns:
    """One process's part. `synchronize` waits until nothing of it runs on the GPU any more, which
    it can where `may_wait` says so."""

    def __init__(
        self,
        folder: Path,
        synchronize: Callable[[], None],
        may_wait: Callable[[], bool] = lambda: True,
    ) -> None:
        """Comes onto the floor, once nobody is timing. Raises OSError where it cannot be had."""
        self._members = folder / "members"
        self._members.mkdir(parents=True, exist_ok=True)
        self._gate = os.open(folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._floor = os.open(folder / "floor", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._synchronize, self._may_wait = synchronize, may_wait
        self._windows = 0
        self._changing = False
        self._entering = threading.Lock()
        #: Seconds spent waiting for others, and with the GPU for itself alone.
        self.waited, self.alone_for = 0.0, 0.0
        self._come_back()

    def listen(self) -> None:
        """Go aside from now on whenever another asks. For one of a process, on its main thread."""
        signal.signal(_SIGNAL, lambda *_: self.step_aside())
        signal.siginterrupt(_SIGNAL, False)
        (self._members / _identity(os.getpid())).touch()

    def step_aside(self) -> None:
        """Leave the floor until whoever wants to time something has done so."""
        if self._windows or self._changing or self._gate_is_free() or not self._may_wait():
            return
        self._changing = True
        try:
            self._synchronize()
            fcntl.flock(self._floor, fcntl.LOCK_UN)
            self._come_back()
        finally:
            self._changing = False

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works on the GPU in the block; blocks may lie in each other, and threads may
        be in one together."""
        with self._entering, self._change():
            if not self._windows:
                self._clear_the_floor()
            self._windows += 1
        try:
            yield
        finally:
            with self._entering, self._change():
                self._windows -= 1
                if not self._windows:
                    self._open_the_gate()

    def close(self) -> None:
        """Leave; the process's end does so too."""
        with contextlib.suppress(OSError):
            (self._members / _identity(os.getpid())).unlink()
        os.close(self._floor)
        os.close(self._gate)

    @contextlib.contextmanager
    def _change(self) -> Iterator[None]:
        """Signals that come meanwhile change nothing; they are sent again."""
        self._changing = True
        try:
            yield
        finally:
            self._changing = False

    def _gate_is_free(self) -> bool:
        try:
            fcntl.flock(self._gate, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        return True

    def _come_back(self) -> None:
        began = time.monotonic()
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._floor, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        self.waited += time.monotonic() - began

    def _clear_the_floor(self) -> None:
        self._synchronize()
        # Off the floor first: who has the gate waits for everybody who is on it.
        fcntl.flock(self._floor, fcntl.LOCK_UN)
        began = time.monotonic()
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        while not self._has_the_floor():
            self._ask_the_others()
            time.sleep(_PATIENCE_S)
        self._began = time.monotonic()
        self.waited += self._began - began

    def _has_the_floor(self) -> bool:
        try:
            fcntl.flock(self._floor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def _ask_the_others(self) -> None:
        for member in self._members.iterdir():
            pid = int(member.name.split("-")[0])
            if member.name != _identity(pid):  # it has ended; the number may be another's now
                with contextlib.suppress(OSError):
                    member.unlink()
            elif pid != os.getpid():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, _SIGNAL)

    def _open_the_gate(self) -> None:
        self._synchronize()
        self.alone_for += time.monotonic() - self._began
        fcntl.flock(self._floor, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)


def _identity(pid: int) -> str:
    """A process's number, the moment that it began at, and who counts such numbers, since they are
    used again; empty where it is gone."""
    try:
        # The name, in parentheses, may have anything in it.
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return f"{pid}-{stat[19]}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


#: This process's, if it shares a GPU. A child that is forked takes no part by its parent's files.
_mine: Optional[Turns] = None
_whose = 0


def sharing() -> bool:
    """Whether this run shares its GPU: then times that are not taken alone are no figures."""
    return bool(os.environ.get(ENV))


def begin(device: torch.device) -> None:
    """Take part from now on, where the GPU is shared; on the main thread. Raises UsageError where
    that cannot be."""
    global _mine, _whose
    if not sharing() or device.type != "cuda":
        return

    def synchronize() -> None:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize(device)

    def may_wait() -> bool:
        return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())

    folder = Path(os.environ[ENV])
    try:
        _mine, _whose = Turns(folder, synchronize, may_wait), os.getpid()
        _mine.listen()
    except OSError as error:
        raise UsageError(
            f"{ENV} names '{folder}', where no locks can be had",
            why=str(error),
            next_step="name a folder on a local disk, or unset it to have the GPU alone",
        ) from error


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Around what is timed."""
    if _mine is None or _whose != os.getpid():
        yield
        return
    with _mine.alone():
        yield


def facts() -> Dict[str, Any]:
    """What a row says of the GPU that it shared; nothing where it did not."""
    if _mine is None or _whose != os.getpid():
        return {}
    told = {"waited_seconds": _mine.waited, "alone_seconds": _mine.alone_for}
    return {"shared_gpu": {**told, "mps": bool(os.environ.get("CUDA_MPS_PIPE_DIRECTORY"))}}
