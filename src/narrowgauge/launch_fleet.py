"""Runs on boards elsewhere: serial on each device, all devices at once, one record for each run."""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO, TypeAlias, TypeVar

from narrowgauge.catalog import load_experiment
from narrowgauge.checkout import git_facts
from narrowgauge.errors import (
    DockerPermission,
    DockerUnavailable,
    NarrowgaugeError,
    NotApplicableError,
    ToolchainMissing,
)
from narrowgauge.executors.base import load_handle
from narrowgauge.executors.ssh import SshExecutor
from narrowgauge.fleet.clock import require_clock
from narrowgauge.fleet.facts import BoardState, ask_board, require_devices, require_tools, target_of
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.job_list import JobList
from narrowgauge.fleet.link import Link, Patience
from narrowgauge.fleet.seat import Seat, board_of
from narrowgauge.fleet.sending import (
    board_image,
    require_architecture,
    require_same,
    send_data,
    send_image,
)
from narrowgauge.launch import World, draw_quietly
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs, read_request
from narrowgauge.progress import LineReporter, Reporter
from narrowgauge.recording import StartFacts
from narrowgauge.runner import (
    Session,
    StopRequest,
    attach,
    check_results,
    check_results_early,
    run_job,
    stop_signals,
)
from narrowgauge.selection import check_experiment
from narrowgauge.store import RunFolder, Store
from narrowgauge.targets import Target, load_targets
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import Record

__all__ = ["Finished", "Fleet", "attach_fleet", "prepare_fleet", "run_fleet"]

Say = Callable[[str], None]
T = TypeVar("T")
R = TypeVar("R")
#: What a worker tells: a run that is recorded, what kept it from going on, or that it has ended.
_Told: TypeAlias = tuple[RunFolder, Record] | Exception | None


@dataclass(frozen=True)
class Fleet:
    """Boards that are ready: their links and seats, and the jobs, one list for each seat; with
    `spread`, one list for all."""

    links: Mapping[str, Link]
    seats: tuple[Seat, ...]
    jobs: tuple[tuple[Job, ...], ...]
    spread: bool

    @property
    def asked(self) -> int:
        """How many runs there will be."""
        return sum(len(jobs) for jobs in (self.jobs[:1] if self.spread else self.jobs))


@dataclass
class Finished:
    """What came of it: the records, and what kept jobs from one."""

    runs: list[tuple[RunFolder, Record]] = field(default_factory=list)
    problems: list[NarrowgaugeError] = field(default_factory=list)


@dataclass(frozen=True)
class _Known:
    """A board and what it answered."""

    board: Board
    link: Link
    state: BoardState
    target: Target


def prepare_fleet(
    world: World,
    request: JobRequest,
    boards: Sequence[Board],
    results: Path,
    data: Path,
    *,
    spread: bool,
    patience: Patience | None = None,
) -> Fleet:
    """Ask every board, choose its target, bring image and data to it. What is wrong with a board is
    raised before anything is sent to any. Raises NotApplicableError, BoardUnreachable, WrongImage,
    BoardUnfit, HostKeyRefused, DockerUnavailable."""
    check_results_early(results)
    spec = load_experiment(world.checkout.experiments, request.experiment)
    read = read_request(spec, request)
    planned = plan_jobs(spec, read, NATIVE)
    targets = load_targets(world.checkout.targets_file)

    def know(board: Board) -> _Known:
        link = Link(board, world.env, patience or Patience())
        state = ask_board(link)
        require_tools(board, state)
        require_clock(board.name, state.clock)
        target = target_of(targets, board, state)
        require_devices(board, state, target)
        check_experiment(spec, target, targets, state.host)
        return _Known(board, link, state, target)

    known = _all_at_once(know, boards)
    if spread and len({each.target.name for each in known}) > 1:
        raise NotApplicableError(
            "runs of one list cannot be spread over boards of several targets",
            why=", ".join(f"{each.board.name}: {each.target.name}" for each in known),
            next_step="name boards of one target; or leave --spread out: each board then runs all",
        )
    images = _images(world, known)
    _fetch(world, planned, data)

    def seat(each: _Known) -> list[Seat]:
        inspected, facts = images[each.target.name]
        require_architecture(
            each.link, str(inspected["Architecture"]), each.state.host.architecture
        )
        there = _bring_image(world, each, inspected, facts.name)
        names = tuple(dict.fromkeys(name for job in planned for name in job.data_sets))
        folder = each.state.folder(each.board.data)
        send_data(each.link, names, data, f"{folder}/data", world.say)
        return [
            Seat(each.board, device, each.state, each.target, facts, there)
            for device in each.board.devices
        ]

    seats = tuple(seat for found in _all_at_once(seat, known) for seat in found)
    check_results(results)
    lists: list[tuple[Job, ...]] = []
    for each in seats[:1] if spread else seats:
        jobs = planned if not lists else plan_jobs(spec, read, NATIVE)
        lists.append(tuple(dataclasses.replace(job, target=each.target.name) for job in jobs))
    return Fleet({each.board.name: each.link for each in known}, seats, tuple(lists), spread)


