"""The Record: everything about one run, written once by whoever started it, never changed after.

Statistics are not in it. They are computed on reading, so that a better statistic needs no new run.
"""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any, Dict, Iterable, Optional, Tuple

from narrowgauge_contract.codec import LATER, decode, read_json, write_json_atomic
from narrowgauge_contract.errors import (
    DamagedRecordError,
    ExitCode,
    NarrowgaugeError,
    UsageError,
)
from narrowgauge_contract.events import Event
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import (
    ErrorInfo,
    Fold,
    InsideFacts,
    Outcome,
    Row,
    SideFile,
    Status,
)

__all__ = [
    "HOST_NOTE_FORMAT",
    "RECORD_FILE",
    "RECORD_FORMAT",
    "BoardFacts",
    "GitFacts",
    "Hashes",
    "HostFacts",
    "HostNote",
    "ImageFacts",
    "MachineFacts",
    "Record",
    "SchedulerFacts",
    "Weights",
    "compose",
    "load_host_note",
    "load_record",
    "write_record",
]

RECORD_FILE = "record.json"
#: 1: first.
RECORD_FORMAT = 1
#: 1: first.
HOST_NOTE_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class ImageFacts:
    """The image a container ran. `stand_in`: built on a stand-in base, so never REPRODUCED."""

    name: str
    digest: str
    base: str
    base_digest: Optional[str]
    content_tag: str
    stand_in: bool = False


@dataclasses.dataclass(frozen=True)
class Hashes:
    """Three sha256: the image, the lab and kernels source, the experiment's folder."""

    image: Optional[str]
    source: str
    experiment: str


@dataclasses.dataclass(frozen=True)
class GitFacts:
    """The commit the experiment came from, and whether the tree differed from it."""

    commit: str
    dirty: bool


@dataclasses.dataclass(frozen=True)
class MachineFacts:
    """The host, as the launcher saw it. None: not there, or not readable."""

    kernel: str
    machine: str
    system: str
    cpu: str
    cpu_count: int
    memory_bytes: int
    docker: Optional[str] = None
    driver: Optional[str] = None
    l4t: Optional[str] = None
    power_mode: Optional[str] = None
    clocks: Dict[str, Any] = dataclasses.field(default_factory=dict)
    gpus: Tuple[Dict[str, Any], ...] = ()


@dataclasses.dataclass(frozen=True)
class Weights:
    """Weights the run used, by content, and the recipe that made them."""

    name: str
    sha256: str
    recipe: str


@dataclasses.dataclass(frozen=True)
class SchedulerFacts:
    """What a cluster's scheduler gave a run. `nodes`: those it ran on, the first of which recorded.

    `indicative`: why its figures may hold those of other people's jobs too; empty where the nodes
    were the run's alone. `restarts`: how often it was put back into the queue. Where the image was
    converted for the site, `archive_sha256` and `converted_sha256` are of the files before and
    after.
    """

    name: str
    version: str
    job: str
    partition: str
    nodes: Tuple[str, ...]
    indicative: str
    restarts: int = 0
    converter: Optional[str] = None
    archive_sha256: Optional[str] = None
    converted_sha256: Optional[str] = None


@dataclasses.dataclass(frozen=True)
class BoardFacts:
    """The board that a launcher elsewhere ran this on. `clock_skew_s`: how far its clock was ahead
    of the launcher's, to within `clock_bound_s`, both in seconds."""

    name: str
    address: str
    device: str
    clock_skew_s: float
    clock_bound_s: float


@dataclasses.dataclass(frozen=True)
class HostFacts:
    """All that the launcher knows and the lab cannot: where it ran, and how it ended."""

    executor: str
    machine: MachineFacts
    exit_code: int
    status: Status
    image: Optional[ImageFacts] = None
    git: Optional[GitFacts] = None
    cache_cold: Optional[bool] = None
    exceptions: Tuple[str, ...] = ()
    weights: Tuple[Weights, ...] = ()
    log_tail: str = ""
    error: Optional[ErrorInfo] = None
    scheduler: Optional[SchedulerFacts] = dataclasses.field(default=None, metadata=LATER)
    board: Optional[BoardFacts] = dataclasses.field(default=None, metadata=LATER)


@dataclasses.dataclass(frozen=True)
class HostNote:
    """What a script on the host wrote down for the lab before it started a container.

    The launcher needs none: it composes the record itself.
    """

    format: int
    executor: str
    machine: MachineFacts
    image: Optional[ImageFacts] = None
    git: Optional[GitFacts] = None
    exceptions: Tuple[str, ...] = ()

    def host_facts(
        self, exit_code: int, status: Status, error: Optional[ErrorInfo] = None
    ) -> HostFacts:
        """The host's part of a record, once it is known how the run ended.

        `error`: what the host saw of that end, and the lab could not.
        """
        return HostFacts(
            self.executor,
            self.machine,
            exit_code,
            status,
            self.image,
            self.git,
            exceptions=self.exceptions,
            error=error,
        )


