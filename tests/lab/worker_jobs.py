"""What worker processes of the tests run. They import this by its name, and no torch with it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Callable, Tuple


def sleeper(job: float) -> Tuple[Callable[[], Any], Callable[[], Any]]:
    print("libraries print what they like")
    return lambda: time.sleep(job), lambda: {"process": os.getpid()}


def meets(job: str) -> Tuple[Callable[[], Any], Callable[[], Any]]:
    """Its calls end once two processes have made one; `job` is the folder in which they see that.
    One that is called alone gives up, in the end."""
    print("libraries print what they like")

    def call() -> None:
        Path(job, str(os.getpid())).touch()
        until = time.monotonic() + 120
        while len(os.listdir(job)) < 2:
            if time.monotonic() > until:
                raise TimeoutError("nobody came")
            time.sleep(0.005)

    return call, lambda: {"process": os.getpid()}


def cannot_begin(job: str) -> Any:
    raise MemoryError(job)


def dies(job: int) -> Tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: os.kill(os.getpid(), job), dict


def raises(job: str) -> Tuple[Callable[[], Any], Callable[[], Any]]:
    def call() -> None:
        raise ValueError(job)

    return call, dict
