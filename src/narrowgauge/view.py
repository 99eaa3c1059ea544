"""What a run's folder says, as a value: the record, or as much of one as can still be read.

A run that was killed, still goes on or has a damaged record is shown by the same code.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge import statistics
from narrowgauge.liveness import Liveness, liveness_of
from narrowgauge.lock import default_lock_file
from narrowgauge.store import RunFolder, RunState, read_entry
from narrowgauge_contract.codec import encode
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.events import read_events
from narrowgauge_contract.job import Job
from narrowgauge_contract.outcome import Metric, Row, Status
from narrowgauge_contract.record import Record, compose
from narrowgauge_contract.spec import ExperimentSpec, headline_of, parse_spec

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "LEAST_WIDTH",
    "RunView",
    "liveness_now",
    "load_view",
    "metric_names",
    "spark",
    "to_json",
    "warnings_of",
    "widen",
]

#: A pipe has no width; a log should not be broken where a terminal would be.
LEAST_WIDTH = 110
_MOST_NOTES = 3
_BARS = "▁▂▃▄▅▆▇█"


@dataclass(frozen=True)
class RunView:
    """A run as far as it is known. `record` is composed on the spot where none was written, and
    then `liveness` says whether it goes on; `planned`: how many rows its job has."""

    folder: RunFolder
    state: RunState
    record: Record | None
    spec: ExperimentSpec | None
    problem: NarrowgaugeError | None
    liveness: Liveness | None = None
    planned: int = 0

    @property
    def going(self) -> bool:
        """Whether it is known to run."""
        return self.liveness is not None and self.liveness.going is True

    def not_ended(self, row: Row) -> bool:
        """Whether nothing is wrong with a row but that it has not ended, where no record says that
        it never will."""
        unfinished = row.status is Status.UNFINISHED and len(row.validity.reasons) == 1
        return unfinished and self.state is RunState.OPEN

    @property
    def configurations(self) -> tuple[statistics.Configuration, ...]:
        return statistics.configurations(self.record.rows) if self.record else ()

    @property
    def headline(self) -> tuple[str, ...]:
        """The metrics to show first: those that the experiment names, else the first three."""
        if self.record is None:
            return ()
        known = metric_names(self.record)
        named = [name for name in headline_of(self.record.spec) if name in known]
        return tuple(named or known[:3])


def load_view(folder: RunFolder) -> RunView:
    """Read what can be read; never raises for a damaged run."""
    entry = read_entry(folder)
    record = entry.record
    if record is None and entry.job is not None:
        record = _from_events(folder, entry.job)
    spec = None
    if record is not None:
        try:
            spec = parse_spec(record.spec, where=f"the record of {record.run_id}")
        except NarrowgaugeError:
            spec = None  # an older declaration; the record itself is still whole
    job = entry.job
    return RunView(
        folder,
        entry.state,
        record,
        spec,
        entry.problem,
        liveness=liveness_now(folder) if entry.state is RunState.OPEN else None,
        planned=len(job.rows) if job is not None else 0,
    )


def liveness_now(folder: RunFolder) -> Liveness:
    """Whether a run without a record goes on, by this host's lock."""
    return liveness_of(folder, default_lock_file(os.environ))


def _from_events(folder: RunFolder, job: Job) -> Record:
    try:
        outcome = folder.outcome()
    except DamagedRecordError:
        outcome = None
    return compose(job, outcome, read_events(folder.events_path), None)


def metric_names(record: Record) -> tuple[str, ...]:
    """Every metric of every row, in the order in which they first occur."""
    return tuple(dict.fromkeys(m.name for row in record.rows for m in row.metrics))


def unit_of(record: Record, name: str) -> str:
    """The metric's unit; empty for a plain number."""
    found = _any_metric(record, name)
    return found.unit if found else ""


def _any_metric(record: Record, name: str) -> Metric | None:
    return next((m for row in record.rows if (m := row.metric(name)) is not None), None)


