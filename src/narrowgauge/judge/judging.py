"""One claim against records. Pure: the same claim and records give the same judgement.

In this order: a claim that nothing here can be held against is NOT-APPLICABLE; nothing measured is
SKIPPED; rows that are INVALID, too few, or no repeats of one thing make it INVALID. What decides is
the 95 % interval of the figure (without one, the least and the most of the repeats): inside what
the claim allows it is REPRODUCED, outside NOT-REPRODUCED, on both sides UNSTABLE. Of several
settings that the claim leaves open the worst counts. On other hardware than the expectation is of,
only the shape is asked for, and REPRODUCED-TREND is the most; so it is where nobody recorded the
host, or the image stood on a stand-in base.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.judge.bars import Unmeasured, barred
from narrowgauge.judge.devices import device_of, matches_device
from narrowgauge.judge.evidence import Case, Evidence, evidence_for
from narrowgauge.judge.figures import Found, found_in
from narrowgauge.judge.model import Judgement, Sensitivity
from narrowgauge.judge.ordering import Step, steps_of
from narrowgauge.judge.parts import parts_of
from narrowgauge.judge.rules import Place, Region, allowed, place_of, shape_of
from narrowgauge.judge.words import (
    Cap,
    Doubt,
    command_for,
    flip_of_ordering,
    flip_of_region,
    flip_without_figure,
    reason_of_ordering,
    reason_of_region,
)
from narrowgauge.noise import Floors
from narrowgauge.statistics.ratios import LEAST
from narrowgauge_contract.claims import Claim, ClaimKind, Expectation, MetricOperator, Verdict
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["judge"]

_ANY = "any"
#: What a recipe other than that of the claim's profile may say: it holds, or nothing here compares.
_OF_ANY_RECIPE = (Verdict.REPRODUCED_TREND, Verdict.NOT_APPLICABLE)


@dataclass(frozen=True)
class _Expected:
    """The expectation that a record's target gets, and whether the record is what it is of."""

    body: Expectation
    of: str
    matches: bool


def judge(
    claim: Claim,
    spec: ExperimentSpec,
    records: Sequence[Record],
    floors: Floors | None = None,
    unmeasured: Unmeasured | None = None,
) -> Judgement:
    """The judgement of one claim of `spec`. `floors`: noise floors, for what a ratio can see.

    `unmeasured`: what whoever planned the runs knows of why there is none.
    """
    if claim.not_comparable:
        return _without(claim, spec, Verdict.NOT_APPLICABLE, claim.not_comparable, Evidence())
    evidence = evidence_for(claim, spec, records)
    found = _judged(claim, spec, evidence, floors or Floors.none(), unmeasured)
    if not evidence.departures or found.verdict in _OF_ANY_RECIPE:
        return found
    reason = f"{_of_another_recipe(found)}: {'; '.join(evidence.departures)}"
    expected = _expected(claim, evidence.records)
    return _without(claim, spec, Verdict.SKIPPED, reason, evidence, expected)


def _of_another_recipe(found: Judgement) -> str:
    if found.verdict not in (Verdict.NOT_REPRODUCED, Verdict.UNSTABLE):
        return f"{found.reason}, of another recipe"
    what = f"{found.estimate.figure:.4g}" if found.estimate else "the order"
    return f"{what} of another recipe neither shows nor refutes it"


def _judged(
    claim: Claim,
    spec: ExperimentSpec,
    evidence: Evidence,
    floors: Floors,
    unmeasured: Unmeasured | None,
) -> Judgement:
    """Whatever the recipe."""
    bar = barred(claim, evidence, unmeasured)
    if bar is not None:
        return _without(claim, spec, bar.verdict, bar.reason, evidence)
    expected = _expected(claim, evidence.records)
    if claim.operator is MetricOperator.ORDER:
        return _judge_order(claim, spec, evidence, expected)
    region = allowed(claim, expected.body)
    if not expected.matches:
        shape = shape_of(claim, expected.body)
        if shape is None:
            reason = (
                f"the figure is of {claim.device or expected.of}, and was measured on"
                f" {device_of(evidence.records[0]) or 'an unknown device'}:"
                " an absolute figure of other hardware has no shape to compare"
            )
            return _without(claim, spec, Verdict.NOT_APPLICABLE, reason, evidence, expected)
        region = shape
    return _judge_region(claim, spec, evidence, expected, region, floors)


