"""The results folder: where runs lie, how they are found again, and that a record is written once.

    <root>/<experiment>/<run-id>/{job.json, handle.json, host.json, out/, record.json, derived/}

What the lab did without the launcher (a container started by hand, `--results results`) holds the
same files one level higher and has no `out`; `--out results/here` puts them anywhere. Both are
found too.
"""

from __future__ import annotations

import enum
import errno
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import UnknownRun, UsageError, disk_full, results_unwritable
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError, UnknownNameError
from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_contract.job import Job, load_job
from narrowgauge_contract.outcome import OUTCOME_FILE, Outcome, Status, load_outcome
from narrowgauge_contract.record import RECORD_FILE, Record, load_record, write_record

__all__ = [
    "JOB_FILE",
    "LATEST",
    "STATUS_WORDS",
    "Entry",
    "RunFolder",
    "RunState",
    "Store",
    "age_of",
    "read_entry",
    "status_word",
]

JOB_FILE = "job.json"
HANDLE_FILE = "handle.json"
HOST_FILE = "host.json"
OUT_FOLDER = "out"
DERIVED_FOLDER = "derived"
#: `latest` is the newest run, `latest:mnist` the newest of one experiment.
LATEST = "latest"

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
_READ_ONLY = 0o444


class RunState(enum.Enum):
    """What a run's folder holds."""

    RECORDED = "recorded"
    #: No record yet: still running, or killed; `RunFolder.how_to_record` composes the record.
    OPEN = "open"
    DAMAGED = "damaged"


#: What `status_word` says of a run.
STATUS_WORDS = (*(status.value for status in Status), RunState.OPEN.value, RunState.DAMAGED.value)


@dataclass(frozen=True)
class RunFolder:
    """The folder of one run. Nothing in it but `derived` changes once it is recorded."""

    path: Path

    @property
    def name(self) -> str:
        """The folder's name, which for a launched run is its run id."""
        return self.path.name

    @property
    def job_path(self) -> Path:
        return self.path / JOB_FILE

    @property
    def handle_path(self) -> Path:
        return self.path / HANDLE_FILE

    @property
    def host_path(self) -> Path:
        return self.path / HOST_FILE

    @property
    def record_path(self) -> Path:
        return self.path / RECORD_FILE

    @property
    def derived(self) -> Path:
        return self.path / DERIVED_FOLDER

    @property
    def out(self) -> Path:
        """Where the lab wrote; side files are relative to it."""
        return self.path / OUT_FOLDER if self.launched else self.path

    @property
    def launched(self) -> bool:
        """Whether the launcher made this folder; else the lab filled it alone."""
        return (self.path / OUT_FOLDER).is_dir()

    @property
    def how_to_record(self) -> str:
        """The command that composes the record, where there is none."""
        if self.launched:
            return f"narrowgauge attach {self.name}"
        return f"PYTHONPATH=src python3 -m narrowgauge_lab record --out {self.path}"

    @property
    def events_path(self) -> Path:
        return self.out / EVENTS_FILE

    @property
    def outcome_path(self) -> Path:
        return self.out / OUTCOME_FILE

    @property
    def recorded(self) -> bool:
        return self.record_path.is_file()

    def job(self) -> Job:
        """Raises DamagedRecordError, also where there is no job.json."""
        if not self.job_path.is_file():
            raise DamagedRecordError(f"{self.path} has no {JOB_FILE}")
        return load_job(self.job_path)

    def outcome(self) -> Outcome | None:
        """What the lab said at its end; None where it did not get that far."""
        return load_outcome(self.outcome_path) if self.outcome_path.is_file() else None

    def record(self) -> Record:
        """Raises DamagedRecordError, also where nothing is recorded yet."""
        if not self.recorded:
            raise DamagedRecordError(
                f"the run {self.name} has no record yet",
                why="it is still running, or was killed, or its launcher ended before it",
                next_step=self.how_to_record,
            )
        return load_record(self.record_path)

    def write_record(self, record: Record) -> None:
        """Write the record, once, and make it read-only.

        Raises UsageError where there is one already, DiskFull, ResultsUnwritable.
        """
        try:
            write_record(self.record_path, record)
            self.record_path.chmod(_READ_ONLY)
        except FileExistsError as error:
            raise UsageError(
                f"the run {self.name} is already recorded",
                why=str(error),
                next_step=f"narrowgauge show {self.name}",
            ) from error
        except OSError as error:
            raise _named(error, self.record_path, "the record") from error


@dataclass(frozen=True)
class Entry:
    """A run as a list shows it: what could be read of it, and what could not."""

    folder: RunFolder
    state: RunState
    record: Record | None = None
    job: Job | None = None
    problem: NarrowgaugeError | None = None

    @property
    def experiment(self) -> str:
        """The experiment's id; for a damaged run the folder that it lies in."""
        known = self.record or self.job
        return known.experiment if known else self.folder.path.parent.name


