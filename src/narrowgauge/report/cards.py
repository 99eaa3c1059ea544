"""What a report says of one run: where, by what and how it was measured. Small, so that a thousand
fit into memory; the samples stay in the record."""

from __future__ import annotations

import dataclasses
import gzip
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.json_text import parse_json
from narrowgauge.report.text import clean, label
from narrowgauge.report.words import when
from narrowgauge.store import RunFolder, RunState, Store
from narrowgauge.units import format_value
from narrowgauge.view import RunView, warnings_of
from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError
from narrowgauge_contract.figures import figure
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record, parse_record

__all__ = ["Energy", "RunCard", "card_of", "find_cards"]

_ENERGY_UNITS = ("J", "W")
#: What of a row's facts a card warns of.
_FACTS = ("engine_cache", "profiled")
#: More of one thing (rails, warnings) than these say nothing more.
_MOST = 12


@dataclass(frozen=True)
class Energy:
    """One energy or power metric of a run: its source, and the median over the valid rows."""

    metric: str
    source: str
    rows: int
    median: str


@dataclass(frozen=True)
class RunCard:
    """One run. `facts` are pairs (name, value) in a fixed order, without those nobody knows."""

    run_id: str
    experiment: str
    target: str
    device: str
    status: str
    began: str
    seconds: float | None
    rows: int
    valid_rows: int
    facts: tuple[tuple[str, str], ...]
    energy: tuple[Energy, ...]
    warnings: tuple[str, ...]


def card_of(record: Record, state: RunState = RunState.RECORDED) -> RunCard:
    """The card of a record, or of what is known of a run that still goes on; all texts clean."""
    inside = record.inside
    view = RunView(RunFolder(Path(record.run_id)), state, record, None, None)
    return RunCard(
        run_id=label(record.run_id),
        experiment=label(record.experiment),
        target=label(record.target),
        device=label((inside.accelerator or inside.cpu or "") if inside else ""),
        status=record.status.value,
        began=when(record.started_utc),
        seconds=record.seconds,
        rows=len(record.rows),
        valid_rows=len(record.valid_rows()),
        facts=tuple((name, clean(value)) for name, value in _facts(record) if value),
        energy=tuple(_energy(record.valid_rows())),
        warnings=tuple(clean(each) for each in warnings_of(view)[:_MOST]),
    )


def _facts(record: Record) -> Iterator[tuple[str, Any]]:
    inside, host = record.inside, record.host
    yield "profile", record.profile
    yield "seed", str(record.seed)
    yield "data sets", ", ".join(record.data_sets) + (" (made up)" if record.synthetic else "")
    yield "executor", host.executor if host else ""
    if host is not None:
        machine = host.machine
        yield (
            "host",
            f"{machine.system}, {machine.cpu}, {machine.cpu_count} cores, {machine.kernel}",
        )
        yield "memory", f"{machine.memory_bytes / 2**30:.0f} GiB" if machine.memory_bytes else ""
        yield "driver", machine.driver
        yield "L4T", machine.l4t
        yield "power mode", machine.power_mode
        yield "Docker", machine.docker
        if host.image is not None:
            yield "image", f"{host.image.name} {host.image.digest}"
            yield "base", f"{host.image.base} {host.image.base_digest or '(digest unresolved)'}"
        if host.git is not None:
            dirty = ", changed" if host.git.dirty else ""
            yield "commit", f"{host.git.commit}{dirty}"
        yield "cache", {True: "cold", False: "warm", None: ""}[host.cache_cold]
        yield "weights", ", ".join(f"{each.name} {each.sha256}" for each in host.weights)
    if inside is not None:
        yield "Python", inside.python
        yield "torch", inside.torch
        yield "CUDA", inside.cuda
        yield "cuDNN", inside.cudnn
        yield "kernels", inside.kernels_build
        yield "measurement", str(inside.measurement)
        yield "threads", str(inside.threads) if inside.threads else ""
    yield "lab and kernels", record.hashes.source
    yield "experiment tree", record.hashes.experiment