def warnings_of(view: RunView) -> tuple[str, ...]:
    """What a reader must know before believing a number."""
    record = view.record
    if record is None:
        return ()
    found = []
    host = record.host
    if record.synthetic:
        found.append("made-up data: these numbers say nothing about the real set")
    profilers = sorted({str(r.facts["profiled"]) for r in record.rows if "profiled" in r.facts})
    if profilers:
        found.append(f"profiled ({', '.join(profilers)}): timings include the profiler")
    if host is not None and host.image is not None and host.image.stand_in:
        found.append("stand-in base image: never counts as a reproduction")
    if record.inside is not None and record.inside.pins_unresolved:
        pins = ", ".join(record.inside.pins_unresolved)
        found.append(f"image built with pins that nobody resolved: {pins}")
    if host is not None and host.git is not None and host.git.dirty:
        found.append(f"the checkout differed from its commit {host.git.commit[:12]}")
    if view.state is RunState.RECORDED and host is None:
        found.append("started without the launcher: nothing is known of the host")
    if record.events_damaged:
        found.append(f"{record.events_damaged} event lines could not be read")
    if host is not None and host.scheduler is not None and host.scheduler.indicative:
        found.append(f"indicative only: {host.scheduler.indicative}")
    if host is not None:
        found += [f"exception: {exception}" for exception in host.exceptions]
    return (*found, *_cache_notes(record))


def _cache_notes(record: Record) -> Iterator[str]:
    """Why engines were not taken from their cache, or not kept there, where rows say so."""
    told = (row.facts.get("engine_cache") for row in record.rows)
    said = [str(each["note"]) for each in told if isinstance(each, dict) and each.get("note")]
    notes = list(dict.fromkeys(said))
    yield from (f"engine cache: {note}" for note in notes[:_MOST_NOTES])
    if len(notes) > _MOST_NOTES:
        yield f"engine cache: and {len(notes) - _MOST_NOTES} more, in the rows' facts"


def spark(values: Iterable[float], width: int = 24) -> str:
    """A curve in one line of text; what is not finite is a cross."""
    series = list(values)
    if len(series) > width:
        series = [series[round(i * (len(series) - 1) / (width - 1))] for i in range(width)]
    finite = [value for value in series if math.isfinite(value)]
    if not finite:
        return "×" * len(series)
    low, span = min(finite), max(finite) - min(finite)
    steps = len(_BARS) - 1
    return "".join(
        (_BARS[round((value - low) / span * steps)] if span else _BARS[0])
        if math.isfinite(value)
        else "×"
        for value in series
    )


def to_json(view: RunView) -> dict[str, Any]:
    """The run for scripts: what the screen shows. The raw samples are in the record."""
    record = view.record
    body: dict[str, Any] = {
        "run_id": record.run_id if record else view.folder.name,
        "state": view.state.value,
        "folder": str(view.folder.path),
        "problem": str(view.problem) if view.problem else None,
    }
    if view.liveness is not None:
        body["running"] = view.liveness.going
    if record is None:
        return body
    metrics = metric_names(record)
    body.update(
        experiment=record.experiment,
        profile=record.profile,
        target=record.target,
        seed=record.seed,
        status=record.status.value,
        exit_code=record.exit_code,
        started_utc=record.started_utc,
        seconds=record.seconds,
        parameters=encode(record.parameters),
        hashes=encode(record.hashes),
        warnings=list(warnings_of(view)),
        headline=list(view.headline),
        rows=len(record.rows),
        valid_rows=len(record.valid_rows()),
        configurations=[_configuration(each, metrics, record) for each in view.configurations],
    )
    return body


def _configuration(
    found: statistics.Configuration, metrics: tuple[str, ...], record: Record
) -> dict[str, Any]:
    summaries = {}
    for name in metrics:
        summary = statistics.summarize(found.figures(name))
        first = next((m for row in found.valid if (m := row.metric(name)) and m.values), None)
        if summary is not None and first is not None:
            summaries[name] = {
                "unit": unit_of(record, name),
                "figure": statistics.figure(first).how,
                **encode(summary),
            }
    reasons = dict.fromkeys(reason for row in found.rows for reason in row.validity.reasons)
    return {
        "parameters": encode(dict(found.parameters)),
        "repeats": len(found.rows),
        "valid": len(found.valid),
        "invalid_because": list(reasons),
        "metrics": summaries,
    }


def widen(console: Console) -> None:
    """Give a console that is no terminal at least LEAST_WIDTH columns, or what COLUMNS says."""
    if not (console.is_terminal or os.environ.get("COLUMNS")):
        console.width = max(console.width, LEAST_WIDTH)
