"""What one record says of a claim: the rows that may be used, and why the others may not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.judge.model import Exclusion
from narrowgauge.judge.settings import Key, key_of
from narrowgauge.statistics import stated
from narrowgauge_contract.claims import Claim, Selection
from narrowgauge_contract.job import SYNTHETIC
from narrowgauge_contract.outcome import Row, Status
from narrowgauge_contract.parameters import PROFILE_PARAMETER
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import PROFILES, ExperimentSpec

__all__ = ["Looked", "Measured", "departures_of", "look", "profile_values"]


@dataclass(frozen=True)
class Measured:
    """One valid row of one record that has the metric of a selection."""

    run: str
    row: Row

    @property
    def name(self) -> str:
        return f"{self.run}#{self.row.index}"


@dataclass
class Looked:
    """What one record says of a claim: rows by selection, and what was left out of it.

    `lost` and `attempted` are settings; `spoiled` are the labels of selections with rows that may
    not be used, `tried` how many rows each selection has that came to their end, whether or not
    they may be.
    """

    record: Record
    sides: list[list[Measured]] = field(default_factory=list)
    exclusions: list[Exclusion] = field(default_factory=list)
    lost: set[Key] = field(default_factory=set)
    attempted: set[Key] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    tried: Counter[str] = field(default_factory=Counter)
    invalid: int = 0
    cut_off: int = 0
    skipped: str = ""


def profile_values(spec: ExperimentSpec, profile: str) -> dict[str, tuple[Any, ...]]:
    """What each parameter may be where a claim leaves it open: as in its profile or a larger one;
    without those in seconds, which say how long is measured, and those that may be anything."""
    larger = [spec.profiles[name].values for name in PROFILES[PROFILES.index(profile) :]]
    values: dict[str, tuple[Any, ...]] = {
        name: tuple(dict.fromkeys(v for each in larger for v in each.get(name, (p.default,))))
        for name, p in spec.parameters.items()
        if p.unit != "s" and not p.any_value
    }
    # Timings under a profiler are the profiler's, whatever else agrees.
    values[PROFILE_PARAMETER.name] = (PROFILE_PARAMETER.default,)
    return values


def look(
    claim: Claim, record: Record, values: Mapping[str, tuple[Any, ...]], named: Collection[str]
) -> Looked:
    """The rows of a record that the claim may use, by selection, and why it may not the others."""
    looked = Looked(record)
    for selection in claim.selections:
        looked.sides.append(_side(looked, selection, values, named))
    return looked


def _side(
    looked: Looked,
    selection: Selection,
    values: Mapping[str, tuple[Any, ...]],
    named: Collection[str],
) -> list[Measured]:
    rows = []
    record = looked.record
    where = selection.where.items()
    for row in record.rows:
        if not where <= row.parameters.items():
            continue
        if row.validity.valid and row.metric(selection.metric) is None:
            continue  # of another kind of row in the same experiment
        elsewhere = _not_asked(row, selection, values)
        why = elsewhere or _why_not(record, row, selection, values)
        cut_off = row.status in (Status.INTERRUPTED, Status.UNFINISHED)
        looked.tried[str(selection)] += not (elsewhere or cut_off)
        if not why:
            rows.append(Measured(record.run_id, row))
            continue
        looked.exclusions.append(Exclusion(record.run_id, row.index, why))
        if elsewhere:
            continue
        looked.attempted.add(key_of(row, named))
        if row.status is Status.SKIPPED:
            looked.skipped = looked.skipped or why
        elif not row.validity.valid or row.status is not Status.COMPLETE:
            looked.invalid += 1
            looked.cut_off += cut_off
            looked.lost.add(key_of(row, named))
            looked.spoiled.add(str(selection))
    return rows


def _not_asked(row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]) -> str:
    """Why a row is of a setting that the claim does not speak of; empty where it is not."""
    return next(departures_of(row, selection, values), "")


def departures_of(
    row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    """In which parameters a row is not what `profile_values` says, each as a phrase."""
    for name, value in row.parameters.items():
        wanted = values.get(name)
        if wanted is not None and name not in selection.where and value not in wanted:
            asked = " or ".join(map(stated, wanted))
            yield f"{name} is {stated(value)}, and the claim's profile has {asked}"


def _why_not(
    record: Record, row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]
) -> str:
    """Why a row that a selection names does not count; empty where it does."""
    if row.status is Status.SKIPPED and row.error is not None:
        return ": ".join(filter(None, (row.error.what, row.error.why)))
    if not row.validity.valid:
        return "INVALID: " + ("; ".join(row.validity.reasons) or "the row gives no reason")
    if row.status is not Status.COMPLETE:
        return f"the row is {row.status.value}"
    if "profiled" in row.facts:
        return "its timings include a profiler"
    metric = row.metric(selection.metric)
    if metric is None or not metric.values:
        return f"{selection.metric} has no sample"
    if metric.source == "replay" or (
        metric.unit in ("J", "W") and row.facts.get("energy_source") == "replay"
    ):
        return "its energy was played from a recording"
    if not record.synthetic:
        return ""
    asked = (*selection.where.values(), *(each for listed in values.values() for each in listed))
    return "its data was made up" if SYNTHETIC not in asked else ""
