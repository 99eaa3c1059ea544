"""Whose turn it is: runs on one host follow one another, or they measure each other."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from narrowgauge import lock
from narrowgauge.errors import Busy, NarrowgaugeError
from narrowgauge.executors.base import Executor, load_handle
from narrowgauge.store import Store
from narrowgauge_contract.job import Job

__all__ = ["holder_of", "my_turn"]

Say = Callable[[str], None]


def holder_of(job: Job, store: Store) -> lock.Holder:
    """This process, running that job."""
    return lock.Holder(job.run_id, str(store.root / job.experiment / job.run_id), os.getpid())


@contextmanager
def my_turn(
    executor: Executor,
    holder: lock.Holder,
    *,
    executor_of: Callable[[str], Executor],
    env: Mapping[str, str],
    wait: bool,
    say: Say,
) -> Iterator[Callable[[lock.Holder], None]]:
    """Hold the host for measuring. Raises Busy, naming the run in the way, unless `wait`.

    `executor_of`: by its name, for whoever holds the host without a living launcher.
    """

    def still_running(other: lock.Holder) -> bool:
        try:
            handle = load_handle(Path(other.folder) / "handle.json")
            return executor_of(handle.executor).alive(handle)
        except (NarrowgaugeError, OSError):
            return False  # no handle, no engine: then nothing of it runs

    path = lock.default_lock_file(env)
    with lock.hold(path, holder, still_running=still_running, wait=wait, note=say) as rename:
        _wait_for_containers(executor, holder, wait, say)
        yield rename


def _wait_for_containers(executor: Executor, holder: lock.Holder, wait: bool, say: Say) -> None:
    """Containers of ours that no lock speaks of: started by hand from a planned line."""
    told = False
    while True:
        others = [run for run in executor.running() if run != holder.run_id]
        if not others:
            return
        if not wait:
            raise Busy(
                f"a container on this host is measuring {others[0]}",
                why="one run at a time, or they measure each other",
                next_step="--wait starts when it has ended;"
                f" narrowgauge attach {others[0]} watches it",
            )
        if not told:
            say(f"waiting for {others[0]} to end")
            told = True
        time.sleep(1.0)