@dataclasses.dataclass(frozen=True)
class Record:
    """One run. `host` is None when the lab was started without the launcher.

    `started_utc` and `ended_utc` are seconds since the epoch; `seconds` is a monotonic duration.
    `events_damaged` counts event lines that could not be read when the record was composed.
    """

    format: int
    run_id: str
    experiment: str
    profile: str
    target: str
    seed: int
    parameters: Dict[str, Any]
    synthetic: bool
    data_sets: Tuple[str, ...]
    status: Status
    exit_code: int
    hashes: Hashes
    rows: Tuple[Row, ...]
    host: Optional[HostFacts]
    inside: Optional[InsideFacts]
    started_utc: Optional[float]
    ended_utc: Optional[float]
    seconds: Optional[float]
    spec: Dict[str, Any]
    plan: Optional[Dict[str, Any]] = None
    error: Optional[ErrorInfo] = None
    events_damaged: int = 0
    side_files: Tuple[SideFile, ...] = ()

    def valid_rows(self) -> Tuple[Row, ...]:
        return tuple(row for row in self.rows if row.validity.valid)


def compose(
    job: Job,
    outcome: Optional[Outcome],
    events: Iterable[Event],
    host_facts: Optional[HostFacts],
    *,
    events_damaged: int = 0,
) -> Record:
    """Put a run together. Only without an outcome are the events read, for the rows.

    The host's word on how it ended wins where the lab left none.
    """
    if outcome is None:
        fold = _fold_leniently(events)
        rows, inside = fold.rows(), fold.inside
        source, experiment = fold.source_hash, fold.experiment_hash
        times = (fold.started_utc, fold.last_utc, fold.seconds if fold.started_utc else None)
        status = host_facts.status if host_facts else Status.UNFINISHED
        exit_code = host_facts.exit_code if host_facts else int(ExitCode.KILLED)
        error = host_facts.error if host_facts else None
    else:
        rows, inside = outcome.rows, outcome.inside
        source, experiment = outcome.source_hash, outcome.experiment_hash
        times = (outcome.started_utc, outcome.ended_utc, outcome.seconds)
        status, exit_code, error = outcome.status, outcome.exit_code, outcome.error
    image = host_facts.image.digest if host_facts and host_facts.image else None
    return Record(
        format=RECORD_FORMAT,
        run_id=job.run_id,
        experiment=job.experiment,
        profile=job.profile,
        target=job.target,
        seed=job.seed,
        parameters=job.parameters,
        synthetic=job.synthetic,
        data_sets=job.data_sets,
        status=status,
        exit_code=exit_code,
        hashes=Hashes(image, source, experiment),
        rows=rows,
        host=host_facts,
        inside=inside,
        started_utc=times[0],
        ended_utc=times[1],
        seconds=times[2],
        spec=job.spec,
        plan=job.plan,
        error=error,
        events_damaged=events_damaged,
        side_files=tuple(side_file for row in rows for side_file in row.side_files),
    )


def _fold_leniently(events: Iterable[Event]) -> Fold:
    """Fold what can be folded: after a crash, one odd event must not cost all the others."""
    fold = Fold()
    for event in events:
        try:
            fold.add(event)
        except (NarrowgaugeError, KeyError, ValueError):
            continue
    return fold


def write_record(path: Path, record: Record) -> None:
    """Write a record once. FileExistsError where there is one: records are never overwritten."""
    if path.exists():
        raise FileExistsError(f"{path} is already written; records are never changed")
    write_json_atomic(path, record)


def load_record(path: Path) -> Record:
    """Read record.json or a gzipped reference record, of this format or an older one.

    Raises DamagedRecordError.
    """
    data = _read_gzip(path) if path.suffix == ".gz" else read_json(path)
    return parse_record(data, str(path))


def parse_record(data: Any, where: str) -> Record:
    """Check parsed JSON. Older formats are brought up to this one here, step by step."""
    if not isinstance(data, dict) or "format" not in data:
        raise DamagedRecordError(f"{where} is not a record: it has no 'format'")
    if data["format"] != RECORD_FORMAT:
        raise DamagedRecordError(
            f"{where} has record format {data['format']!r}, this reads up to {RECORD_FORMAT}",
            next_step="a newer Narrowgauge wrote it: update",
        )
    return decode(Record, data, where)


def load_host_note(path: Path) -> HostNote:
    """Read what a script says of its host. Raises UsageError (no such file), DamagedRecordError."""
    try:
        data = read_json(path)
    except OSError as error:
        raise UsageError(
            f"cannot read the host's facts in {path}", why=error.strerror or str(error)
        ) from error
    except DamagedRecordError as error:
        error.next_step = "the script that wrote it may have been cut short: start that again"
        raise
    if isinstance(data, dict) and data.get("format") != HOST_NOTE_FORMAT:
        raise DamagedRecordError(
            f"{path} has format {data.get('format')!r}, this reads {HOST_NOTE_FORMAT}",
            next_step="build the image anew, so that it and the script are of one version",
        )
    return decode(HostNote, data, str(path))


def _read_gzip(path: Path) -> Any:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            return json.load(stream)
    except (OSError, EOFError, ValueError) as error:
        raise DamagedRecordError(f"{path} is truncated or not a record", why=str(error)) from error
