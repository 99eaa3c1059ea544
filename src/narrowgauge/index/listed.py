"""What the index keeps of a run: what a list shows and filters by."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.index.untouched import check_untouched
from narrowgauge.json_text import parse_json
from narrowgauge.store import Entry, RunFolder, RunState, age_of, read_entry, status_word
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.record import parse_record

__all__ = ["Listed", "Witness", "check_untouched", "digest_of_bytes", "listed"]

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


#: Is given each sound run that has to be read, and its record as parsed JSON, which is its to keep.
Witness = Callable[[Listed, Any], None]


def listed(
    root: Path, folder: RunFolder, size: int, mtime_ns: int, witness: Witness | None = None
) -> Listed:
    """Read a run for the index. Never raises for a damaged one: its problem is what is kept."""
    entry, digest, document = _read_once(folder)
    headline, entry = _headline(entry)
    record = entry.record
    inside = record.inside if record else None
    found = Listed(
        folder=str(folder.path.relative_to(root)),
        size=size,
        mtime_ns=mtime_ns,
        digest=digest if size >= 0 else "",
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
    if witness is not None and document is not None and not found.problem:
        witness(found, document)
    return found


def digest_of(path: Path) -> str:
    """sha256 of a file; empty where it cannot be read, which reading the record says better."""
    try:
        return digest_of_bytes(path.read_bytes())
    except OSError:
        return ""


def digest_of_bytes(raw: bytes) -> str:
    """sha256, as the index keeps it."""
    return hashlib.sha256(raw).hexdigest()


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


def _read_once(folder: RunFolder) -> tuple[Entry, str, Any]:
    """A run, checked, the digest of its record and its JSON, for all of which one reading serves.
    The JSON is None where there is none or it is of no use."""
    try:
        raw = folder.record_path.read_bytes()
        document = parse_json(raw)
        record = parse_record(document, str(folder.record_path))
    except (OSError, ValueError, RecursionError, NarrowgaugeError):
        # Not recorded, or damaged: what reads it for everybody says what is wrong with it.
        return read_entry(folder), digest_of(folder.record_path), None
    try:
        check_untouched(folder, record, (raw, document))
    except NarrowgaugeError as error:
        return Entry(folder, RunState.DAMAGED, problem=error), digest_of_bytes(raw), None
    return Entry(folder, RunState.RECORDED, record=record), digest_of_bytes(raw), document
