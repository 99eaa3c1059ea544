"""Workers that run at the same time and time their own calls: threads, or processes.

Threads are for GPUs, where each has a stream of its own and the device is what is shared. Processes
are for CPUs: threads of one Python would wait for each other. They are started afresh, since one
that is forked from a process whose OpenMP threads run already waits for them for ever. All read one
monotonic clock, which on Linux is the same in every process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pickle
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import IO, Any, Callable, ContextManager, Dict, List, Sequence, Tuple

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError
from narrowgauge_lab.measure.steady import Span, Worked
from narrowgauge_lab.worker import ERROR, GO, READY, RESULT, repeat

__all__ = [
    "Program",
    "ThreadWorker",
    "WorkerFailedError",
    "run_processes",
    "run_threads",
]

Call = Callable[[], Any]

_LOG = "log.txt"
_LOG_CHARACTERS = 500


class WorkerFailedError(NarrowgaugeError):
    """A worker did not come as far as its first call."""

    exit_code = ExitCode.RUN_FAILED


@dataclasses.dataclass(frozen=True)
class ThreadWorker:
    """Calls `call`, which waits for its own results, again and again within the context that
    `entered` gives: a thread's current stream, say."""

    name: str
    batch: int
    call: Call
    entered: Callable[[], ContextManager[Any]] = contextlib.nullcontext


@dataclasses.dataclass(frozen=True)
class Program:
    """A worker in a process of its own. `function` ("module:name") is given `job`, pickled, and
    gives what to call again and again, and what to call at the end for a report. Programs may share
    one job."""

    name: str
    batch: int
    function: str
    job: Any


def run_threads(workers: Sequence[ThreadWorker], seconds: float) -> Tuple[Worked, ...]:
    """Run all at once, each for so many seconds after a first call that does not count. A worker
    that raises has its `error`."""
    gate = threading.Barrier(len(workers))
    done: Dict[str, Worked] = {}

    def work(worker: ThreadWorker) -> None:
        spans: List[Span] = []
        waiting, begun, why = False, False, ""
        try:
            with worker.entered():
                # Libraries make handles for each thread at its first call: seconds, once.
                worker.call()
                waiting = True
                gate.wait()
                waiting, begun = False, True
                spans = repeat(worker.call, seconds)
        # Whatever a library raises in its thread: the row has to say it, and the others end anyway.
        except Exception as error:
            # A gate that broke is another worker's error; what a call raises is this one's.
            if not (waiting and isinstance(error, threading.BrokenBarrierError)):
                why = repr(error)
            if not begun:
                gate.abort()
        done[worker.name] = Worked(worker.name, worker.batch, tuple(spans), why)

    threads = [threading.Thread(target=work, args=(each,), name=each.name) for each in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return tuple(done[each.name] for each in workers)


def run_processes(
    programs: Sequence[Program], seconds: float
) -> Tuple[Tuple[Worked, ...], Tuple[Any, ...]]:
    """Start all, wait until each is ready, let them run at once; what they did, and their reports.

    The first is made before the others begin: what it builds or tunes, with the machine to itself,
    they find in caches.
    A worker that dies while it runs has its `error`, and None for a report. Raises
    WorkerFailedError, with the exit code of what went wrong, for one that never becomes ready.
    """
    with tempfile.TemporaryDirectory(prefix="narrowgauge-workers-") as folder:
        started: List[_Process] = []
        try:
            jobs: Dict[int, Path] = {}
            for number, program in enumerate(programs):
                job = jobs.setdefault(id(program.job), Path(folder) / f"job-{number}.pickle")
                if not job.exists():
                    with job.open("wb") as stream:
                        pickle.dump(program.job, stream, protocol=4)
                started.append(_Process(program, job, Path(folder) / str(number), seconds))
                if number == 0:
                    started[0].wait_until_ready()
            for each in started[1:]:
                each.wait_until_ready()
            for each in started:
                each.go()
            ended = [each.result() for each in started]
        finally:
            for each in started:
                each.stop()
    return tuple(worked for worked, _ in ended), tuple(report for _, report in ended)


class _Process:
    """One worker process, from its start to its result."""

    def __init__(self, program: Program, job: Path, folder: Path, seconds: float) -> None:
        self.program, self.folder = program, folder
        folder.mkdir()
        reading, writing = os.pipe()
        self._ready: IO[bytes] = os.fdopen(reading, "rb")
        try:
            with (folder / _LOG).open("wb") as log:
                self._process = subprocess.Popen(
                    [
                        sys.executable,
                        "-m",
                        "narrowgauge_lab.worker",
                        program.function,
                        str(job),
                        str(folder),
                        str(writing),
                        repr(seconds),
                    ],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    pass_fds=(writing,),
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
                )
        except BaseException:
            self._ready.close()
            raise
        finally:
            os.close(writing)

    def wait_until_ready(self) -> None:
        if self._ready.read(1) == READY:
            return
        why, code = self._why()
        error = WorkerFailedError(f"the worker {self.program.name} could not be made", why=why)
        error.exit_code = code
        raise error

    def go(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it died meanwhile, which its result tells
            self._process.stdin.write(GO)
            self._process.stdin.flush()

    def result(self) -> Tuple[Worked, Any]:
        name, batch = self.program.name, self.program.batch
        if self._process.wait() != 0:
            return Worked(name, batch, (), self._why()[0]), None
        with (self.folder / RESULT).open("rb") as stream:
            spans, report = pickle.load(stream)  # our own process's
        return Worked(name, batch, tuple(spans)), report

    def stop(self) -> None:
        """End it, if it has not ended."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        self._ready.close()
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def _why(self) -> Tuple[str, ExitCode]:
        """What it said of its end, in its own words or the last of its log's."""
        status = self._process.wait()
        path = self.folder / ERROR
        if path.is_file():
            with path.open("rb") as stream:
                what, code = pickle.load(stream)
            return what, ExitCode(code)
        if status < 0:
            return f"it was killed by signal {-status}", ExitCode.KILLED
        said = (self.folder / _LOG).read_text(encoding="utf-8", errors="replace").strip()
        return said[-_LOG_CHARACTERS:] or f"it ended with status {status}", ExitCode.RUN_FAILED
