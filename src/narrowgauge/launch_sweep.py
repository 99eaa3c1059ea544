"""Starts the runs of a sweep: here, one at a time; over boards; or as arrays on a cluster."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from narrowgauge.errors import Interrupted, NarrowgaugeError
from narrowgauge.launch import Launch, World, attach_to, prepare, run_all
from narrowgauge.plan import NATIVE, JobRequest
from narrowgauge.progress import Reporter
from narrowgauge.runner import StopRequest
from narrowgauge.slurm.asking import SlurmAsk
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import Record

if TYPE_CHECKING:
    from narrowgauge.executors.slurm import SlurmExecutor
    from narrowgauge.fleet.hosts import Board
    from narrowgauge.fleet.ready import Fleet

__all__ = ["FleetStarter", "HereStarter", "SlurmStarter", "here", "on_boards", "on_slurm"]

Finished = Callable[[RunFolder, Record], None]
#: Slurm's own default of MaxArraySize is 1001. Boards take as many from one list.
_ARRAY = 1000


@dataclass
class HereStarter:
    """On this host: one run at a time, or they would measure each other."""

    world: World
    launch: Launch
    store: Store
    data: Path
    wait: bool
    reporter: Reporter
    most: int = 1

    @property
    def target(self) -> str:
        return self.launch.jobs[0].target

    def __call__(self, jobs: Sequence[Job], finished: Finished) -> None:
        for job in jobs:
            launch = dataclasses.replace(self.launch, jobs=(job,))
            self.launch = dataclasses.replace(self.launch, reason="")  # once is enough
            done = run_all(
                self.world, launch, store=self.store, data=self.data, wait=self.wait,
                reporter=self.reporter,
            )  # fmt: skip
            for folder, record in done:
                finished(folder, record)
                if record.exit_code == ExitCode.INTERRUPTED:
                    return

    def attach(self, folder: RunFolder) -> Record:
        return attach_to(self.world, folder, wait=self.wait, reporter=self.reporter)


@dataclass
class FleetStarter:
    """Over boards: one run at a time on each device, and the next point to whichever is free.

    A device that cannot go on (its board is away, busy, or takes no data) does no more of this
    sweep; what it had not begun goes to the others.
    """

    world: World
    fleet: Fleet
    store: Store
    data: Path
    wait: bool
    reporter: Reporter
    errors: TextIO
    target: str
    by_one_request: int = _ARRAY

    @property
    def most(self) -> int:
        return self.by_one_request if self.fleet.seats else 0

    def __call__(self, jobs: Sequence[Job], finished: Finished) -> Sequence[NarrowgaugeError]:
        from narrowgauge.fleet.ready import bring_data
        from narrowgauge.launch_fleet import run_fleet

        self.fleet, problems = bring_data(self.world, self.fleet, jobs, self.data)
        fleet = dataclasses.replace(self.fleet, jobs=(tuple(jobs),), spread=True)
        done = run_fleet(
            self.world, fleet, store=self.store, data=self.data, wait=self.wait,
            errors=self.errors, reporter=self.reporter, told=finished,
        )  # fmt: skip
        lost = {(seat.board.name, seat.device) for seat in done.lost}
        left = [each for each in fleet.seats if (each.board.name, each.device) not in lost]
        self.fleet = dataclasses.replace(self.fleet, seats=tuple(left))
        problems += done.problems
        if done.stopped:
            for problem in problems:
                self.reporter.note("error: " + str(problem).replace("\n", "\n  "))
            raise Interrupted("stopped")
        return problems

    def attach(self, folder: RunFolder) -> Record:
        return attach_to(self.world, folder, wait=self.wait, reporter=self.reporter)


@dataclass
class SlurmStarter:
    """On a cluster: as many at once as an array may hold."""

    world: World
    executor: SlurmExecutor
    store: Store
    data: Path
    reporter: Reporter
    target: str = NATIVE
    most: int = _ARRAY

    def __call__(self, jobs: Sequence[Job], finished: Finished) -> None:
        from narrowgauge.launch_slurm import run_slurm

        run_slurm(
            self.world, self.executor, jobs, store=self.store, data=self.data,
            reporter=self.reporter, stop=StopRequest(), finished=finished,
        )  # fmt: skip

    def attach(self, folder: RunFolder) -> Record:
        return attach_to(self.world, folder, wait=True, reporter=self.reporter)


def here(
    world: World,
    request: JobRequest,
    store: Store,
    data: Path,
    reporter: Reporter,
    *,
    on: str | None,
    executor: str,
    lab_python: Path | None,
    wait: bool,
) -> HereStarter:
    """`request`: one of the sweep's, by which executor and target are chosen for all."""
    launch = prepare(world, request, store.root, on=on, executor=executor, lab_python=lab_python)
    return HereStarter(world, launch, store, data, wait, reporter)


def on_boards(
    world: World,
    request: JobRequest,
    boards: Sequence[Board],
    store: Store,
    data: Path,
    reporter: Reporter,
    *,
    wait: bool,
    searches: bool,
    errors: TextIO,
) -> FleetStarter:
    """For `--host`, `--all` and `--label`: the boards are made ready for `request`, one of the
    sweep's. `searches`: the next points depend on what came of others, so no more are asked for
    than there are devices. Raises what `prepare_fleet` raises."""
    from narrowgauge.fleet.ready import prepare_fleet

    fleet = prepare_fleet(world, request, boards, store.root, data, spread=True)
    most = len(fleet.seats) if searches else _ARRAY
    target = fleet.seats[0].target.name
    return FleetStarter(world, fleet, store, data, wait, reporter, errors, target, most)


def on_slurm(
    world: World,
    ask: SlurmAsk,
    store: Store,
    data: Path,
    reporter: Reporter,
    *,
    on: str | None,
    lab_python: Path | None,
) -> SlurmStarter:
    """For `--executor slurm`. Raises what `target_of` and `prepare_slurm` raise."""
    from narrowgauge.launch_slurm import prepare_slurm, target_of

    target = target_of(world, ask, on)
    executor = prepare_slurm(world, ask, store.root, lab_python)
    return SlurmStarter(world, executor, store, data, reporter, target.name if target else NATIVE)
