"""The files of recorded runs that go into a bundle. Names come from records, so none is trusted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.bundle.entries import Entry, name_problem
from narrowgauge.bundle.manifest import Contents, LeftOut
from narrowgauge.index import Index
from narrowgauge.index.listed import check_untouched
from narrowgauge.store import Entry as StoredRun
from narrowgauge.store import RunFolder, RunState, Store, read_entry
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.events import EVENTS_FILE
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.outcome import OUTCOME_FILE, SideFile
from narrowgauge_contract.record import Record

__all__ = ["BundledRun", "run_folder_in_bundle", "stored_runs", "take_runs"]


@dataclass(frozen=True)
class BundledRun:
    """A run whose record could be read, with its files."""

    record: Record
    folder: str
    contents: Contents


def run_folder_in_bundle(record: Record) -> str:
    """`runs/<experiment>/<run-id>`."""
    return f"runs/{record.experiment}/{record.run_id}"


def stored_runs(store: Store, names: Sequence[str] = ()) -> list[StoredRun]:
    """The runs called so, or all of a results folder, newest first. What the index refuses is
    damaged here too: it remembers what a record was when it was first seen.

    Raises UnknownNameError.
    """
    with Index(store.root) as index:
        refused = {index.folder(run).path.resolve(): run.problem for run in index.runs()}
    folders = [store.find(name) for name in dict.fromkeys(names)] if names else store.all()
    return [_refused(read_entry(each), refused.get(each.path.resolve(), "")) for each in folders]


def _refused(entry: StoredRun, problem: str) -> StoredRun:
    if not problem or entry.record is None:
        return entry
    what = DamagedRecordError(problem.splitlines()[0])
    return StoredRun(entry.folder, RunState.DAMAGED, problem=what)


def take_runs(stored: Iterable[StoredRun]) -> tuple[tuple[BundledRun, ...], tuple[LeftOut, ...]]:
    """The runs that can be bundled, oldest first, and those that cannot, by name and reason."""
    taken: dict[str, BundledRun] = {}
    left_out = []
    for entry in stored:
        record = entry.record
        if record is None:
            left_out.append(LeftOut(f"the run {entry.folder.name}", _why_not(entry)))
            continue
        untrue = _edited(entry.folder, record)
        if untrue:
            left_out.append(LeftOut(f"the run {entry.folder.name}", untrue))
            continue
        folder = run_folder_in_bundle(record)
        problem = name_problem(folder)
        if not problem and folder in taken:
            problem = f"another run in the results has its id, {taken[folder].folder}"
        if problem:
            left_out.append(LeftOut(f"the run {entry.folder.name}", f"{folder!a}: {problem}"))
            continue
        taken[folder] = BundledRun(record, folder, _files(entry.folder, record, folder))
    order = sorted(taken.values(), key=lambda run: (run.record.run_id, run.folder))
    return tuple(order), tuple(left_out)


def _why_not(entry: StoredRun) -> str:
    if entry.state is RunState.OPEN:
        return f"it has no record: it still runs, or was killed; {entry.folder.how_to_record}"
    return str(entry.problem.what) if entry.problem is not None else "its record cannot be read"


def _edited(folder: RunFolder, record: Record) -> str:
    """Why a record is not what its run wrote; empty where nothing shows that."""
    try:
        check_untouched(folder, record)
    except (NarrowgaugeError, OSError) as error:
        return error.what if isinstance(error, NarrowgaugeError) else str(error)
    return ""


def _files(folder: RunFolder, record: Record, place: str) -> Contents:
    what = f"of the run {record.run_id}"
    known = (
        (folder.record_path, "record.json", "the record"),
        (folder.job_path, "job.json", "the job"),
        (folder.host_path, "host.json", "the host at its start"),
        (folder.events_path, f"out/{EVENTS_FILE}", "the events"),
        (folder.outcome_path, f"out/{OUTCOME_FILE}", "the outcome"),
    )
    entries = [
        Entry(f"{place}/{name}", f"{said} {what}", source=path)
        for path, name, said in known
        if path.is_file()
    ]
    left_out = []
    for side in dict.fromkeys(record.side_files):
        problem = _side_problem(folder.out, side)
        if problem:
            left_out.append(LeftOut(f"the side file {side.path!a} {what}", problem))
            continue
        name = f"{place}/out/{side.path}"
        if name not in {entry.name for entry in entries}:
            entries.append(Entry(name, f"a side file {what}", source=folder.out / side.path))
    return Contents(tuple(entries), tuple(left_out))


def _side_problem(out: Path, side: SideFile) -> str:
    """Why a side file cannot be taken; a record may say anything about where it lies."""
    problem = name_problem(side.path)
    if problem:
        return problem
    path = out / side.path
    if not path.resolve().is_relative_to(out.resolve()):
        return "it is a link to somewhere else"
    if not path.is_file():
        return "it is not there any more"
    if sha256_file(path) != side.sha256:
        return "it is not the file that was recorded"
    return ""