@dataclass(frozen=True)
class Store:
    """All runs below `root`, which need not exist yet."""

    root: Path

    def new_run(self, job: Job) -> RunFolder:
        """Make the run's folder and write its job.json.

        Raises UsageError where the run id is taken, ResultsUnwritable, DiskFull.
        """
        folder = RunFolder(self.root / job.experiment / job.run_id)
        try:
            folder.path.parent.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir()
            (folder.path / OUT_FOLDER).mkdir()
            write_json_atomic(folder.job_path, job)
        except FileExistsError as error:
            if folder.path.is_dir():
                raise UsageError(
                    f"the run {job.run_id} exists already", why=f"its folder is {folder.path}"
                ) from error
            raise results_unwritable(self.root, f"{error.filename} is in the way") from error
        except OSError as error:
            raise _named(error, self.root, "the run's folder") from error
        return folder

    def all(self) -> Iterator[RunFolder]:
        """Every run, newest first."""
        yield from sorted(self._folders(), key=_age, reverse=True)

    def of(self, experiment: str) -> Iterator[RunFolder]:
        """Every run of one experiment, newest first; only runs that lie elsewhere are read."""
        for folder in self.all():
            place = folder.path.parent
            if place == self.root:
                if read_entry(folder).experiment == experiment:
                    yield folder
            elif place.name == experiment:
                yield folder

    def entries(self) -> Iterator[Entry]:
        """Every run with what can be read of it, newest first. Damaged runs are listed as such."""
        for folder in self.all():
            yield read_entry(folder)

    def find(self, run: str) -> RunFolder:
        """The run called so: a unique beginning of its id, or the end of it after a '-',
        `latest`, `latest:EXPERIMENT`, or a path. Raises UnknownNameError."""
        if os.sep in run:
            folder = RunFolder(Path(run))
            if _is_run(folder.path):
                return folder
        folders = list(self.all())
        word, _, experiment = run.partition(":")
        if word == LATEST:
            return self._latest(folders, experiment)
        named = [f for f in folders if any(name == run for name in _names(f))]
        found = named or [f for f in folders if any(_matches(name, run) for name in _names(f))]
        if len(found) == 1:
            return found[0]
        names = [f.name for f in found or folders]
        where = f"(it begins {len(found)} run ids)" if found else f"in {self.root}"
        raise UnknownRun(run, names, of=len(folders), where=where)

    def _latest(self, folders: list[RunFolder], experiment: str) -> RunFolder:
        if not experiment:
            if folders:
                return folders[0]
            raise UnknownNameError("run", LATEST, (), where=f"in {self.root}")
        known = {read_entry(folder).experiment: folder for folder in reversed(folders)}
        if experiment in known:
            return known[experiment]
        raise UnknownNameError("experiment", experiment, known, where=f"with runs in {self.root}")

    def _folders(self) -> Iterator[RunFolder]:
        try:
            first = [path for path in self.root.iterdir() if path.is_dir()]
            for path in first:
                if _is_run(path):
                    yield RunFolder(path)
                    continue
                yield from (RunFolder(sub) for sub in path.iterdir() if _is_run(sub))
        except FileNotFoundError:
            return
        except PermissionError as error:
            raise results_unwritable(self.root, f"{error.filename} cannot be read") from error


def read_entry(folder: RunFolder) -> Entry:
    """What can be read of a run; never raises for a damaged one."""
    try:
        if folder.recorded:
            return Entry(folder, RunState.RECORDED, record=folder.record())
        return Entry(folder, RunState.OPEN, job=folder.job())
    except NarrowgaugeError as error:
        return Entry(folder, RunState.DAMAGED, job=_job_or_none(folder), problem=error)
    except OSError as error:
        unreadable = DamagedRecordError(f"{folder.path} cannot be read", why=str(error))
        return Entry(folder, RunState.DAMAGED, problem=unreadable)


def status_word(entry: Entry) -> str:
    """How a run stands, in one of STATUS_WORDS."""
    return entry.record.status.value if entry.record is not None else entry.state.value


def _job_or_none(folder: RunFolder) -> Job | None:
    try:
        return folder.job()
    except (NarrowgaugeError, OSError):
        return None


def _is_run(path: Path) -> bool:
    return (path / JOB_FILE).is_file() or (path / RECORD_FILE).is_file()


def _names(folder: RunFolder) -> tuple[str, ...]:
    """A launched run's folder is its id; the lab alone writes where it is told, so ask its job."""
    if folder.out != folder.path:
        return (folder.name,)
    job = _job_or_none(folder)
    return (folder.name, job.run_id) if job else (folder.name,)


def _matches(name: str, run: str) -> bool:
    return bool(run) and (name.startswith(run) or name.endswith(f"-{run}"))


def _age(folder: RunFolder) -> tuple[str, int, str]:
    """Run ids begin with their second; two of the same second are told apart by their files."""
    run_id = _names(folder)[-1]
    try:
        written = folder.job_path.stat().st_mtime_ns
    except OSError:
        written = 0
    return run_id.partition("-")[0], written, run_id


def age_of(folder: RunFolder) -> str:
    """A text that sorts runs by age as `Store.all` does."""
    second, written, run_id = _age(folder)
    return f"{second} {written:020d} {run_id}"


def _named(error: OSError, place: Path, what: str) -> NarrowgaugeError:
    if error.errno in _NO_ROOM:
        return disk_full(place, what)
    return results_unwritable(place, f"{error.strerror}: {error.filename or place}")
