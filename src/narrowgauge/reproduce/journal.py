"""A plan and what became of its steps, on disk: what a kill leaves is enough to go on from.

    <results>/reproduce/<name>/{plan.json, journal.jsonl, lock, judged}

`judged` is there as soon as every step was taken and judged: such an occasion is finished.
The journal is only ever appended to, a line before a run starts and one after it ended. A line that
a kill cut short is not read, and whether a run ended is asked of its record, never of the journal.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import Busy, NarrowgaugeError, UsageError, results_unwritable
from narrowgauge.reproduce.planning import PLAN_FORMAT, ReproducePlan
from narrowgauge_contract.codec import decode, dumps, read_json, write_atomic, write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError

__all__ = ["FOLDER", "Journal", "Note", "new_journal", "unfinished_journal"]

FOLDER = "reproduce"
_PLAN_FILE, _JOURNAL_FILE, _LOCK_FILE = "plan.json", "journal.jsonl", "lock"
_JUDGED_FILE = "judged"
#: The step of a note that is about the whole: how long one start of the program worked on it.
_ALL_STEPS = -1


@dataclass(frozen=True)
class Note:
    """A line. `step` counts from 0. `run`: the run's id; empty where none was started.

    `problem`: why a step came to no run; `seconds`: how long an ended run took. With step -1 it is
    about the whole: for how long the program, started once, worked on it.
    """

    step: int
    run: str = ""
    problem: str = ""
    seconds: float | None = None


@dataclass(frozen=True)
class Journal:
    """The folder of one occasion."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def finished(self) -> bool:
        return (self.path / _JUDGED_FILE).is_file()

    def finish(self, judged: Path) -> None:
        """Mark it as finished; `judged` holds the verdicts."""
        write_atomic(self.path / _JUDGED_FILE, f"{judged.name}\n".encode())

    def plan(self) -> ReproducePlan:
        """Raises DamagedRecordError."""
        file = self.path / _PLAN_FILE
        try:
            data = read_json(file)
        except OSError as error:
            raise DamagedRecordError(f"{file} cannot be read", why=str(error)) from error
        if isinstance(data, dict) and data.get("format") != PLAN_FORMAT:
            raise DamagedRecordError(f"{file} has format {data.get('format')!r} of plans")
        return decode(ReproducePlan, data, str(file))

    def add(self, note: Note) -> None:
        """Append a line, for good."""
        line = dumps(note, indent=None).encode()
        descriptor = os.open(self.path / _JOURNAL_FILE, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line  # a kill cut the last line short
            while line:
                line = line[os.write(descriptor, line) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def notes(self) -> tuple[Note, ...]:
        """What was noted, in order; lines that are none are passed over."""
        try:
            lines = (self.path / _JOURNAL_FILE).read_text(errors="replace").splitlines()
        except FileNotFoundError:
            return ()
        return tuple(_notes(lines))

    def runs_of(self, step: int) -> tuple[str, ...]:
        """The runs that were started for a step, oldest first."""
        found = (note.run for note in self.notes() if note.step == step and note.run)
        return tuple(dict.fromkeys(found))

    def add_session(self, seconds: float) -> None:
        """Note how long the program, started once, worked on it."""
        self.add(Note(_ALL_STEPS, seconds=seconds))

    def seconds(self) -> float:
        """What all starts of the program took. Of one that was killed, its ended runs count."""
        total = runs = 0.0
        for note in self.notes():
            if note.step == _ALL_STEPS:
                total, runs = total + (note.seconds or 0.0), 0.0
            else:
                runs += note.seconds or 0.0
        return total + runs

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the occasion: two processes that take the same steps would take each twice.

        Raises Busy. The lock goes with the process, however that ends.
        """
        descriptor = os.open(self.path / _LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise Busy(
                    f"another process is at work on {self.name}",
                    why=f"it holds {self.path / _LOCK_FILE}",
                    next_step="wait for it to end, or start one of your own without --resume",
                ) from error
            yield
        finally:
            os.close(descriptor)


def new_journal(results: Path, plan: ReproducePlan) -> Journal:
    """A folder of its own for a plan. Raises ResultsUnwritable."""
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    path = results / FOLDER / f"{stamp}-{secrets.token_hex(3)}"
    try:
        path.mkdir(parents=True)
        write_json_atomic(path / _PLAN_FILE, plan)
    except OSError as error:
        raise results_unwritable(results, error.strerror or str(error)) from error
    return Journal(path)


def unfinished_journal(results: Path, name: str | None = None) -> Journal:
    """The newest occasion that was cut short, or the one of that name, finished or not.

    Raises UsageError where there is none.
    """
    found = sorted((p.parent for p in (results / FOLDER).glob(f"*/{_PLAN_FILE}")), reverse=True)
    if name is not None:
        named = next((path for path in found if path.name == name), None)
        if named is None:
            raise UsageError(
                f"--resume takes the name of what was cut short, and '{name}' is none",
                why=f"in {results / FOLDER} are {', '.join(p.name for p in found[:5]) or 'none'}",
                next_step="its claims are those that it began with: name no others",
            )
        return Journal(named)
    journals = (Journal(path) for path in found)
    newest = next((journal for journal in journals if not journal.finished), None)
    if newest is None:
        raise UsageError(
            f"there is nothing to resume in {results}",
            why=f"the {len(found)} that were begun there are finished" if found else "",
            next_step="start without --resume",
        )
    return newest


def _notes(lines: list[str]) -> Iterator[Note]:
    for line in lines:
        try:
            yield decode(Note, json.loads(line), "journal")
        except (ValueError, NarrowgaugeError):
            continue
