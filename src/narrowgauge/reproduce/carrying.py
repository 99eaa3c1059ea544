"""Runs the steps of a plan through the launcher, one after the other, and writes down each.

A step that cannot run here does not keep the next from running. What a kill left is found by the
journal: a run whose launcher is gone is taken over first, and a step with a complete record is not
run again.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import DiskFull, Interrupted, NarrowgaugeError, ResultsUnwritable, disk_full
from narrowgauge.launch import World, attach_to, prepare, run_all
from narrowgauge.plan import JobRequest
from narrowgauge.progress import Reporter, duration
from narrowgauge.reproduce.journal import Journal, Note
from narrowgauge.reproduce.planning import ReproducePlan, Step
from narrowgauge.runner import StopRequest
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.outcome import Status

__all__ = ["Carried", "Means", "carry_out", "check_disk"]

#: These end it all: the next run would meet the same.
_FATAL = (DiskFull, ResultsUnwritable, Interrupted)


@dataclass(frozen=True)
class Means:
    """What runs need besides the plan. `clock` is monotonic, in seconds."""

    world: World
    store: Store
    data: Path
    reporter: Reporter
    on: str | None = None
    executor: str = "auto"
    lab_python: Path | None = None
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True)
class Carried:
    """What became of a plan. `steps`: by run, the step that it was made for.

    `problems`: by step, why it came to no complete record. `stopped`: somebody asked to stop.
    `over_budget`: the steps for which no time was left. `seconds`: of all that was done for the
    plan, this time and before.
    """

    steps: dict[str, int]
    problems: dict[int, str]
    over_budget: tuple[int, ...]
    stopped: bool
    seconds: float

    @property
    def finished(self) -> bool:
        return not self.stopped and not self.over_budget


def check_disk(plan: ReproducePlan, results: Path) -> None:
    """Raises DiskFull where the plan's records would not fit, before anything is run."""
    existing = next(folder for folder in (results, *results.parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < plan.disk_gb * 1e9:
        raise disk_full(
            results, f"these runs: {free / 1e9:.2g} GB are left of {plan.disk_gb:.2g} GB needed"
        )


def carry_out(
    plan: ReproducePlan, journal: Journal, means: Means, *, limit_s: float | None = None
) -> Carried:
    """Take every step that is not done yet. `limit_s` stands in for the plan's own budget.

    Raises DiskFull, ResultsUnwritable; Busy where another process is at work on the same occasion.
    """
    begun = means.clock()
    limit = limit_s if limit_s is not None else plan.budget_s
    deadline = None if limit is None else begun + limit
    problems: dict[int, str] = {}
    over: list[int] = []
    stopped = rested = False
    with journal.held():
        earlier = journal.seconds()
        for number, step in enumerate(plan.steps):
            if _done(journal, number, means):
                continue
            if deadline is not None and means.clock() >= deadline:
                over.append(number)
                continue
            if rested:
                means.sleep(plan.cooldown_s)
            left = f", {len(plan.steps) - number - 1} after it"
            means.world.say(f"[{number + 1}/{len(plan.steps)}] {step.command}{left}")
            with _until(deadline, means.clock) as stop:
                problem, interrupted = _take(number, step, plan, journal, means, stop)
            rested = True
            if problem:
                problems[number] = problem
                means.world.say(f"[{number + 1}/{len(plan.steps)}] {problem}")
            if interrupted and not (deadline is not None and means.clock() >= deadline):
                stopped = True
                break
        seconds = means.clock() - begun
        journal.add_session(seconds)
        steps = {note.run: note.step for note in journal.notes() if note.run}
    return Carried(steps, problems, tuple(over), stopped, earlier + seconds)


def _done(journal: Journal, number: int, means: Means) -> bool:
    """Whether the step has a complete record. A run that lost its launcher is recorded first."""
    for run in journal.runs_of(number):
        folder = _folder(means.store, run)
        if folder is None:
            continue
        try:
            if not folder.recorded:
                means.world.say(f"taking over {run}, whose launcher is gone")
                attach_to(means.world, folder, wait=True, reporter=means.reporter)
            if folder.record().status is Status.COMPLETE:
                return True
        except _FATAL:
            raise
        except NarrowgaugeError as error:
            means.world.say(f"{run} is of no use, so its step is run again: {error.what}")
    return False


def _folder(store: Store, run: str) -> RunFolder | None:
    return next((RunFolder(path) for path in store.root.glob(f"*/{run}") if path.is_dir()), None)


def _take(
    number: int,
    step: Step,
    plan: ReproducePlan,
    journal: Journal,
    means: Means,
    stop: StopRequest,
) -> tuple[str, bool]:
    """Run one step. Gives why it came to no complete record, and whether it was interrupted."""
    request = JobRequest(step.experiment, step.profile, step.words, plan.seed)
    begun = means.clock()
    try:
        launch = prepare(
            means.world,
            request,
            means.store.root,
            on=means.on,
            executor=means.executor,
            lab_python=means.lab_python,
        )
        for job in launch.jobs:
            journal.add(Note(number, run=job.run_id))
        finished = run_all(
            means.world,
            launch,
            store=means.store,
            data=means.data,
            wait=True,
            reporter=means.reporter,
            stop=stop,
        )
    except _FATAL:
        raise
    except NarrowgaugeError as error:
        problem = ": ".join(filter(None, (error.what, error.why.replace("\n", "; "))))
        journal.add(Note(number, problem=problem))
        return problem, False
    statuses = [record.status for _, record in finished]
    for folder, record in finished:
        ended = "" if record.status is Status.COMPLETE else f"it is {record.status.value}"
        journal.add(Note(number, folder.name, ended, means.clock() - begun))
    if Status.INTERRUPTED in statuses or len(finished) < len(launch.jobs):
        return f"stopped after {duration(means.clock() - begun)}", True
    if stop.requested:
        return "", True  # it was done by the time that somebody asked to stop
    bad = next((record for _, record in finished if record.status is not Status.COMPLETE), None)
    if bad is None:
        return "", False
    said = bad.error.what if bad.error is not None else ""
    return ": ".join(filter(None, (f"{bad.run_id} is {bad.status.value}", said))), False


@contextmanager
def _until(deadline: float | None, clock: Callable[[], float]) -> Iterator[StopRequest]:
    """A stop request that is made at the deadline, as by Ctrl-C."""
    stop = StopRequest()
    if deadline is None:
        yield stop
        return

    def ask() -> None:
        stop.requested = True

    timer = threading.Timer(max(deadline - clock(), 0.0), ask)
    timer.daemon = True
    timer.start()
    try:
        yield stop
    finally:
        timer.cancel()
