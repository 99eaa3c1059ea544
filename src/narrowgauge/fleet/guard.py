"""One watcher for each run: two that write the files of one run would spoil them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO

from narrowgauge.errors import Busy

__all__ = ["WATCHED", "Guards"]

#: Lies in a run's folder and is locked for as long as somebody watches the run.
WATCHED = ".watched"


class Guards:
    """The runs that one launcher watches."""

    def __init__(self) -> None:
        self._held: dict[str, BinaryIO] = {}

    def take(self, run_id: str, folder: Path) -> None:
        """Watch this run from now on. Raises Busy where another launcher of this host does."""
        if run_id in self._held:
            return
        stream = open(folder / WATCHED, "ab")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = os.fstat(stream.fileno()).st_nlink > 0  # or it was collected just now
        except BlockingIOError:
            taken = False
        if not taken:
            stream.close()
            raise Busy(
                f"the run {run_id} is watched by another launcher on this host",
                why=f"it holds {folder / WATCHED}",
                next_step="let that one finish; it records the run",
            )
        self._held[run_id] = stream

    def release(self, run_id: str, collected_to: Path | None = None) -> None:
        """Leave it to others; with `collected_to`, its folder, there is nothing more to watch."""
        stream = self._held.pop(run_id, None)
        if stream is None:
            return
        if collected_to is not None:
            (collected_to / WATCHED).unlink(missing_ok=True)
        stream.close()
