"""A worker in a process of its own: makes something ready, waits for the word, and times its calls.

`measure.concurrent` starts it. It imports nothing heavy itself: what it is to run does.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import time
from pathlib import Path
from typing import Any, Callable, List, Tuple

from narrowgauge_lab.errors import describe

__all__ = ["ERROR", "GO", "READY", "RESULT", "repeat"]

#: What is said by either side, and the files in the worker's folder.
READY, GO = b"r", b"g"
RESULT, ERROR = "result.pickle", "error.pickle"


def repeat(
    call: Callable[[], Any], seconds: float, now: Callable[[], float] = time.perf_counter
) -> List[Tuple[float, float]]:
    """Begin and end of each call. Calls until so many seconds have passed since the first one
    began; at least once."""
    spans: List[Tuple[float, float]] = []
    began = ended = now()
    while not spans or ended - began < seconds:
        start = now()
        call()
        ended = now()
        spans.append((start, ended))
    return spans


def _main(function: str, job: Path, folder: Path, ready: int, seconds: float) -> int:
    """In the worker's process."""
    try:
        module, _, name = function.partition(":")
        with job.open("rb") as stream:
            call, report = getattr(importlib.import_module(module), name)(pickle.load(stream))
        os.write(ready, READY)
        if sys.stdin.buffer.read(1) != GO:
            return 1  # whoever started it is gone
        spans = repeat(call, seconds)
        with (folder / RESULT).open("wb") as stream:
            pickle.dump((spans, report()), stream, protocol=4)
    # Whatever it is, its parent says it; it cannot be raised there.
    except Exception as error:
        info, code = describe(error, folder)
        with (folder / ERROR).open("wb") as stream:
            pickle.dump((": ".join(filter(None, (info.what, info.why))), int(code)), stream)
        return 1
    return 0


if __name__ == "__main__":
    _, asked, job_file, own_folder, ready_fd, for_seconds = sys.argv
    sys.exit(_main(asked, Path(job_file), Path(own_folder), int(ready_fd), float(for_seconds)))
