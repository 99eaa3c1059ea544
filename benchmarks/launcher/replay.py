"""A launcher's whole run over an events file of a million lines, and what memory that takes.

Everything is the true code but the executor: its run is over from the start and left its events.
"""

# ruff: noqa: ARG002 - an executor without a process needs few of its arguments

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "src"))

import narrowgauge.cli.app
import narrowgauge.executors.docker  # noqa: F401 - a true launcher holds the SDK in memory too
from narrowgauge.checkout import Checkout
from narrowgauge.executors.base import HANDLE_FORMAT, Ending, ExecutorFacts, Handle, save
from narrowgauge.launch import World, start_facts
from narrowgauge.machine import probe_host
from narrowgauge.plan import JobRequest, Places, plan_jobs
from narrowgauge.progress import LiveReporter
from narrowgauge.runner import Session, StopRequest, run_job
from narrowgauge.store import Store
from narrowgauge_contract.codec import encode
from narrowgauge_contract.events import EVENTS_FILE, Event, EventKind, EventTail
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).resolve().parents[2]


class Replay:
    """The executor of a run that wrote `count` events and was then killed: they are folded."""

    name = "docker"

    def __init__(self, count: int) -> None:
        self.count = count
        self.streaming_mb = 0.0

    def probe(self) -> ExecutorFacts:
        return ExecutorFacts(self.name, "")

    def prepare(self) -> None: ...

    def start(self, job: Job, places: Places) -> Handle:
        write_events(places.out / EVENTS_FILE, self.count)
        handle = Handle(HANDLE_FORMAT, self.name, job.run_id, {})
        save(places.folder / "handle.json", handle)
        return handle

    def stream(self, handle: Handle, out: Path) -> Iterator[Event | None]:
        for number, event in enumerate(EventTail(out / EVENTS_FILE).poll()):
            yield event
            if number % 20_000 == 0:
                yield None
        self.streaming_mb = peak_mb()

    def alive(self, handle: Handle) -> bool:
        return False

    def cancel(self, handle: Handle, timeout_s: int = 0) -> None: ...

    def collect(self, handle: Handle, dest: Path) -> Ending:
        return Ending(32, Status.UNFINISHED, "")

    def discard(self, handle: Handle) -> None: ...

    def running(self) -> tuple[str, ...]:
        return ()


def peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def write_events(path: Path, count: int) -> None:
    """Nine progress events to one metric event, as a long training run would write."""
    inside = {"python": "3", "platform": "p"}
    head = {"inside": inside, "source_hash": "", "experiment_hash": ""}
    with open(path, "w", encoding="utf-8") as stream:

        def put(kind: EventKind, row: int | None, data: dict[str, object]) -> None:
            event = encode(Event(kind, time.monotonic(), time.time(), row, data))
            stream.write(json.dumps(event, separators=(",", ":")) + "\n")

        put(EventKind.RUN_START, None, head)
        put(EventKind.ROW_START, 0, {"repeat": 0, "seed": 0, "parameters": {}})
        for number in range(count - 2):
            if number % 10:
                put(EventKind.PROGRESS, 0, {"done": number, "total": count, "unit": "image"})
            else:
                metric = {"name": "train_loss", "unit": "", "source": "count"}
                put(EventKind.METRIC, 0, {**metric, "values": [1 / (number + 1)]})


def main() -> None:
    count = int(sys.argv[1])
    world = World(Checkout(ROOT), {}, probe_host(), print)
    spec = load_spec(ROOT / "experiments" / "mnist" / "experiment.toml")
    job = plan_jobs(spec, JobRequest("mnist", "smoke", ("data=synthetic",), 0), "cpu")[0]
    replay = Replay(count)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="narrowgauge-replay-") as place:
        session = Session(
            executor=replay,
            store=Store(Path(place)),
            experiments=ROOT / "experiments",
            data=Path(place),
            start_facts=lambda engine: start_facts(world, engine),
            reporter=LiveReporter(sys.stderr),
            stop=StopRequest(),
        )
        _, record = run_job(job, session)
    metric = record.rows[0].metric("train_loss")
    assert metric is not None
    assert len(metric.values) == (count - 2 + 9) // 10
    said = {
        "streaming_mb": replay.streaming_mb,
        "recorded_mb": peak_mb(),
        "seconds": time.monotonic() - began,
    }
    print(json.dumps(said))


if __name__ == "__main__":
    main()