def run_fleet(
    world: World,
    fleet: Fleet,
    *,
    store: Store,
    data: Path,
    wait: bool,
    errors: TextIO,
    reporter: Reporter,
) -> Finished:
    """Run every job. One board's failure does not keep the others; where jobs are spread, those
    that it could not start go to the others."""
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
        workers.append(threading.Thread(target=_work, args=(jobs, session, done)))
    with stop_signals(stop):
        return _gather(world, workers, done, store, executors)


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


def _work(jobs: JobList, session: Session, done: queue.SimpleQueue[_Told]) -> None:
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
                done.put(error)
                return  # what keeps one job from this device keeps the next from it too
    finally:
        done.put(None)


def _gather(
    world: World,
    workers: Sequence[threading.Thread],
    done: queue.SimpleQueue[_Told],
    store: Store,
    executors: Sequence[SshExecutor],
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
        elif isinstance(found, NarrowgaugeError):
            finished.problems.append(found)
        elif isinstance(found, Exception):
            faults.append(found)
        else:
            finished.runs.append(found)
            draw_quietly(found[0], store, world.say)
    for worker in workers:
        worker.join()
    if faults:
        raise faults[0]
    return finished


def _fetch(world: World, jobs: Sequence[Job], data: Path) -> None:
    from narrowgauge_contract.data_commands import LAUNCHER
    from narrowgauge_data import ensure
    from narrowgauge_data.caller import Caller

    for job in jobs:
        ensure(job.data_sets, data, Caller(world.say, world.env, LAUNCHER))


def _images(world: World, known: Sequence[_Known]) -> dict[str, tuple[Mapping[str, Any], Any]]:
    """For each target the one image that all its boards must have: this host's, or where it has
    none what was built on a board, or else built here now. What an engine says, and the facts."""
    from narrowgauge.images.inspect import find_image

    found: dict[str, tuple[Mapping[str, Any], Any]] = {}
    local: Any = None
    try:
        local = _local_engine(world)
    except (DockerUnavailable, DockerPermission, ToolchainMissing) as error:
        world.say(f"no image can be sent from here: {error.what}")
    # unverified: images built on a board by DOCKER_HOST | no arm64 board | build one so, and run
    for each in known:
        if each.target.name in found:
            continue
        asked = [local] if local is not None else []
        asked += [_on_board(other.link) for other in known if other.target is each.target]
        for inspect in asked:
            facts = find_image(inspect, world.checkout.root, each.target)
            if facts is not None:
                # A stand-in is found by another name than its own.
                found[each.target.name] = (inspect(facts.digest) or {}, facts)
                break
        else:
            if local is None:
                raise NotApplicableError(
                    f"there is no image of target '{each.target.name}', here or on the boards",
                    why="no Docker engine answers here, so none can be built or sent",
                    next_step=f"build it on the board: DOCKER_HOST=ssh://{each.board.login}"
                    f" narrowgauge images build {each.target.name}",
                )
            from narrowgauge.images.build import ensure_image

            facts = ensure_image(world.checkout.root, each.target, world.env, world.say)
            found[each.target.name] = (local(facts.digest) or {}, facts)
    return found


def _local_engine(world: World) -> Callable[[str], Mapping[str, Any] | None]:
    from narrowgauge.executors.docker_client import connect, inspect_image

    client = connect(world.env)
    return lambda name: inspect_image(client, name)


def _on_board(link: Link) -> Callable[[str], Mapping[str, Any] | None]:
    return lambda name: board_image(link, name)


def _bring_image(world: World, each: _Known, inspected: Mapping[str, Any], name: str) -> str:
    """The image's id on the board, which has it afterwards."""
    from narrowgauge.images.client import find_client

    there = board_image(each.link, name) or board_image(each.link, str(inspected["Id"]))
    if there is not None:
        return require_same(each.link, there, inspected, name)
    docker = find_client(None, world.env).executable
    # A stand-in is here by another name than the one that its content gives it.
    tags = inspected.get("RepoTags") or [name]
    sent = name if name in tags else str(tags[0])
    return send_image(each.link, inspected, sent, docker, world.env, world.say)


def _all_at_once(call: Callable[[T], R], things: Sequence[T]) -> list[R]:
    """Each in a thread of its own: a board that is slow to answer keeps no other waiting."""
    with ThreadPoolExecutor(max_workers=max(1, len(things))) as pool:
        return list(pool.map(call, things))
