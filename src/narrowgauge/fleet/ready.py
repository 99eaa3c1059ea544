"""Makes boards ready for runs: each is asked, judged, and brought what it lacks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from narrowgauge.catalog import load_experiment
from narrowgauge.errors import NarrowgaugeError, NotApplicableError
from narrowgauge.fleet.clock import require_clock
from narrowgauge.fleet.facts import (
    BoardState,
    Questions,
    ask_board,
    require_devices,
    require_tools,
    target_of,
)
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.images import Images, bring_image, names_of
from narrowgauge.fleet.link import Link, Patience
from narrowgauge.fleet.seat import Seat
from narrowgauge.fleet.sending import data_files, require_architecture, send_data
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs, read_request
from narrowgauge.runner import check_results, check_results_early
from narrowgauge.selection import check_experiment
from narrowgauge.targets import Target, load_targets
from narrowgauge_contract.job import Job

if TYPE_CHECKING:
    from narrowgauge.launch import World

__all__ = ["Fleet", "bring_data", "prepare_fleet"]

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Fleet:
    """Boards that are ready: their links and seats, and the jobs, one list for each seat; with
    `spread`, one list for all. `brought`: by board, the data sets that are on it."""

    links: Mapping[str, Link]
    seats: tuple[Seat, ...]
    jobs: tuple[tuple[Job, ...], ...]
    spread: bool
    brought: Mapping[str, frozenset[str]] = field(default_factory=dict)

    @property
    def asked(self) -> int:
        """How many runs there will be."""
        return sum(len(jobs) for jobs in (self.jobs[:1] if self.spread else self.jobs))

    def close(self) -> None:
        """End what was left open for runs that were not started."""
        for link in self.links.values():
            link.close()


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
    links = {board.name: Link(board, world.env, patience or Patience()) for board in boards}
    questions = _questions(world, boards, targets, planned)
    images = Images(world)

    def know(board: Board) -> _Known:
        state = ask_board(links[board.name], questions[board.name])
        require_tools(board, state)
        require_clock(board.name, state.clock)
        target = target_of(targets, board, state)
        require_devices(board, state, target)
        check_experiment(spec, target, targets, state.host)
        return _Known(board, links[board.name], state, target)

    try:
        known = _all_at_once(know, boards, images.engine)
        if spread:
            _require_one_target(known)
        fetch_data(world, planned, data)
        seats = _seats(world, known, images, planned, data)
        check_results(results)
    except BaseException:
        for link in links.values():
            link.close()
        raise
    lists: list[tuple[Job, ...]] = []
    for each in seats[:1] if spread else seats:
        jobs = planned if not lists else plan_jobs(spec, read, NATIVE)
        lists.append(tuple(dataclasses.replace(job, target=each.target.name) for job in jobs))
    there = frozenset(_data_sets(planned))
    return Fleet(links, seats, tuple(lists), spread, {board.name: there for board in boards})


def bring_data(
    world: World, fleet: Fleet, jobs: Sequence[Job], data: Path
) -> tuple[Fleet, list[NarrowgaugeError]]:
    """What jobs need besides what was brought before. Gives the fleet without the boards to which
    it could not be brought, and why; raises what keeps it from being had on this host."""
    names = _data_sets(jobs)
    seats = {seat.board.name: seat for seat in fleet.seats}
    lack = {
        name: [each for each in names if each not in fleet.brought.get(name, ())] for name in seats
    }
    if not any(lack.values()):
        return fleet, []
    fetch_data(world, jobs, data)

    def bring(name: str) -> NarrowgaugeError | None:
        folder = f"{seats[name].data_folder}/data"
        try:
            # What it answered at first may be of hours ago, so it is asked again.
            send_data(fleet.links[name], lack[name], data, folder, world.say, {})
        except NarrowgaugeError as error:
            return error
        return None

    wanting = [name for name in seats if lack[name]]
    failed = {
        name: error
        for name, error in zip(wanting, _all_at_once(bring, wanting), strict=True)
        if error is not None
    }
    left = tuple(seat for seat in fleet.seats if seat.board.name not in failed)
    brought = {
        name: fleet.brought.get(name, frozenset()) | set(lack[name])
        for name in seats
        if name not in failed
    }
    return dataclasses.replace(fleet, seats=left, brought=brought), list(failed.values())


def fetch_data(world: World, jobs: Sequence[Job], data: Path) -> None:
    """Have the data sets of jobs on this host."""
    from narrowgauge_contract.data_commands import LAUNCHER
    from narrowgauge_data import ensure
    from narrowgauge_data.caller import Caller

    for names in dict.fromkeys(job.data_sets for job in jobs):
        ensure(names, data, Caller(world.say, world.env, LAUNCHER))


def _questions(
    world: World, boards: Sequence[Board], targets: Mapping[str, Target], jobs: Sequence[Job]
) -> dict[str, Questions]:
    """What each board is asked by the way: whether it has image and data already. Every target that
    it may turn out to have counts."""
    files = tuple(data_files(_data_sets(jobs)))
    names: dict[str | None, tuple[str, ...]] = {}
    for target in {board.target for board in boards}:
        may_be = [each for each in targets.values() if target in (None, each.name)]
        names[target] = names_of(world.checkout.root, may_be)
    return {board.name: Questions(names[board.target], files) for board in boards}


def _require_one_target(known: Sequence[_Known]) -> None:
    if len({each.target.name for each in known}) > 1:
        raise NotApplicableError(
            "runs of one list cannot be spread over boards of several targets",
            why=", ".join(f"{each.board.name}: {each.target.name}" for each in known),
            next_step="name boards of one target; `run` without --spread has each board run all",
        )


def _seats(
    world: World, known: Sequence[_Known], images: Images, jobs: Sequence[Job], data: Path
) -> tuple[Seat, ...]:
    """Bring image and data to every board."""
    chosen = {
        target.name: images.choose(
            target, [(each.link, each.state) for each in known if each.target is target]
        )
        for target in {each.target.name: each.target for each in known}.values()
    }

    def seat(each: _Known) -> list[Seat]:
        image = chosen[each.target.name]
        architecture = str(image.inspected["Architecture"])
        require_architecture(each.link, architecture, each.state.host.architecture)
        there = bring_image(world, each.link, each.state, image)
        folder = f"{each.state.folder(each.board.data)}/data"
        send_data(each.link, _data_sets(jobs), data, folder, world.say, each.state.files)
        return [
            Seat(each.board, device, each.state, each.target, image.facts, there)
            for device in each.board.devices
        ]

    return tuple(seat for found in _all_at_once(seat, known) for seat in found)


def _data_sets(jobs: Sequence[Job]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for job in jobs for name in job.data_sets))


def _all_at_once(
    call: Callable[[T], R], things: Sequence[T], beside: Callable[[], object] | None = None
) -> list[R]:
    """Each in a thread of its own: a board that is slow to answer keeps no other waiting. `beside`
    is done in the meantime."""
    with ThreadPoolExecutor(max_workers=len(things) + 1) as pool:
        found = [pool.submit(call, thing) for thing in things]
        if beside is not None:
            beside()
        return [each.result() for each in found]
