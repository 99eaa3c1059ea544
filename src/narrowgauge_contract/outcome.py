"""Rows and outcomes: what a run measured, folded from its events.

Events are the only source. `outcome.json` is their fold, written by the lab when it ends in order;
without it (killed, out of memory) the same fold of the same events gives the rows.
"""

from __future__ import annotations

import dataclasses
import enum
from pathlib import Path
from typing import Any, Dict, Iterable, List, Optional, Sequence, Tuple

from narrowgauge_contract.codec import LATER, decode, encode, read_json
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.events import Event, EventKind
from narrowgauge_contract.job import Job

__all__ = [
    "OUTCOME_FILE",
    "OUTCOME_FORMAT",
    "ErrorInfo",
    "Fold",
    "InsideFacts",
    "Metric",
    "Outcome",
    "Row",
    "SideFile",
    "Status",
    "Validity",
    "load_outcome",
    "why_nothing_measured",
]

OUTCOME_FILE = "outcome.json"
#: 1: first.
OUTCOME_FORMAT = 1


class Status(str, enum.Enum):
    """How a row or a run ended. `unfinished`: nobody wrote its end (killed). `skipped`: only a row,
    whose host lacks what it was to measure, as it said itself."""

    COMPLETE = "complete"
    FAILED = "failed"
    SKIPPED = "skipped"
    INTERRUPTED = "interrupted"
    UNFINISHED = "unfinished"


@dataclasses.dataclass(frozen=True)
class Metric:
    """Raw samples. `source` says where they come from (`cuda-event`, `monotonic`, `nvml-counter`).

    `index` names what counts the samples (`epoch`, `image`); `conditions` holds what they were
    taken under (cold or hot cache, interleaved with which row).
    """

    name: str
    unit: str
    source: str
    values: Tuple[float, ...]
    index: str = ""
    conditions: Dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class SideFile:
    """A file beside the record. `path` is relative to the run's `out` folder."""

    path: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True)
class Validity:
    """Whether a row's numbers may be used, and every reason why not."""

    valid: bool
    reasons: Tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class ErrorInfo:
    """An error as data: its class and the three sentences, and where it was raised."""

    kind: str
    what: str
    why: str = ""
    next_step: str = ""
    trace: str = ""


@dataclasses.dataclass(frozen=True)
class Row:
    """One measured configuration, measured once, in a process of its own."""

    index: int
    repeat: int
    seed: int
    parameters: Dict[str, Any]
    status: Status
    validity: Validity
    facts: Dict[str, Any] = dataclasses.field(default_factory=dict)
    metrics: Tuple[Metric, ...] = ()
    side_files: Tuple[SideFile, ...] = ()
    seconds: Optional[float] = None
    error: Optional[ErrorInfo] = None

    def metric(self, name: str) -> Optional[Metric]:
        """The metric of that name, or None."""
        for metric in self.metrics:
            if metric.name == name:
                return metric
        return None


