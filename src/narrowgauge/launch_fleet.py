"""Runs on boards elsewhere: serial on each device, all devices at once, one record for each run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TextIO, TypeAlias

from narrowgauge.checkout import git_facts
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.executors.base import Handle, load_handle
from narrowgauge.executors.ssh import SshExecutor
from narrowgauge.fleet.facts import ask_board
from narrowgauge.fleet.job_list import JobList
from narrowgauge.fleet.link import Link
from narrowgauge.fleet.ready import Fleet
from narrowgauge.fleet.seat import Seat, board_of
from narrowgauge.launch import World, draw_quietly
from narrowgauge.progress import LineReporter, Reporter
from narrowgauge.recording import StartFacts
from narrowgauge.runner import Session, StopRequest, attach, run_job, stop_signals
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.record import Record

__all__ = ["Finished", "attach_fleet", "forget_there", "run_fleet"]

#: Called for each run as it is recorded, in the thread that waits for all.
Told: TypeAlias = Callable[[RunFolder, Record], None]


@dataclass(frozen=True)
class _Lost:
    """A device that does no more, and why."""

    seat: Seat
    error: Exception


#: What a worker tells: a run that is recorded, what kept it from going on, or that it has ended.
_Told: TypeAlias = tuple[RunFolder, Record] | _Lost | None


@dataclass
class Finished:
    """What came of it: the records, what kept jobs from one, the devices where that was, and
    whether somebody asked to stop."""

    runs: list[tuple[RunFolder, Record]] = field(default_factory=list)
    problems: list[NarrowgaugeError] = field(default_factory=list)
    lost: list[Seat] = field(default_factory=list)
    stopped: bool = False


def run_fleet(
    world: World,
    fleet: Fleet,
    *,
    store: Store,
    data: Path,
    wait: bool,
    errors: TextIO,
    reporter: Reporter,
    told: Told | None = None,
) -> Finished:
    """Run every job. One board's failure does not keep the others; where jobs are spread, those
    that it could not start go to the others. `told` hears of each run as it is recorded."""
    stop = StopRequest()
    done: queue.SimpleQueue[_Told] = queue.SimpleQueue()
    shared = JobList(fleet.jobs[0]) if fleet.spread else None
    alone = len(fleet.seats) == 1
    git = git_facts(world.checkout.root)
    workers = []
    executors: list[SshExecutor] = []
    for position, seat in enumerate(fleet.seats):
        teller = reporter if alone else _BoardReporter(_name(seat), errors)
        jobs = shared if shared is not None else JobList(fleet.jobs[position])
        executor = SshExecutor(
            world.env,
            link=fleet.links[seat.board.name],
            seat=seat,
            wait=wait,
            say=teller.note,
            stopped=lambda: stop.requested,
            begun=jobs.begun,
        )
        executors.append(executor)
        session = Session(
            executor=executor,
            store=store,
            experiments=world.checkout.experiments,
            data=data,
            start_facts=partial(_facts_of, StartFacts(seat.state.machine, git)),
            reporter=teller,
            stop=stop,
        )
        workers.append(threading.Thread(target=_work, args=(seat, jobs, session, done, alone)))

    def tell(folder: RunFolder, record: Record) -> None:
        draw_quietly(folder, store, world.say)
        if told is not None:
            told(folder, record)

    try:
        with stop_signals(stop):
            finished = _gather(workers, done, executors, tell)
    finally:
        fleet.close()
    finished.stopped = stop.requested
    return finished


def attach_fleet(world: World, folder: RunFolder, reporter: Reporter) -> Record:
    """Take a run on a board over, from a launcher that is gone."""
    handle = load_handle(folder.handle_path)
    link = Link(board_of(handle), world.env)
    store = Store(folder.path.parent.parent)
    stop = StopRequest()

    def start_facts(engine: str | None) -> StartFacts:
        del engine  # the board says it again
        return StartFacts(ask_board(link).machine, git_facts(world.checkout.root))

    session = Session(
        executor=SshExecutor(
            world.env, link=link, say=reporter.note, stopped=lambda: stop.requested
        ),
        store=store,
        experiments=world.checkout.experiments,
        data=folder.path,
        start_facts=start_facts,
        reporter=reporter,
        stop=stop,
    )
    with stop_signals(stop):
        record = attach(folder, session)
    draw_quietly(folder, store, world.say)
    return record


def forget_there(world: World, handle: Handle) -> None:
    """Remove from its board what is left of a run that is recorded here, as where a line was cut
    when the board was told to. What cannot be removed now is said."""
    link = Link(board_of(handle), world.env)
    SshExecutor(world.env, link=link, say=world.say).discard(handle)


class _BoardReporter(LineReporter):
    """Lines that begin with the board's name, since several speak at once."""

    def __init__(self, name: str, stream: TextIO) -> None:
        super().__init__(stream)
        self._name = name

    def note(self, text: str) -> None:
        self._stream.write(f"{self._name}: {text}\n")
        self._stream.flush()


def _facts_of(known: StartFacts, engine: str | None) -> StartFacts:
    """The board said what it is when it was asked, its engine's version among it."""
    del engine
    return known


def _name(seat: Seat) -> str:
    several = len(seat.board.devices) > 1
    return f"{seat.board.name}/{seat.device}" if several else seat.board.name


def _work(
    seat: Seat, jobs: JobList, session: Session, done: queue.SimpleQueue[_Told], alone: bool
) -> None:
    """One device's jobs, one after the other. Ends with None, whatever happens."""
    try:
        while (job := jobs.take(lambda: session.stop.requested)) is not None:
            try:
                done.put(run_job(job, session))
                jobs.begun(job.run_id)
            except Exception as error:
                if (session.store.root / job.experiment / job.run_id).exists():
                    jobs.begun(job.run_id)
                else:
                    jobs.give_back(job)
                if isinstance(error, NarrowgaugeError) and not alone:
                    session.reporter.note(f"no more runs here: {error.what}")
                done.put(_Lost(seat, error))
                return  # what keeps one job from this device keeps the next from it too
    finally:
        done.put(None)


def _gather(
    workers: Sequence[threading.Thread],
    done: queue.SimpleQueue[_Told],
    executors: Sequence[SshExecutor],
    tell: Told,
) -> Finished:
    """Start the workers, and draw here what they finish: drawing is not for many threads. Raises
    what is no error of ours once all have ended."""
    finished = Finished()
    faults: list[Exception] = []
    for worker in workers:
        worker.start()
    left = len(workers)
    while left:
        try:
            found = done.get()
        except KeyboardInterrupt:
            for executor in executors:
                executor.kill_all()
            continue
        if found is None:
            left -= 1
        elif isinstance(found, _Lost):
            if isinstance(found.error, NarrowgaugeError):
                finished.lost.append(found.seat)
                finished.problems.append(found.error)
            else:
                faults.append(found.error)
        else:
            finished.runs.append(found)
            try:
                tell(*found)
            except Exception as error:
                faults.append(error)  # the others are to be recorded first
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    return finished
