"""Timing on so many threads of the CPU, and putting back what was."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

from narrowgauge_lab import torch_compat

__all__ = ["cpu_threads"]


@contextlib.contextmanager
def cpu_threads(count: int) -> Iterator[int]:
    """Operators within run on `count` threads, 0: as many as before. Yields how many it is: with a
    torch whose number may not change (see `torch_compat.threads_may_change`) as many as before."""
    before = torch.get_num_threads()
    changes = bool(count) and torch_compat.threads_may_change()
    if changes:
        torch.set_num_threads(count)
    try:
        yield torch.get_num_threads()
    finally:
        if changes:
            torch.set_num_threads(before)