def _energy(rows: Iterable[Row]) -> Iterator[Energy]:
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in rows:
        for metric in row.metrics:
            if metric.unit in _ENERGY_UNITS and metric.values:
                key = (metric.name, metric.source, metric.unit)
                found.setdefault(key, []).append(figure(metric).value)
    for (name, source, unit), values in list(found.items())[:_MOST]:
        median = format_value(statistics.median(values), unit)
        yield Energy(label(name), label(source), len(values), clean(median))


def find_cards(
    run_ids: Iterable[str],
    store: Store,
    experiments: Path | None,
    known: Mapping[str, Record] | None = None,
) -> Iterator[tuple[str, RunCard | str]]:
    """Each run's card, or why there is none, in the order asked for.

    Runs are looked up in `known`, by their ids, then in the store, then among the reference
    records below `experiments`. One record is read at a time.
    """
    read = known or {}
    wanted = list(run_ids)
    paths = _paths(store, experiments) if any(run not in read for run in wanted) else {}
    for run_id in wanted:
        if run_id in read:
            yield run_id, card_of(read[run_id])
            continue
        if run_id not in paths:
            yield run_id, "its record is not here"
            continue
        try:
            yield run_id, _read_card(paths[run_id])
        except (NarrowgaugeError, OSError) as error:
            yield run_id, clean(error)


def _paths(store: Store, experiments: Path | None) -> Mapping[str, Path]:
    found: dict[str, Path] = {}
    if experiments is not None:
        for path in sorted(experiments.glob("*/reference/*/*.json.gz")):
            found[path.name.removesuffix(".json.gz")] = path
    for folder in store.all():
        if folder.recorded:
            found[folder.name] = folder.record_path
            if not folder.launched:
                # The lab alone writes where it is told: only its job knows how the run is called.
                try:
                    found[folder.job().run_id] = folder.record_path
                except NarrowgaugeError:
                    continue
    return found


def _read(path: Path) -> Any:
    try:
        raw = path.read_bytes()
        return parse_json(gzip.decompress(raw) if path.suffix == ".gz" else raw)
    except (EOFError, ValueError, gzip.BadGzipFile) as error:
        raise DamagedRecordError(f"{path} is truncated or not a record", why=str(error)) from error


def _read_card(path: Path) -> RunCard:
    """The card of a record without decoding what no card shows: of a thousand runs that would take
    most of a minute, and the judge has read each whole before. Raises DamagedRecordError."""
    document = _read(path)
    if not isinstance(document, dict) or not isinstance(document.get("rows"), list):
        return card_of(parse_record(document, str(path)))
    rows = [_lean_row(row) for row in document["rows"]]
    shown = [row for row in rows if not _is_plain(row)]
    card = card_of(parse_record({**document, "spec": {}, "rows": shown}, str(path)))
    plain = [row for row in rows if _is_plain(row)]
    return dataclasses.replace(
        card,
        rows=len(rows),
        valid_rows=card.valid_rows + sum(row["validity"]["valid"] is True for row in plain),
    )


def _is_plain(row: Any) -> bool:
    """Whether a card only counts this row. What is not shaped as a row is left to the decoder."""
    return (
        isinstance(row, dict)
        and row.get("metrics") == []
        and row.get("facts") == {}
        and isinstance(row.get("validity"), dict)
        and isinstance(row["validity"].get("valid"), bool)
    )


def _lean_row(row: Any) -> Any:
    if not isinstance(row, dict):
        return row
    slim = dict(row)
    if isinstance(row.get("metrics"), list):
        slim["metrics"] = [
            metric
            for metric in row["metrics"]
            if not isinstance(metric, dict) or metric.get("unit") in _ENERGY_UNITS
        ]
    if isinstance(row.get("facts"), dict):
        slim["facts"] = {name: row["facts"][name] for name in _FACTS if name in row["facts"]}
    return slim
