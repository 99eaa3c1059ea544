"""What may be put together for a claim: rows of records that agree, by settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.judge.apart import facts_of, named_apart
from narrowgauge.judge.devices import matches_device
from narrowgauge.judge.model import Exclusion
from narrowgauge.judge.rows import (
    Looked,
    Measured,
    departures_of,
    look,
    profile_values,
)
from narrowgauge.judge.settings import (
    Coverage,
    Key,
    coverage_of,
    key_of,
    label_of,
    named_by,
    varying_in,
)
from narrowgauge_contract.agreement import agreement_facts
from narrowgauge_contract.claims import Claim
from narrowgauge_contract.figures import is_time
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["Case", "Evidence", "evidence_for"]


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


def evidence_for(claim: Claim, spec: ExperimentSpec, records: Sequence[Record]) -> Evidence:
    """The newest record of the claim's experiment that has its rows, with all that agree with it;
    where those have fewer rows than the claim asks for, or none of one selection, the newest whose
    have enough, or one of each. Records of the device that the claim names are newer than others.

    Records that differ from it in a checked fact are named, never put together with it. Rows count
    where each parameter that the claim leaves open has a value of the claim's profile or of a
    larger one; those in seconds say how long is measured, not what, and may be anything. Where no
    record has such rows of all that the claim compares, those of another recipe do.
    """
    asked = profile_values(spec, claim.profile)
    found = _found(claim, spec, records, asked)
    recipe = [name for name, each in spec.parameters.items() if each.recipe and name in asked]
    whole = bool(found.records) and not found.lacking
    if whole or found.spoiled or not recipe:
        return found
    rest = {name: values for name, values in asked.items() if name not in recipe}
    other = _found(claim, spec, records, rest)
    if not other.records or (found.records and other.lacking):
        return found
    departures = (
        departure
        for case in other.cases
        for selection, side in zip(claim.selections, case.sides, strict=True)
        for measured in side
        for departure in departures_of(measured.row, selection, asked)
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
        look(claim, record, open_values, named)
        for record in sorted(records, key=lambda each: _rank(claim, each), reverse=True)
        if record.experiment == spec.id
    ]
    agreeing = _newest_whole(claim, looked)
    if agreeing is None:
        return Evidence(
            invalid=sum(each.invalid for each in looked),
            cut_off=sum(each.cut_off for each in looked),
            skipped=next((each.skipped for each in looked if each.skipped), ""),
            exclusions=tuple(dict.fromkeys(e for each in looked for e in each.exclusions)),
        )
    joined, exclusions, lines = agreeing
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


def _rank(claim: Claim, record: Record) -> tuple[bool, str]:
    """What is of the claim's own device counts before what is newer and of another: that can show
    a trend at most, whatever it says."""
    return bool(claim.device) and matches_device(record, claim.device), record.run_id


#: What may be put together; all that is left out; and the facts that differ.
_Agreeing = tuple[list[Looked], list[Exclusion], list[str]]


def _newest_whole(claim: Claim, looked: Sequence[Looked]) -> _Agreeing | None:
    """What agrees with the newest record that has rows, or with the newest that has enough of every
    selection together with what agrees with it, or some of every one; `looked` is by age. A row
    counts here also where it may not be used: what went wrong since is not passed over for what was
    right before. One that was cut off does not: nothing went wrong with it."""
    first: _Agreeing | None = None
    whole: _Agreeing | None = None
    seen: set[str] = set()
    for one in looked:
        if not any(one.sides) or one.record.run_id in seen:
            continue
        agreeing = _agreeing(claim, one.record, looked)
        fewest = _fewest(claim, agreeing[0])
        if fewest >= claim.minimum_repeats:
            return agreeing
        seen |= {each.record.run_id for each in agreeing[0]}
        first = first or agreeing
        whole = whole or (agreeing if fewest else None)
    return whole or first


def _fewest(claim: Claim, joined: Sequence[Looked]) -> int:
    """How many rows the selection has that has the fewest."""
    return min(sum(one.tried[str(each)] for one in joined) for each in claim.selections)


def _agreeing(claim: Claim, newest: Record, looked: Sequence[Looked]) -> _Agreeing:
    """What may be put together with the newest; all that is left out; and the facts that differ."""
    fixed = set.intersection(*(set(each.where) for each in claim.selections))
    joined: list[Looked] = []
    exclusions = [each for one in looked for each in one.exclusions]
    lines: list[str] = []
    facts = agreement_facts(newest)
    for one in looked:
        apart = list(named_apart(newest, facts, one.record, fixed))
        if not apart:
            joined.append(one)
        elif any(one.sides):
            lines += [f"{newest.run_id} / {one.record.run_id}: {line}" for line in apart]
            why = f"it differs from {newest.run_id} in {facts_of(apart)}"
            exclusions.append(Exclusion(one.record.run_id, None, why))
    return joined, exclusions, lines


def _evidence(
    claim: Claim,
    spec: ExperimentSpec,
    joined: Sequence[Looked],
    sides: Sequence[Sequence[Measured]],
    known: Evidence,
) -> Evidence:
    """The rows by settings, and which settings were lost or never measured."""
    keyed, cases, ambiguous = _cases(claim, sides)
    lost = sorted({key for each in joined for key in each.lost} - set(keyed))
    varying = varying_in([*keyed, *lost])
    lacking = [
        str(selection) for selection, side in zip(claim.selections, sides, strict=True) if not side
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
    claim: Claim, joined: Sequence[Looked], exclusions: list[Exclusion]
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
            assert metric is not None  # `look` keeps only rows that have it
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
                    label = str(selection)
                    return [], (), f"{label} leaves {name} open, and the rows differ in it"
        keyed.append(groups)
    shared = [key for key in keyed[0] if all(key in groups for groups in keyed)]
    varying = varying_in(shared)
    cases = tuple(
        Case(label_of(key, varying), tuple(tuple(groups[key]) for groups in keyed))
        for key in shared
    )
    return shared, cases, ""
