"""Which rows of which records speak to a claim, and which are left out, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.judge.model import Exclusion
from narrowgauge.judge.settings import (
    Coverage,
    Key,
    coverage_of,
    key_of,
    label_of,
    named_by,
    varying_in,
)
from narrowgauge.statistics import word
from narrowgauge_contract.claims import Claim, Selection
from narrowgauge_contract.figures import is_time
from narrowgauge_contract.job import SYNTHETIC
from narrowgauge_contract.outcome import Row, Status
from narrowgauge_contract.record import Record, agreement_facts, differing
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
    """What may be put together for a claim. `lacking`: the selections that no valid row is of, and
    `spoiled` those of them that have rows which may not be used.

    `invalid` counts rows, and `cut_off` those of them that did not come to their end. `lost`: the
    settings at which rows were measured and none may be used; `coverage`: how many of
    the settings of the claim's profile were measured. `ambiguous`: why the rows of a selection are
    no repeats of one thing; empty where they are. `skipped`: what the host lacked, where that kept
    a row from being measured. `departures`: in what of the recipe the rows differ from the claim's
    profile, such as `epochs is 60, and the claim's profile has 256`.
    """

    records: tuple[Record, ...] = ()
    cases: tuple[Case, ...] = ()
    invalid: int = 0
    cut_off: int = 0
    skipped: str = ""
    ambiguous: str = ""
    lacking: tuple[str, ...] = ()
    spoiled: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    coverage: Coverage = field(default_factory=Coverage)
    exclusions: tuple[Exclusion, ...] = ()
    disagreements: tuple[str, ...] = ()
    departures: tuple[str, ...] = ()


@dataclass
class _Looked:
    """What one record says of a claim: rows by selection, and what was left out of it.

    `lost` and `attempted` are settings; `spoiled` are the selections' labels.
    """

    record: Record
    sides: list[list[Measured]] = field(default_factory=list)
    exclusions: list[Exclusion] = field(default_factory=list)
    lost: set[Key] = field(default_factory=set)
    attempted: set[Key] = field(default_factory=set)
    spoiled: set[str] = field(default_factory=set)
    invalid: int = 0
    cut_off: int = 0
    skipped: str = ""


def evidence_for(claim: Claim, spec: ExperimentSpec, records: Sequence[Record]) -> Evidence:
    """The newest record of the claim's experiment that has its rows, with all that agree with it.

    Records that differ from it in a checked fact are named, never put together with it. Rows count
    where each parameter that the claim leaves open has a value of the claim's profile or of a
    larger one; those in seconds say how long is measured, not what, and may be anything. Where no
    record has such rows, those of another recipe do.
    """
    asked = _profile_values(spec, claim.profile)
    found = _found(claim, spec, records, asked)
    recipe = [name for name, each in spec.parameters.items() if each.recipe and name in asked]
    if found.records or not recipe:
        return found
    rest = {name: values for name, values in asked.items() if name not in recipe}
    other = _found(claim, spec, records, rest)
    if not other.records:
        return found
    departures = (
        departure
        for case in other.cases
        for selection, side in zip(claim.selections, case.sides, strict=True)
        for measured in side
        for departure in _departures(measured.row, selection, asked)
    )
    return dataclasses.replace(other, departures=tuple(dict.fromkeys(departures)))


def _found(
    claim: Claim,
    spec: ExperimentSpec,
    records: Sequence[Record],
    open_values: Mapping[str, tuple[Any, ...]],
) -> Evidence:
    """By the values that open parameters may have."""
    named = named_by(claim)
    looked = [
        _look(claim, record, open_values, named)
        for record in sorted(records, key=lambda each: each.run_id, reverse=True)
        if record.experiment == spec.id
    ]
    newest = next((each.record for each in looked if any(each.sides)), None)
    if newest is None:
        return Evidence(
            invalid=sum(each.invalid for each in looked),
            cut_off=sum(each.cut_off for each in looked),
            skipped=next((each.skipped for each in looked if each.skipped), ""),
            exclusions=tuple(dict.fromkeys(e for each in looked for e in each.exclusions)),
        )
    joined, exclusions, lines = _agreeing(claim, newest, looked)
    sides = _each_once(claim, joined, exclusions)
    used = {m.run for side in sides for m in side}
    return _evidence(
        claim,
        spec,
        joined,
        sides,
        Evidence(
            records=tuple(each.record for each in joined if each.record.run_id in used),
            exclusions=tuple(dict.fromkeys(exclusions)),
            disagreements=tuple(lines),
        ),
    )


def _agreeing(
    claim: Claim, newest: Record, looked: Sequence[_Looked]
) -> tuple[list[_Looked], list[Exclusion], list[str]]:
    """What may be put together with the newest; all that is left out; and the facts that differ."""
    fixed = set.intersection(*(set(each.where) for each in claim.selections))
    joined: list[_Looked] = []
    exclusions = [each for one in looked for each in one.exclusions]
    lines: list[str] = []
    facts = agreement_facts(newest)
    for one in looked:
        apart = list(_named_apart(newest, facts, one.record, fixed))
        if not apart:
            joined.append(one)
        elif any(one.sides):
            lines += [f"{newest.run_id} / {one.record.run_id}: {line}" for line in apart]
            why = f"it differs from {newest.run_id} in {_facts_of(apart)}"
            exclusions.append(Exclusion(one.record.run_id, None, why))
    return joined, exclusions, lines


def _evidence(
    claim: Claim,
    spec: ExperimentSpec,
    joined: Sequence[_Looked],
    sides: Sequence[Sequence[Measured]],
    known: Evidence,
) -> Evidence:
    """The rows by settings, and which settings were lost or never measured."""
    keyed, cases, ambiguous = _cases(claim, sides)
    lost = sorted({key for each in joined for key in each.lost} - set(keyed))
    varying = varying_in([*keyed, *lost])
    lacking = [
        selection_label(selection)
        for selection, side in zip(claim.selections, sides, strict=True)
        if not side
    ]
    attempted = [key for each in joined for key in each.attempted]
    return dataclasses.replace(
        known,
        cases=cases,
        invalid=sum(each.invalid for each in joined),
        cut_off=sum(each.cut_off for each in joined),
        skipped=next((each.skipped for each in joined if each.skipped), ""),
        ambiguous=ambiguous,
        lacking=tuple(lacking),
        spoiled=tuple(name for name in lacking if any(name in each.spoiled for each in joined)),
        lost=tuple(label_of(key, varying) or "the claim's setting" for key in lost),
        coverage=coverage_of(claim, spec, keyed, attempted),
    )


def _each_once(
    claim: Claim, joined: Sequence[_Looked], exclusions: list[Exclusion]
) -> list[list[Measured]]:
    """Every selection's rows, what was measured twice once: the newest counts.

    With one seed and the same parameters, all but clocks and meters say the same again; of those,
    rows that are the same bit for bit are copies.
    """
    sides: list[list[Measured]] = []
    for i, selection in enumerate(claim.selections):
        seen: dict[tuple[object, ...], str] = {}
        side: list[Measured] = []
        for each in (m for one in joined for m in one.sides[i]):
            metric = each.row.metric(selection.metric)
            assert metric is not None  # `_look` keeps only rows that have it
            what = (key_of(each.row, ()), each.row.seed)
            measured = _is_metered(metric.unit)
            first = seen.setdefault((*what, repr(metric.values)) if measured else what, each.name)
            if first == each.name:
                side.append(each)
                continue
            run = first.partition("#")[0]
            said = "the same samples are in" if measured else "the same seed was measured in"
            exclusions.append(Exclusion(each.run, each.row.index, f"{said} {run}"))
        sides.append(side)
    return sides


def _is_metered(unit: str) -> bool:
    """Whether a clock or a power meter gave the figure, so that it is new each time."""
    return is_time(unit) or not {"J", "W"}.isdisjoint(unit.split("/"))


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


def _look(
    claim: Claim, record: Record, values: Mapping[str, tuple[Any, ...]], named: Collection[str]
) -> _Looked:
    """The rows of a record that the claim may use, by selection, and why it may not the others."""
    looked = _Looked(record)
    for selection in claim.selections:
        looked.sides.append(_side(looked, selection, values, named))
    return looked


def _side(
    looked: _Looked,
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
            looked.cut_off += row.status in (Status.INTERRUPTED, Status.UNFINISHED)
            looked.lost.add(key_of(row, named))
            looked.spoiled.add(selection_label(selection))
    return rows


def _not_asked(row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]) -> str:
    """Why a row is of a setting that the claim does not speak of; empty where it is not."""
    return next(_departures(row, selection, values), "")


def _departures(
    row: Row, selection: Selection, values: Mapping[str, tuple[Any, ...]]
) -> Iterator[str]:
    for name, value in row.parameters.items():
        wanted = values.get(name)
        if wanted is not None and name not in selection.where and value not in wanted:
            yield f"{name} is {word(value)}, and the claim's profile has {word(list(wanted))}"


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


def _named_apart(
    one: Record, facts: dict[str, Any], other: Record, fixed: set[str]
) -> Iterator[str]:
    """The disagreements, parameters one by one. One that every selection fixes may differ between
    records: the rows that were selected have it equal."""
    for line in differing(facts, agreement_facts(other)) if one is not other else ():
        if not line.startswith("parameters:"):
            yield line
            continue
        for name in sorted(one.parameters.keys() | other.parameters.keys()):
            left, right = (each.parameters.get(name, "none") for each in (one, other))
            if left != right and name not in fixed:
                yield f"parameter {name}: {word(left)} / {word(right)}"


def _facts_of(lines: Sequence[str]) -> str:
    return ", ".join(line.partition(":")[0] for line in lines)


def _cases(
    claim: Claim, sides: Sequence[Sequence[Measured]]
) -> tuple[list[Key], tuple[Case, ...], str]:
    """The selections' rows by what the claim leaves open; or why they are no repeats."""
    named = named_by(claim)
    keyed: list[dict[Key, list[Measured]]] = []
    for selection, side in zip(claim.selections, sides, strict=True):
        groups: dict[Key, list[Measured]] = {}
        for each in side:
            groups.setdefault(key_of(each.row, named), []).append(each)
        for group in groups.values():
            for name in sorted(named - set(selection.where)):
                if len({repr(each.row.parameters.get(name)) for each in group}) > 1:
                    label = selection_label(selection)
                    return [], (), f"{label} leaves {name} open, and the rows differ in it"
        keyed.append(groups)
    shared = [key for key in keyed[0] if all(key in groups for groups in keyed)]
    varying = varying_in(shared)
    cases = tuple(
        Case(label_of(key, varying), tuple(tuple(groups[key]) for groups in keyed))
        for key in shared
    )
    return shared, cases, ""
