"""Runs a sweep: what is not done yet, one by one or as arrays, each written down as it ends.

A sweep that was stopped, or whose launcher was killed, goes on by the same command: what is
recorded is not run again, and what still runs is taken over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from narrowgauge.errors import (
    DamagedRecordError,
    Interrupted,
    NarrowgaugeError,
    UsageError,
)
from narrowgauge.fleet.errors import BoardUnreachable
from narrowgauge.store import RunFolder, Store
from narrowgauge.sweep.file import SweepSpec
from narrowgauge.sweep.journal import Journal
from narrowgauge.sweep.points import Point, job_of, point_of, points_of, varied
from narrowgauge.sweep.search import Search
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["Conductor", "Progress", "Starter"]

Say = Callable[[str], None]


class Starter(Protocol):
    """What runs jobs. `most`: how many by one request, 0 where no more can be started; `target`:
    what their records call it."""

    @property
    def most(self) -> int: ...

    @property
    def target(self) -> str: ...

    def __call__(
        self, jobs: Sequence[Job], finished: Callable[[RunFolder, Record], None]
    ) -> Sequence[NarrowgaugeError] | None:
        """Run them; `finished` is called as each is recorded. Interrupted ones end it early, or
        Interrupted is raised. Gives what kept some of them from a record, where others went on."""

    def attach(self, folder: RunFolder) -> Record:
        """Take over a run that another launcher started."""


@dataclass(frozen=True)
class Progress:
    """Of so many points so many are done; whether somebody stopped it, and what else kept points
    from being done."""

    points: int
    done: int
    stopped: bool
    problems: tuple[NarrowgaugeError, ...] = ()


class Conductor:
    """One sweep in one results folder."""

    def __init__(
        self, sweep: SweepSpec, spec: ExperimentSpec, store: Store, journal: Journal, say: Say
    ) -> None:
        self._sweep = sweep
        self._spec = spec
        self._store = store
        self._journal = journal
        self._say = say
        self._stopped = False
        self._problems: list[NarrowgaugeError] = []
        #: Points whose runs cannot be asked about now, and may go on.
        self._away: set[str] = set()

    def run(self, start: Starter) -> Progress:
        """Do what is left. Raises Busy, and what starting a run raises; a run that failed does not
        end the sweep, one that was interrupted does."""
        if self._sweep.file.method == "optuna":
            return self._search(start)
        with self._journal.alone():
            points = points_of(self._sweep)
            self._take_over(start)
            known = self._journal.entries()
            left = [p for p in points if p.key not in known or not known[p.key].complete]
            self._say(f"{len(points) - len(left)} of {len(points)} points are done")
            left = [point for point in left if point.key not in self._away]
            while left and start.most and not self._stopped:
                batch, left = left[: start.most], left[start.most :]
                self._start(start, batch)
            known = self._journal.entries()
            done = sum(p.key in known and known[p.key].complete for p in points)
            return Progress(len(points), done, self._stopped, tuple(self._problems))

    def _start(self, start: Starter, points: Iterable[Point]) -> None:
        jobs = []
        for point in points:
            job = job_of(self._sweep, self._spec, point, start.target)
            self._journal.started(point.key, job.run_id, dict(varied(self._sweep, point)))
            jobs.append(job)

        def note(folder: RunFolder, record: Record) -> None:
            del folder
            self._note(record)

        self._hand_over(start, jobs, note)

    def _hand_over(
        self, start: Starter, jobs: Sequence[Job], note: Callable[[RunFolder, Record], None]
    ) -> None:
        try:
            self._problems += start(jobs, note) or ()
        except Interrupted:
            self._stopped = True

    def _note(self, record: Record) -> dict[str, float]:
        figures = self._journal.ended(record.run_id, record)
        self._stopped = self._stopped or record.exit_code == ExitCode.INTERRUPTED
        return figures

    def _take_over(self, start: Starter) -> None:
        """Runs of this sweep that were begun and not written down: recorded, or still running."""
        for entry in self._journal.entries().values():
            if entry.exit_code is None:
                try:
                    record = self._recover(start, entry.run_id)
                except BoardUnreachable as error:
                    self._leave(entry.run_id, error)
                    self._away.add(entry.key)
                    continue
                if record is not None:
                    self._note(record)
        self._stopped = False

    def _recover(self, start: Starter, run_id: str) -> Record | None:
        """The record of a run that was begun; None where its point has to be run again. Raises what
        says nothing of the run: an engine or a controller that does not answer, a full disk."""
        folder = self._folder(run_id)
        try:
            if folder.recorded:
                return folder.record()
            if folder.handle_path.is_file():
                self._say(f"taking over {run_id}")
                return start.attach(folder)
        except (UsageError, DamagedRecordError) as error:
            self._say(f"{run_id} cannot be taken over ({error.what}); its point is run again")
        return None

    def _leave(self, run_id: str, error: BoardUnreachable) -> None:
        """A run that may go on, on a board that does not answer: it is not run twice."""
        self._say(f"{run_id} is left as it is: {error.what}")
        error.next_step = (
            "the same command takes it over when the board is back; where it will not be, remove"
            f" {self._folder(run_id).path}, and its point is run elsewhere"
        )
        self._problems.append(error)

    def _folder(self, run_id: str) -> RunFolder:
        return RunFolder(self._store.root / self._sweep.file.experiment / run_id)

    def _search(self, start: Starter) -> Progress:
        search = Search(self._sweep, self._journal.folder)
        for owner, count in search.elsewhere().items():
            self._say(
                f"{count} trials belong to launchers on {owner}, and count as running; if those are"
                " gone, the same command there takes them over"
            )
        for trial, run_id in search.orphans():
            try:
                record = self._recover(start, run_id) if run_id else None
            except BoardUnreachable as error:
                self._leave(run_id, error)
                continue
            figures = self._note(record) if record is not None else {}
            search.tell(trial, figures, record is not None and bool(record.valid_rows()))
        self._stopped = False
        while search.left and start.most and not self._stopped:
            asked: dict[str, int] = {}
            jobs = []
            for _ in range(min(start.most, search.left)):
                trial, values = search.next()
                point = point_of(self._sweep, values)
                job = job_of(self._sweep, self._spec, point, start.target)
                search.started(trial, job.run_id)
                self._journal.started(f"{point.key}-{trial}", job.run_id, values)
                asked[job.run_id] = trial
                jobs.append(job)

            def note(folder: RunFolder, record: Record, asked: dict[str, int] = asked) -> None:
                del folder
                figures = self._note(record)
                search.tell(asked.pop(record.run_id), figures, bool(record.valid_rows()))

            try:
                self._hand_over(start, jobs, note)
            finally:
                for run_id, trial in asked.items():
                    # What was started goes on without this launcher, and is an orphan's then; for
                    # the points of what was not, others may ask.
                    if not self._folder(run_id).handle_path.is_file():
                        search.tell(trial, {}, False)
        runs = self._sweep.file.runs
        return Progress(runs, runs - search.left, self._stopped, tuple(self._problems))
