"""Whether a record is still what was composed, by what it was composed from.

`compose` is pure: the job, the outcome and what the host saw give the record again. What only the
host knows (`host`, `events_damaged`) has no second witness, and is not compared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.json_text import members_of, parse_json
from narrowgauge.store import RunFolder
from narrowgauge_contract.codec import dumps, encode
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.events import EventTail
from narrowgauge_contract.outcome import Outcome, Status
from narrowgauge_contract.record import Record, compose

__all__ = ["check_untouched"]

_OF_THE_JOB = (
    "run_id", "experiment", "profile", "target", "seed", "parameters", "synthetic", "data_sets",
    "spec", "plan",
)  # fmt: skip
_OF_THE_OUTCOME = (
    "rows", "inside", "status", "exit_code", "error", "started_utc", "ended_utc", "seconds",
)  # fmt: skip
#: Made from what the outcome says, and from the host's image.
_MADE = ("side_files", "hashes")


def check_untouched(
    folder: RunFolder, record: Record, read: tuple[bytes, Any] | None = None
) -> None:
    """Raise DamagedRecordError where the record is not what its job and its outcome give.

    `read`: the record as text and as parsed JSON, where the caller has them, from which equality is
    told without building a single object. Whatever is not equal there is compared as values. Where
    the outcome was of no use, the rows came from the events, and are compared with those.
    """
    if read is not None and _same_documents(folder, *read):
        return
    outcome, damage = _outcome_of(folder)
    if damage is not None or (outcome is not None and outcome.run_id != record.run_id):
        _check_events(folder, record, damage)
    elif outcome is not None:
        _check_composed(folder, record, outcome)
    elif record.status is Status.COMPLETE:
        raise _edited(
            folder, f"it says that the run is complete, and {folder.outcome_path} is not there"
        )


def _same_documents(folder: RunFolder, raw: bytes, document: Any) -> bool:
    """Whether the three files, as they lie there, say the same. False decides nothing."""
    try:
        job = parse_json(folder.job_path.read_bytes())
        outcome = _outcome_beside(folder, raw, document)
        image = (document["host"] or {}).get("image")
        hashes = {
            "image": image["digest"] if image else None,
            "source": outcome["source_hash"],
            "experiment": outcome["experiment_hash"],
        }
        beside = [each for row in outcome["rows"] for each in row["side_files"]]
        return (
            outcome["run_id"] == document["run_id"]
            and document["hashes"] == hashes
            and document["side_files"] == beside
            and all(document.get(name) == job.get(name) for name in _OF_THE_JOB)
            and all(document[name] == outcome[name] for name in _OF_THE_OUTCOME)
        )
    except (OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        return False


def _outcome_beside(folder: RunFolder, raw: bytes, document: Any) -> dict[str, Any]:
    """The outcome as parsed JSON. Its rows, which are nearly all of it, are not parsed where they
    are the record's letter by letter."""
    members = members_of(folder.outcome_path.read_bytes())
    if members["rows"] == members_of(raw)["rows"]:
        del members["rows"]
        return {**{n: parse_json(text) for n, text in members.items()}, "rows": document["rows"]}
    return {name: parse_json(text) for name, text in members.items()}


def _outcome_of(folder: RunFolder) -> tuple[Outcome | None, DamagedRecordError | None]:
    """The outcome, or why the one that is there cannot be read."""
    try:
        return folder.outcome(), None
    except DamagedRecordError as error:
        return None, error


def _check_composed(folder: RunFolder, record: Record, outcome: Outcome) -> None:
    if folder.job_path.is_file():
        names: Sequence[str] = (*_OF_THE_JOB, *_OF_THE_OUTCOME, *_MADE)
        true = compose(folder.job(), outcome, (), record.host)
        source = f"{folder.job_path.name} and {folder.outcome_path} beside it"
    else:
        # The lab alone may have been told to write its record elsewhere than its job.
        names, source = _OF_THE_OUTCOME, str(folder.outcome_path)
        true = dataclasses.replace(record, **{name: getattr(outcome, name) for name in names})
    _compare(folder, record, true, names, source)


def _check_events(folder: RunFolder, record: Record, damage: DamagedRecordError | None) -> None:
    """Raises `damage` where there are no events either."""
    if folder.job_path.is_file() and folder.events_path.is_file():
        true = compose(folder.job(), None, EventTail(folder.events_path).poll(), record.host)
        _compare(folder, record, true, ("rows", "inside", "side_files"), str(folder.events_path))
    elif damage is not None:
        raise damage
    else:
        raise _edited(folder, f"{folder.outcome_path} is of another run, and no events are there")


def _compare(
    folder: RunFolder, record: Record, true: Record, names: Sequence[str], source: str
) -> None:
    # By text, in which NaN equals itself.
    apart = [name for name in names if _text(record, name) != _text(true, name)]
    if apart:
        raise _edited(folder, f"{source} give other values of {', '.join(apart)}")


def _text(record: Record, name: str) -> str:
    value: Mapping[str, Any] = {name: getattr(record, name)}
    return dumps(encode(value))


def _edited(folder: RunFolder, what: str) -> DamagedRecordError:
    return DamagedRecordError(
        f"{folder.record_path} was edited: {what}",
        why="a record is composed once, from its job and its outcome, and never changed after",
        next_step="run it again; neither can be trusted",
    )
