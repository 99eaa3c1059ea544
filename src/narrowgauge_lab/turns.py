"""Runs that share a GPU: all may work on it at once, and what is timed has it alone.

Whoever starts several runs on one GPU, as `benchmarks/reference/take.py` does, names a folder in
`NARROWGAUGE_TURNS`. There a row holds the file `floor` together with the others while it works. One
that is about to time something takes the file `gate` for itself; the others see that before their
next step, wait for their work on the GPU to end, and leave the floor until the gate is free again.
Both are held by flock(2), so that a process which dies lets go.

How long an epoch took is nobody's figure there, and is not recorded; see `sharing`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, Optional

import torch

from narrowgauge_contract.errors import UsageError

__all__ = ["ENV", "Turns", "alone", "begin", "facts", "let_others", "sharing"]

# unverified: runs that share a GPU, by MPS | no GPU since | smoke list, take.py --gpus 0,0,0
#: The folder of the two files; unset where a run has the GPU to itself.
ENV = "NARROWGAUGE_TURNS"


class Turns:
    """One process's part. `synchronize` waits until nothing of it runs on the GPU any more."""

    def __init__(self, folder: Path, synchronize: Callable[[], None]) -> None:
        """Comes onto the floor, once nobody is timing. Raises OSError where it cannot be had."""
        folder.mkdir(parents=True, exist_ok=True)
        self._gate = os.open(folder / "gate", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._floor = os.open(folder / "floor", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._synchronize = synchronize
        self._windows = 0
        self._entering = threading.Lock()
        #: Seconds spent waiting for others, and with the GPU for itself alone.
        self.waited, self.alone_for = 0.0, 0.0
        self._come_back()

    def let_others(self) -> None:
        """Between two steps: go aside where somebody wants to time something."""
        if self._windows or self._gate_is_free():
            return
        self._synchronize()
        fcntl.flock(self._floor, fcntl.LOCK_UN)
        self._come_back()

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else works on the GPU in the block; blocks may lie in each other, and threads may
        be in one together."""
        with self._entering:
            if not self._windows:
                self._clear_the_floor()
            self._windows += 1
        try:
            yield
        finally:
            with self._entering:
                self._windows -= 1
                if not self._windows:
                    self._open_the_gate()

    def close(self) -> None:
        """Leave; the process's end does so too."""
        os.close(self._floor)
        os.close(self._gate)

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
        fcntl.flock(self._floor, fcntl.LOCK_EX)
        self._began = time.monotonic()
        self.waited += self._began - began

    def _open_the_gate(self) -> None:
        self._synchronize()
        self.alone_for += time.monotonic() - self._began
        fcntl.flock(self._floor, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)


#: This process's, if it shares a GPU. A child that is forked takes no part by its parent's files.
_mine: Optional[Turns] = None
_whose = 0


def sharing() -> bool:
    """Whether this run shares its GPU: then times that are not taken alone are no figures."""
    return bool(os.environ.get(ENV))


def begin(device: torch.device) -> None:
    """Take part from now on, where the GPU is shared. Raises UsageError where that cannot be."""
    global _mine, _whose
    if not sharing() or device.type != "cuda":
        return
    folder = Path(os.environ[ENV])
    try:
        _mine, _whose = Turns(folder, lambda: torch.cuda.synchronize(device)), os.getpid()
    except OSError as error:
        raise UsageError(
            f"{ENV} names '{folder}', where no locks can be had",
            why=str(error),
            next_step="name a folder on a local disk, or unset it to have the GPU alone",
        ) from error


def let_others() -> None:
    """Between two steps of long work; costs a microsecond, and nothing where nobody shares."""
    if _mine is not None and _whose == os.getpid():
        _mine.let_others()


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