def _expected(claim: Claim, records: Sequence[Record]) -> _Expected:
    """That of the target, else `any`, else the first: of other hardware, so its shape alone."""
    target = records[0].target
    known = (*(name for name in (target, _ANY) if name in claim.expected), *claim.expected)
    of = known[0]
    here = of in (target, _ANY)
    if claim.device:
        here = here and all(matches_device(record, claim.device) for record in records)
    return _Expected(claim.expected[of], of, here)


def _without(
    claim: Claim,
    spec: ExperimentSpec,
    verdict: Verdict,
    reason: str,
    evidence: Evidence,
    expected: _Expected | None = None,
) -> Judgement:
    """A judgement without a figure to hold against the claim; what there is goes along."""
    parts = parts_of(claim, evidence.cases[0]) if evidence.cases else ()
    first = next(iter(claim.expected.items()))
    of, body = (expected.of, expected.body) if expected else first
    records = evidence.records
    return Judgement(
        claim=claim,
        experiment=spec.id,
        verdict=verdict,
        reason=reason,
        command=command_for(claim, spec),
        flip=flip_without_figure(claim, verdict, evidence),
        parts=parts,
        expectation=body,
        expected_for=of,
        target=records[0].target if records else "",
        device=device_of(records[0]) if records else "",
        device_matches=expected.matches if expected else False,
        runs=tuple(record.run_id for record in records),
        exclusions=evidence.exclusions,
        disagreements=evidence.disagreements,
    )


def _cap(expected: _Expected, evidence: Evidence, claim: Claim) -> Cap | None:
    """Why REPRODUCED-TREND is the most; None where it is not."""
    records, coverage = evidence.records, evidence.coverage
    if not expected.matches:
        of, here = claim.device or expected.of, device_of(records[0]) or "an unknown device"
        return Cap(f"the figure is of {of} and this is {here}", f"a run on {of}", True)
    if any(record.host is None for record in records):
        cure = "a run that the launcher starts"
        return Cap("nobody recorded the host (the lab ran without the launcher)", cure, False)
    images = [record.host.image for record in records if record.host is not None]
    if any(image is not None and image.stand_in for image in images):
        return Cap("the image is built on a stand-in base", "a run in the true image", False)
    if evidence.departures:
        cure = f"a run of the profile {claim.profile}"
        return Cap("; ".join(evidence.departures), cure, False)
    if not coverage.whole:
        why = f"{coverage.measured} of {coverage.settings} settings of the profile were measured"
        return Cap(why, f"a run of the whole profile {claim.profile}", False)
    return None


def _verdict(place: Place, cap: Cap | None) -> Verdict:
    if place is Place.OUTSIDE:
        return Verdict.NOT_REPRODUCED
    if place is Place.ACROSS:
        return Verdict.UNSTABLE
    return Verdict.REPRODUCED_TREND if cap else Verdict.REPRODUCED


def _judge_region(
    claim: Claim,
    spec: ExperimentSpec,
    evidence: Evidence,
    expected: _Expected,
    region: Region,
    floors: Floors,
) -> Judgement:
    if math.isinf(region.low) and math.isinf(region.high):
        reason = "the claim allows any figure"
        return _without(claim, spec, Verdict.INVALID, reason, evidence, expected)
    found = found_in(claim, evidence.cases, evidence.records)
    unknown = next((each for each in found if each.unknown), None)
    if unknown is not None:
        return _without(claim, spec, Verdict.INVALID, unknown.unknown, evidence, expected)
    worst = max(found, key=lambda each: _badness(claim, region, each))
    doubt = _doubt(claim, region, worst)
    cap = _cap(expected, evidence, claim)
    verdict = _verdict(_place(claim, region, worst), cap)
    return Judgement(
        claim=claim,
        experiment=spec.id,
        verdict=verdict,
        reason=reason_of_region(region, worst, verdict, cap, len(found), doubt),
        command=command_for(claim, spec),
        flip=flip_of_region(region, worst, verdict, cap, doubt),
        estimate=worst.estimate,
        parts=parts_of(claim, worst.case),
        expectation=expected.body,
        expected_for=expected.of,
        target=evidence.records[0].target,
        device=device_of(evidence.records[0]),
        device_matches=expected.matches,
        sensitivity=_sensitivity(claim, worst, evidence.records, floors),
        bimodal=worst.bimodal,
        runs=tuple(record.run_id for record in evidence.records),
        exclusions=evidence.exclusions,
        disagreements=evidence.disagreements,
    )


