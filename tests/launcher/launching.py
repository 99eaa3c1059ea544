"""What the launcher's tests share: jobs, events, and an executor without a process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from narrowgauge.executors.base import (
    ENDING_FILE,
    HANDLE_FORMAT,
    Ending,
    ExecutorFacts,
    Handle,
    save,
)
from narrowgauge.executors.ending import ending_from
from narrowgauge.plan import JobRequest, Places, plan_jobs
from narrowgauge.recording import StartFacts
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.events import EVENTS_FILE, Event, EventKind, EventLog, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Fold, Status, fold_outcome
from narrowgauge_contract.record import ImageFacts, MachineFacts
from narrowgauge_contract.spec import ExperimentSpec, parse_spec

TINY_TOML = """
[experiment]
id = "tiny"
title = "Tiny"
summary = "an experiment for tests"
headline = ["accuracy"]

[data]
parameter = "data"

[parameters.data]
type = "choice"
choices = ["mnist", "synthetic"]
default = "synthetic"
axis = "run"
help = "Which data."

[parameters.precision]
type = "choice"
choices = ["fp32", "bf16", "fp16"]
default = "fp32"
axis = "row"
help = "The precision of the network."

[parameters.epochs]
type = "int"
min = 1
max = 100
default = 2
axis = "row"
help = "How often the training set is seen."

[parameters.width]
type = "int"
default = 8
axis = "run"
help = "Channels."

[profiles.smoke]
minutes = 0.1
epochs = 1
"""

IMAGE = ImageFacts(
    "narrowgauge/cpu:0123456789abcdef", "sha256:aa", "python:3.11", None, "0123456789abcdef"
)
MACHINE = MachineFacts("6.1", "x86_64", "Debian", "a CPU", 2, 1 << 30)


def tiny_spec() -> ExperimentSpec:
    import sys

    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return parse_spec(tomllib.loads(TINY_TOML))


def tiny_job(*parameters: str, run_id: str = "20261121T101500Z-tiny-abc123") -> Job:
    request = JobRequest("tiny", "smoke", parameters, 0)
    return plan_jobs(tiny_spec(), request, "cpu", [run_id])[0]


def facts() -> StartFacts:
    return StartFacts(MACHINE, None)


def write_run(out: Path, job: Job, *, end: bool = True, values: int = 3) -> None:
    """What a lab would write for a run that goes well; without `end`, of one that was killed."""
    inside = {"python": "3.11.2", "platform": "Linux"}
    with EventLog(out / EVENTS_FILE) as log:
        log.emit(EventKind.RUN_START, inside=inside, source_hash="s" * 64, experiment_hash="e" * 64)
        for row in job.rows:
            start = {"repeat": row.repeat, "seed": row.seed, "parameters": row.parameters}
            log.emit(EventKind.ROW_START, row.index, **start)
            for value in range(values):
                metric = {
                    "name": "accuracy",
                    "unit": "%",
                    "source": "count",
                    "values": [90.0 + value],
                }
                log.emit(EventKind.METRIC, row.index, **metric)
                log.emit(EventKind.PROGRESS, row.index, done=value + 1, total=values, unit="epochs")
            if not end:
                return
            log.emit(EventKind.ROW_END, row.index, status="complete", seconds=1.0, error=None)
        log.emit(EventKind.RUN_END, status="complete", exit_code=0)


def write_outcome(
    out: Path, job: Job, status: Status = Status.COMPLETE, exit_code: int = 0
) -> None:
    fold = Fold().add_all(EventTail(out / EVENTS_FILE).poll())
    write_json_atomic(out / "outcome.json", fold_outcome(job, fold, status, exit_code))


Lab = Callable[[Path, Job], int]


def good_lab(out: Path, job: Job) -> int:
    write_run(out, job)
    write_outcome(out, job)
    return 0


@dataclass
class FakeExecutor:
    """An executor whose lab is a function: it runs when the stream is first asked.

    `lab` gives the exit status, `stops_with` that after a cancel. `calls` is what happened.
    """

    lab: Lab = good_lab
    start_error: Exception | None = None
    stops_with: int = 130
    forever: bool = False
    name: str = "fake"
    calls: list[str] = field(default_factory=list)
    status: int = 0
    stopped: bool = False
    job: Job | None = None
    others: tuple[str, ...] = ()

    def probe(self) -> ExecutorFacts:
        return ExecutorFacts(self.name, "1")

    def prepare(self) -> None:
        self.calls.append("prepare")

    def start(self, job: Job, places: Places) -> Handle:
        self.calls.append("start")
        if self.start_error is not None:
            raise self.start_error
        self.job = job
        handle = Handle(HANDLE_FORMAT, self.name, job.run_id, {"id": 1}, IMAGE, "20.10", True)
        save(places.folder / "handle.json", handle)
        return handle

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        self.calls.append("stream")
        tail = EventTail(out / EVENTS_FILE)
        if self.job is not None:
            self.status = self.lab(out, self.job)
        yield from tail.poll()
        yield None
        while self.forever and not self.stopped:
            yield None
        yield from tail.poll()

    def alive(self, handle: Handle) -> bool:
        return self.forever and not self.stopped

    def cancel(self, handle: Handle, timeout_s: int = 30) -> None:
        self.calls.append(f"cancel {timeout_s}")
        self.stopped = True
        self.status = self.stops_with

    def collect(self, handle: Handle, dest: Path) -> Ending:
        self.calls.append("collect")
        ending = ending_from(
            self.status, out_of_memory=False, log_tail="last words\n", what="container"
        )
        save(dest / ENDING_FILE, ending)
        return ending

    def discard(self, handle: Handle) -> None:
        self.calls.append("discard")

    def running(self) -> tuple[str, ...]:
        return self.others


class Quiet:
    """A reporter that remembers."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.events = 0

    def note(self, text: str) -> None:
        self.notes.append(text)

    def begin(self, job: Job) -> None: ...

    def event(self, event: Event) -> None:
        self.events += 1

    def tick(self) -> None: ...

    def end(self) -> None: ...
