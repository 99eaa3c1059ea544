"""Where the time of a preparation goes."""

from __future__ import annotations

import contextlib
import time
from typing import Dict, Iterator

__all__ = ["Phases"]


class Phases:
    """`seconds` of each part by name; what comes twice is added up. On the host's clock: what is
    queued on a device counts where somebody waits for it."""

    def __init__(self) -> None:
        self.seconds: Dict[str, float] = {}

    @contextlib.contextmanager
    def of(self, name: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - begin
