"""Forking from a parent that has imported torch and run nothing of it."""

from __future__ import annotations

import ctypes
import os
import signal
import warnings

from narrowgauge_contract.errors import ExitCode
from narrowgauge_lab.console import flush

__all__ = ["die_with", "fork"]

_PR_SET_PDEATHSIG = 1


def fork() -> int:
    """`os.fork`, with nothing left in the output buffers to be written twice.

    Python 3.12 warns of every fork of a process that has threads. Ours has those of numpy's BLAS,
    which are idle, and which the BLAS itself stops before a fork and starts again after it.
    """
    flush()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        return os.fork()


def die_with(parent: int) -> None:
    """Ask the kernel to kill this process when its parent dies, however the parent dies."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the kernel was asked
        os._exit(int(ExitCode.KILLED))