def _badness(claim: Claim, region: Region, found: Found) -> tuple[int, float]:
    """Outside is worse than across, across than inside; then the farther from the middle."""
    place = _place(claim, region, found)
    rank = (Place.INSIDE, Place.ACROSS, Place.OUTSIDE).index(place)
    figure = found.estimate.figure
    if math.isnan(figure):
        return 3, 0.0
    short = region.low - figure if math.isfinite(region.low) else -math.inf
    over = figure - region.high if math.isfinite(region.high) else -math.inf
    return rank, max(short, over)


def _place(claim: Claim, region: Region, found: Found) -> Place:
    """Where a figure lies, and across where something keeps its spread from saying so."""
    doubtful = _doubt(claim, region, found) is not None
    return Place.ACROSS if doubtful else place_of(region, found.low, found.high)


def _doubt(claim: Claim, region: Region, found: Found) -> Doubt | None:
    """Why what is known of the spread decides nothing; None where it does."""
    if math.isnan(found.estimate.figure):
        return None
    if claim.kind is ClaimKind.EQUIVALENCE:
        repeats, why = found.estimate.repeats, ""
        if repeats < LEAST:
            why = f"{repeats} repeats, and fewer than {LEAST} do not tell that figures agree"
        elif found.by_repeats and not found.all_equal:
            why = f"{found.estimate.no_interval}, and only an interval tells that figures agree"
        if why:
            return Doubt(why, "enough repeats for an interval")
    if _modes_decide(region, found, place_of(region, found.low, found.high)):
        why = f"{found.bimodal}, and the verdict hangs on which of them a run meets"
        return Doubt(why, "runs whose samples have one mode")
    return None


def _modes_decide(region: Region, found: Found, place: Place) -> bool:
    """Whether the verdict hangs on which of two modes a run happened to meet."""
    if found.modes == (1.0, 1.0):
        return False
    low, high = found.estimate.figure * found.modes[0], found.estimate.figure * found.modes[1]
    return place_of(region, min(low, found.low), max(high, found.high)) is not place


def _sensitivity(
    claim: Claim, found: Found, records: Sequence[Record], floors: Floors
) -> Sensitivity | None:
    """Beside a ratio, what a comparison of this size can see on this device."""
    if claim.operator is not MetricOperator.RATIO:
        return None
    above, below = parts_of(claim, found.case)
    counts = above.repeats, below.repeats
    beside = floors.beside(found.estimate.figure, above.unit, counts, records)
    return Sensitivity(beside.least, beside.within, beside.workload, beside.run_id, beside.reason)


def _judge_order(
    claim: Claim, spec: ExperimentSpec, evidence: Evidence, expected: _Expected
) -> Judgement:
    ranked = [(case, steps_of(claim, case)) for case in evidence.cases]
    case, steps = max(ranked, key=lambda each: _order_badness(each[1]))
    cap = _cap(expected, evidence, claim)
    verdict = _verdict(_order_place(steps), cap)
    parts = parts_of(claim, case)
    order = sorted(parts, key=lambda part: (math.isnan(part.figure), part.figure))
    return Judgement(
        claim=claim,
        experiment=spec.id,
        verdict=verdict,
        reason=reason_of_ordering(parts, steps, verdict, cap, _case_label(case, evidence)),
        command=command_for(claim, spec),
        flip=flip_of_ordering(steps, verdict, cap),
        parts=parts,
        expectation=expected.body,
        expected_for=expected.of,
        target=evidence.records[0].target,
        device=device_of(evidence.records[0]),
        device_matches=expected.matches,
        order=tuple(part.label for part in order),
        runs=tuple(record.run_id for record in evidence.records),
        exclusions=evidence.exclusions,
        disagreements=evidence.disagreements,
    )


def _case_label(case: Case, evidence: Evidence) -> str:
    return case.label if len(evidence.cases) > 1 else ""


def _order_place(steps: Sequence[Step]) -> Place:
    if any(step.rises is False for step in steps):
        return Place.OUTSIDE
    return Place.ACROSS if any(step.rises is None for step in steps) else Place.INSIDE


def _order_badness(steps: Sequence[Step]) -> int:
    return (Place.INSIDE, Place.ACROSS, Place.OUTSIDE).index(_order_place(steps))