@dataclasses.dataclass(frozen=True)
class InsideFacts:
    """What the lab saw from inside the container or environment. None: not there.

    `environment` holds the variables that change speed or arithmetic, where they were set.
    `pins_unresolved`: what the image was built from without a digest or hash (`base`, `torch`).
    """

    python: str
    platform: str
    torch: Optional[str] = None
    cuda: Optional[str] = None
    cudnn: Optional[str] = None
    kernels_build: Optional[str] = None
    accelerator: Optional[str] = None
    capability: Optional[str] = None
    cpu: Optional[str] = None
    cpu_count: Optional[int] = None
    threads: Optional[int] = None
    packages: Dict[str, str] = dataclasses.field(default_factory=dict)
    environment: Dict[str, str] = dataclasses.field(default_factory=dict)
    measurement: int = 1
    pins_unresolved: Tuple[str, ...] = dataclasses.field(default=(), metadata=LATER)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What the lab says of a run that ended in order."""

    format: int
    run_id: str
    status: Status
    exit_code: int
    rows: Tuple[Row, ...]
    inside: Optional[InsideFacts]
    source_hash: str
    experiment_hash: str
    started_utc: float
    ended_utc: float
    seconds: float
    error: Optional[ErrorInfo] = None


def load_outcome(path: Path) -> Outcome:
    """Read outcome.json. Raises DamagedRecordError."""
    data = read_json(path)
    if isinstance(data, dict) and data.get("format") != OUTCOME_FORMAT:
        raise DamagedRecordError(
            f"{path} has outcome format {data.get('format')!r}, this program reads {OUTCOME_FORMAT}"
        )
    return decode(Outcome, data, str(path))


def why_nothing_measured(rows: Sequence[Row]) -> str:
    """What this host lacks, in a sentence's second half, where every row was skipped for it; empty
    where any was not, or there is none."""
    if any(row.status is not Status.SKIPPED for row in rows):
        return ""
    errors = [row.error for row in rows if row.error is not None]
    reasons = (": ".join(filter(None, (each.what, each.why))) for each in errors)
    return "; ".join(dict.fromkeys(reasons))


class _RowFold:
    """The state of one row while events arrive."""

    def __init__(self, index: int, repeat: int, seed: int, parameters: Dict[str, Any]) -> None:
        self.head = (index, repeat, seed, parameters)
        self.facts: Dict[str, Any] = {}
        self.reasons: List[str] = []
        self.samples: Dict[str, List[float]] = {}
        self.metrics: Dict[str, Metric] = {}
        self.side_files: Dict[str, SideFile] = {}
        self.status = Status.UNFINISHED
        self.seconds: Optional[float] = None
        self.error: Optional[ErrorInfo] = None

    def add(self, event: Event) -> None:
        data = event.data
        if event.kind is EventKind.METRIC:
            self._add_metric(data)
        elif event.kind is EventKind.FACT:
            self.facts[data["name"]] = data["value"]
        elif event.kind is EventKind.INVALID:
            if data["reason"] not in self.reasons:
                self.reasons.append(data["reason"])
        elif event.kind is EventKind.SIDE_FILE:
            side_file = decode(SideFile, data, "side-file event")
            self.side_files[side_file.path] = side_file
        elif event.kind is EventKind.ROW_END:
            self.status = Status(data["status"])
            self.seconds = data.get("seconds")
            if data.get("error") is not None:
                self.error = decode(ErrorInfo, data["error"], "row-end event")

    def _add_metric(self, data: Dict[str, Any]) -> None:
        metric = decode(Metric, data, "metric event")
        first = self.metrics.setdefault(metric.name, dataclasses.replace(metric, values=()))
        if (first.unit, first.source) != (metric.unit, metric.source):
            raise DamagedRecordError(
                f"metric '{metric.name}' changes its unit or source within one row",
                why=f"{first.unit} from {first.source}, then {metric.unit} from {metric.source}",
            )
        self.samples.setdefault(metric.name, []).extend(metric.values)

    def row(self) -> Row:
        reasons = list(self.reasons)
        if self.status is not Status.COMPLETE:
            ending = _ending(self.status, self.error)
            skipped = self.status is Status.SKIPPED
            reasons.append(ending if skipped else f"the row did not complete: {ending}")
        return Row(
            *self.head,
            status=self.status,
            validity=Validity(not reasons, tuple(reasons)),
            facts=dict(self.facts),
            metrics=tuple(
                dataclasses.replace(metric, values=tuple(self.samples[name]))
                for name, metric in self.metrics.items()
            ),
            side_files=tuple(self.side_files.values()),
            seconds=self.seconds,
            error=self.error,
        )


def _ending(status: Status, error: Optional[ErrorInfo]) -> str:
    """How a row ended, with the first line of what stopped it: reasons are shown in tables."""
    if error is None:
        return status.value
    if status is Status.SKIPPED:
        return f"{status.value}: " + ": ".join(filter(None, (error.what, error.why)))
    what = error.what.strip().partition("\n")[0]
    return f"{status.value} ({error.kind}: {what})"


class Fold:
    """Folds events into rows, one event at a time. Rows that never started are not listed.

    A row that starts again (`--resume`) begins anew, unless it was complete.
    """

    def __init__(self) -> None:
        self.inside: Optional[InsideFacts] = None
        self.source_hash = ""
        self.experiment_hash = ""
        self.started_utc: Optional[float] = None
        self.last_utc: Optional[float] = None
        self.seconds = 0.0
        self._first_t: Optional[float] = None
        self._rows: Dict[int, _RowFold] = {}

    def add(self, event: Event) -> None:
        """Take one event; DamagedRecordError where it contradicts what came before."""
        if self.started_utc is None:
            self.started_utc, self._first_t = event.utc, event.t
        self.last_utc = event.utc
        if self._first_t is not None:
            self.seconds = max(self.seconds, event.t - self._first_t)
        if event.kind is EventKind.RUN_START:
            self.inside = decode(InsideFacts, event.data["inside"], "run-start event")
            self.source_hash = event.data["source_hash"]
            self.experiment_hash = event.data["experiment_hash"]
        elif event.kind is EventKind.ROW_START and event.row is not None:
            self._start_row(event.row, event.data)
        elif event.row is not None and event.row in self._rows:
            self._rows[event.row].add(event)

    def add_all(self, events: Iterable[Event]) -> Fold:
        for event in events:
            self.add(event)
        return self

    def complete(self) -> Tuple[int, ...]:
        """The indices of the rows that are complete, for `--resume`."""
        return tuple(i for i, row in self._rows.items() if row.status is Status.COMPLETE)

    def rows(self) -> Tuple[Row, ...]:
        return tuple(self._rows[index].row() for index in sorted(self._rows))

    def _start_row(self, index: int, data: Dict[str, Any]) -> None:
        if index in self._rows and self._rows[index].status is Status.COMPLETE:
            return
        self._rows[index] = _RowFold(index, data["repeat"], data["seed"], data["parameters"])


def fold_outcome(
    job: Job, fold: Fold, status: Status, exit_code: int, error: Optional[ErrorInfo] = None
) -> Outcome:
    """The Outcome that a fold gives."""
    return Outcome(
        format=OUTCOME_FORMAT,
        run_id=job.run_id,
        status=status,
        exit_code=exit_code,
        rows=fold.rows(),
        inside=fold.inside,
        source_hash=fold.source_hash,
        experiment_hash=fold.experiment_hash,
        started_utc=fold.started_utc or 0.0,
        ended_utc=fold.last_utc or 0.0,
        seconds=fold.seconds,
        error=error,
    )


def encode_error(error: Optional[ErrorInfo]) -> Any:
    """An ErrorInfo as event data."""
    return None if error is None else encode(error)
