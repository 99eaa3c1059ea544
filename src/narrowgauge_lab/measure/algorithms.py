"""cuDNN's own choice of algorithms, for what is measured beside a kernel of ours."""

from __future__ import annotations

import contextlib
from typing import Iterator

import torch

__all__ = ["best_algorithms"]


@contextlib.contextmanager
def best_algorithms(device: torch.device) -> Iterator[None]:
    """cuDNN tries its algorithms for each shape, as whoever wants it fast lets it."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before
