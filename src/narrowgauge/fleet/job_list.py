"""The jobs that one device or several work through."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence

from narrowgauge_contract.job import Job

__all__ = ["JobList"]

#: How often one that waits for a job looks whether it is to stop.
_LOOK_S = 0.5


class JobList:
    """The jobs of one device, or of several. One that a device could not start goes back, and to
    another: so nobody is done while any is still being started."""

    def __init__(self, jobs: Sequence[Job]) -> None:
        self._waiting = deque(jobs)
        self._starting: set[str] = set()
        self._changed = threading.Condition()

    def take(self, stopped: Callable[[], bool]) -> Job | None:
        """The next; None where none is left."""
        with self._changed:
            while not self._waiting and self._starting and not stopped():
                self._changed.wait(_LOOK_S)
            if not self._waiting or stopped():
                return None
            job = self._waiting.popleft()
            self._starting.add(job.run_id)
            return job

    def begun(self, run_id: str) -> None:
        """It will not come back."""
        with self._changed:
            self._starting.discard(run_id)
            self._changed.notify_all()

    def give_back(self, job: Job) -> None:
        """It could not be started; another device may."""
        with self._changed:
            self._waiting.appendleft(job)
            self._starting.discard(job.run_id)
            self._changed.notify_all()
