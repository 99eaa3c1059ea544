"""Forking from a parent that has imported torch and run nothing of it."""

from __future__ import annotations

import os
import warnings

from narrowgauge_lab.console import flush

__all__ = ["fork"]


def fork() -> int:
    """`os.fork`, with nothing left in the output buffers to be written twice.

    Python 3.12 warns of every fork of a process that has threads. Ours has those of numpy's BLAS,
    which are idle, and which the BLAS itself stops before a fork and starts again after it.
    """
    flush()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*fork")
        return os.fork()
