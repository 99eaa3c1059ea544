"""Which rows of which records speak to a claim, and which are left out, each with its reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.judge.model import Exclusion
from narrowgauge.statistics import word
from narrowgauge_contract.claims import Claim, Selection
from narrowgauge_contract.job import SYNTHETIC
from narrowgauge_contract.outcome import Row, Status
from narrowgauge_contract.record import Record, disagreements
from narrowgauge_contract.spec import PROFILE_PARAMETER, PROFILES, ExperimentSpec

__all__ = ["Case", "Evidence", "Measured", "evidence_for", "selection_label"]


@dataclass(frozen=True)
class Measured:
    """One valid row of one record that has the metric of a selection."""

    run: str
    row: Row

    @property
    def name(self) -> str:
        return f"{self.run}#{self.row.index}"


@dataclass(frozen=True)
class Case:
    """The rows of each selection at one setting of the parameters that the claim leaves open."""

    label: str
    sides: tuple[tuple[Measured, ...], ...]


@dataclass(frozen=True)
class Evidence:
    """What may be put together for a claim. `lacking`: the selections that no valid row is of.

    `ambiguous`: why the rows of a selection are no repeats of one thing; empty where they are.
    `skipped`: what the host lacked, where that kept a row from being measured.
    """

    records: tuple[Record, ...] = ()
    cases: tuple[Case, ...] = ()
    invalid: int = 0
    skipped: str = ""
    ambiguous: str = ""
    lacking: tuple[str, ...] = ()
    exclusions: tuple[Exclusion, ...] = ()
    disagreements: tuple[str, ...] = ()


@dataclass
class _Tally:
    """What was left out while records were looked through."""

    exclusions: list[Exclusion] = field(default_factory=list)
    invalid: int = 0
    skipped: str = ""


def evidence_for(claim: Claim, spec: ExperimentSpec, records: Sequence[Record]) -> Evidence:
    """The newest record of the claim's experiment that has its rows, with all that agree with it.

    Records that differ from it in a checked fact are named, never put together with it. Rows count
    where each parameter that the claim leaves open has a value of the claim's profile or of a
    larger one; those in seconds say how long is measured, not what, and may be anything.
    """
    tally = _Tally()
    open_values = _profile_values(spec, claim.profile)
    found: list[tuple[Record, list[list[Measured]]]] = []
    for record in sorted(records, key=lambda each: each.run_id, reverse=True):
        if record.experiment == spec.id:
            sides = [_side(record, each, open_values, tally) for each in claim.selections]
            if any(sides):
                found.append((record, sides))
    if not found:
        left_out = tuple(dict.fromkeys(tally.exclusions))
        return Evidence(invalid=tally.invalid, skipped=tally.skipped, exclusions=left_out)
    newest = found[0][0]
    fixed = set.intersection(*(set(each.where) for each in claim.selections))
    lines: list[str] = []
    joined: list[tuple[Record, list[list[Measured]]]] = []
    for record, sides in found:
        apart = list(_named_apart(newest, record, fixed))
        lines += [f"{newest.run_id} / {record.run_id}: {line}" for line in apart]
        if apart:
            why = f"it differs from {newest.run_id} in {_facts_of(apart)}"
            tally.exclusions.append(Exclusion(record.run_id, None, why))
        else:
            joined.append((record, sides))
    sides = [[m for _, each in joined for m in each[i]] for i in range(len(claim.selections))]
    cases, ambiguous = _cases(claim, sides)
    return Evidence(
        records=tuple(record for record, _ in joined),
        cases=cases,
        invalid=tally.invalid,
        skipped=tally.skipped,
        ambiguous=ambiguous,
        lacking=tuple(
            selection_label(selection)
            for selection, side in zip(claim.selections, sides, strict=True)
            if not side
        ),
        exclusions=tuple(dict.fromkeys(tally.exclusions)),
        disagreements=tuple(lines),
    )


def selection_label(selection: Selection) -> str:
    """As claims.toml writes it: `latency{engine=eager, batch=1}`."""
    where = ", ".join(f"{name}={word(value)}" for name, value in selection.where.items())
    return f"{selection.metric}{{{where}}}" if where else selection.metric


def _profile_values(spec: ExperimentSpec, profile: str) -> dict[str, tuple[Any, ...]]:
    larger = [spec.profiles[name].values for name in PROFILES[PROFILES.index(profile) :]]
    values: dict[str, tuple[Any, ...]] = {
        name: tuple(dict.fromkeys(v for each in larger for v in each.get(name, (p.default,))))
        for name, p in spec.parameters.items()
        if p.unit != "s"
    }
    # Timings under a profiler are the profiler's, whatever else agrees.
    values[PROFILE_PARAMETER.name] = (PROFILE_PARAMETER.default,)
    return values


def _side(
    record: Record, selection: Selection, values: Mapping[str, tuple[Any, ...]], tally: _Tally
) -> list[Measured]:
    """The rows of a record that a selection may use; the others that it names go to `tally`."""
    rows = []
    for row in record.rows:
        if any(row.parameters.get(name) != value for name, value in selection.where.items()):
            continue
        if row.validity.valid and row.metric(selection.metric) is None:
            continue  # of another kind of row in the same experiment
        why = _why_not(record, row, selection, values)
        if not why:
            rows.append(Measured(record.run_id, row))
            continue
        if row.status is Status.SKIPPED:
            tally.skipped = tally.skipped or why
        elif not row.validity.valid or row.status is not Status.COMPLETE:
            tally.invalid += 1
        tally.exclusions.append(Exclusion(record.run_id, row.index, why))
    return rows


def _why_not(
    record: Record, row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]
) -> str:
    """Why a row that a selection names does not count; empty where it does."""
    for name, value in row.parameters.items():
        wanted = values.get(name)
        if wanted is not None and name not in selection.where and value not in wanted:
            listed = word(list(wanted))
            return f"{name} is {word(value)}, and the claim's profile has {listed}"
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
    asked = (*selection.where.values(), *(each for listed in values.values() for each in listed))
    return "its data was made up" if record.synthetic and SYNTHETIC not in asked else ""


def _named_apart(one: Record, other: Record, fixed: set[str]) -> Iterator[str]:
    """The disagreements, parameters one by one. One that every selection fixes may differ between
    records: the rows that were selected have it equal."""
    for line in disagreements(one, other) if one is not other else ():
        if not line.startswith("parameters:"):
            yield line
            continue
        for name in sorted(one.parameters.keys() | other.parameters.keys()):
            left, right = (each.parameters.get(name, "none") for each in (one, other))
            if left != right and name not in fixed:
                yield f"parameter {name}: {word(left)} / {word(right)}"


def _facts_of(lines: Sequence[str]) -> str:
    return ", ".join(line.partition(":")[0] for line in lines)


def _cases(claim: Claim, sides: Sequence[Sequence[Measured]]) -> tuple[tuple[Case, ...], str]:
    """The selections' rows by what the claim leaves open; or why they are no repeats."""
    named = {name for each in claim.selections for name in each.where}
    keyed: list[dict[tuple[tuple[str, str], ...], list[Measured]]] = []
    for selection, side in zip(claim.selections, sides, strict=True):
        groups: dict[tuple[tuple[str, str], ...], list[Measured]] = {}
        for each in side:
            free = {n: v for n, v in each.row.parameters.items() if n not in named}
            groups.setdefault(tuple(sorted((n, repr(v)) for n, v in free.items())), []).append(each)
        for group in groups.values():
            for name in sorted(named - set(selection.where)):
                if len({repr(each.row.parameters.get(name)) for each in group}) > 1:
                    label = selection_label(selection)
                    return (), f"{label} leaves {name} open, and the rows differ in it"
        keyed.append(groups)
    shared = [key for key in keyed[0] if all(key in groups for groups in keyed)]
    pairs = {pair for key in shared for pair in key}
    varying = {name for name, value in pairs if any((name, value) not in key for key in shared)}
    return tuple(
        Case(_label(key, varying), tuple(tuple(groups[key]) for groups in keyed)) for key in shared
    ), ""


def _label(key: Sequence[tuple[str, str]], varying: set[str]) -> str:
    return ", ".join(f"{name}={value.strip(chr(39))}" for name, value in key if name in varying)
