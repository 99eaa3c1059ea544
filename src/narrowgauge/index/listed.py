"""What the index keeps of a run: what a list shows and filters by."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.store import Entry, RunFolder, RunState, age_of, read_entry, status_word
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.record import Record

__all__ = ["Listed", "check_untouched", "listed"]

#: Longer than any sentence of ours; a record is anybody's text.
_MOST_TEXT = 2000


@dataclass(frozen=True)
class Listed:
    """One run. `folder` is relative to the results folder; `size` and `mtime_ns` are of its
    record, and -1 where there is none. `problem`: why it is refused; empty where it is not."""

    folder: str
    size: int
    mtime_ns: int
    digest: str
    age: str
    run_id: str
    experiment: str
    status: str
    profile: str | None = None
    target: str | None = None
    device: str | None = None
    started_utc: float | None = None
    seconds: float | None = None
    rows: int | None = None
    valid_rows: int | None = None
    headline: str = ""
    problem: str = ""


def listed(root: Path, folder: RunFolder, size: int, mtime_ns: int) -> Listed:
    """Read a run for the index. Never raises for a damaged one: its problem is what is kept."""
    entry = _checked(read_entry(folder))
    headline, entry = _headline(entry)
    record = entry.record
    inside = record.inside if record else None
    return Listed(
        folder=str(folder.path.relative_to(root)),
        size=size,
        mtime_ns=mtime_ns,
        digest=digest_of(folder.record_path) if size >= 0 else "",
        age=age_of(folder),
        run_id=folder.name,
        experiment=entry.experiment,
        status=status_word(entry),
        profile=record.profile if record else None,
        target=record.target if record else None,
        device=(inside.accelerator or inside.cpu) if inside else None,
        started_utc=record.started_utc if record else None,
        seconds=record.seconds if record else None,
        rows=len(record.rows) if record else None,
        valid_rows=len(record.valid_rows()) if record else None,
        headline=headline[:_MOST_TEXT],
        problem=str(entry.problem)[:_MOST_TEXT] if entry.problem else "",
    )


def digest_of(path: Path) -> str:
    """sha256 of a file; empty where it cannot be read, which reading the record says better."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def check_untouched(folder: RunFolder, record: Record) -> None:
    """Raise DamagedRecordError where the rows are not those of the outcome beside the record.

    A record is composed from the outcome, once: whoever changes a figure in one alone is seen.
    """
    outcome = folder.outcome()
    # By text, in which NaN equals itself.
    if outcome is not None and dumps(outcome.rows) != dumps(record.rows):
        raise DamagedRecordError(
            f"{folder.record_path} was edited: its rows are not those of {folder.outcome_path}",
            why="a record is composed from the outcome once, and never changed after",
            next_step="run it again; neither of the two can be trusted",
        )


def _headline(entry: Entry) -> tuple[str, Entry]:
    """The headline figure; a record whose declaration is not one is damaged."""
    from narrowgauge.show import headline_text

    try:
        return headline_text(entry), entry
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        foreign = DamagedRecordError(
            f"{entry.folder.record_path} holds no declaration of an experiment", why=repr(error)
        )
        return "", Entry(entry.folder, RunState.DAMAGED, problem=foreign)


def _checked(entry: Entry) -> Entry:
    if entry.record is None:
        return entry
    try:
        check_untouched(entry.folder, entry.record)
    except NarrowgaugeError as error:
        return Entry(entry.folder, RunState.DAMAGED, problem=error)
    return entry
