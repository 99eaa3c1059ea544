"""The sentences of a judgement: why this verdict, and what would change it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from narrowgauge.judge.evidence import Evidence
from narrowgauge.judge.figures import Found
from narrowgauge.judge.model import Estimate
from narrowgauge.judge.ordering import Step
from narrowgauge.judge.rules import Region, words_of
from narrowgauge.units import Scale, scale_of
from narrowgauge_contract.claims import Claim, Verdict
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "Cap",
    "Doubt",
    "command_for",
    "estimate_words",
    "flip_of_ordering",
    "flip_of_region",
    "flip_without_figure",
    "reason_of_ordering",
    "reason_of_region",
]


@dataclass(frozen=True)
class Cap:
    """Why no more than the trend can be had, and what would lift that."""

    why: str
    cure: str
    other_hardware: bool


@dataclass(frozen=True)
class Doubt:
    """Why a figure's spread decides nothing, wherever it lies, and what would lift that."""

    why: str
    cure: str


#: Figures beyond this are written with an exponent.
_LARGE = 1e6
_HOLDS = (Verdict.REPRODUCED, Verdict.REPRODUCED_TREND)


def command_for(claim: Claim, spec: ExperimentSpec) -> str:
    """What checks the claim anew; empty where nothing of this experiment can."""
    if claim.not_comparable:
        return ""
    return claim.by_hand or f"narrowgauge reproduce {spec.id}/{claim.id}"


def estimate_words(estimate: Estimate) -> str:
    """`1.84 (95 % interval 1.80 to 1.90, 6 repeats)`."""
    known = f"{estimate.repeats} repeat{'s' if estimate.repeats != 1 else ''}"
    number, unit = _scaled(estimate)
    if estimate.low is not None and estimate.high is not None:
        coverage = f"{100 * estimate.coverage:.0f} % interval"
        known = f"{coverage} {number(estimate.low)} to {number(estimate.high)}, {known}"
    elif len(estimate.per_repeat) > 1:
        low, high = number(min(estimate.per_repeat)), number(max(estimate.per_repeat))
        known = f"{low} to {high} over {known}"
    return f"{number(estimate.figure)}{unit} ({known})"


def _scaled(estimate: Estimate) -> tuple[Callable[[float], str], str]:
    """How to write the figures of an estimate, and the unit that goes after the first."""
    large = abs(estimate.figure) >= _LARGE
    scale = Scale(1.0, estimate.unit) if large else scale_of(estimate.figure, estimate.unit)
    number = "{:.4g}".format if large else scale.number
    return number, f" {scale.word}" if scale.word else ""


def reason_of_region(
    region: Region,
    found: Found,
    verdict: Verdict,
    cap: Cap | None,
    cases: int,
    doubt: Doubt | None,
) -> str:
    """Why a figure gave this verdict."""
    where = f" at {found.case.label}, the worst of {cases} settings" if cases > 1 else ""
    said = f"{estimate_words(found.estimate)}{where}"
    asked = words_of(region)
    if doubt is not None:
        return f"{said}: {doubt.why}"
    if verdict is Verdict.UNSTABLE:
        by = "the repeats lie" if found.by_repeats else "the interval lies"
        return f"{said}: {by} partly beyond what is allowed, {asked}"
    if verdict is Verdict.NOT_REPRODUCED:
        reason = f"{said}; allowed is {asked}"
        return f"{reason}; {cap.why}" if cap and cap.other_hardware else reason
    reason = f"{said}, and {asked} is allowed"
    return f"{reason}; no more than the trend, since {cap.why}" if cap else reason


def flip_of_region(
    region: Region, found: Found, verdict: Verdict, cap: Cap | None, doubt: Doubt | None
) -> str:
    """What would change a verdict that a figure gave."""
    asked = words_of(region)
    if doubt is not None:
        return doubt.cure
    if found.estimate.extreme:
        # One repeat decides; whatever the others are, another one beyond it would.
        to = "not " if verdict is not Verdict.NOT_REPRODUCED else ""
        lost = f"a repeat beyond all of these that is {to}{asked}"
        return f"{cap.cure} could make it REPRODUCED; {lost}" if cap else lost
    what = "every repeat" if found.by_repeats else "the whole interval"
    if verdict is Verdict.UNSTABLE:
        return f"more repeats or less noise, so that {what} is {asked}, or none of it"
    if verdict is Verdict.NOT_REPRODUCED:
        return f"{what} {asked}"
    part = "a repeat" if found.by_repeats else "part of the interval"
    lost = f"{part} that is not {asked} makes it UNSTABLE, {what} NOT-REPRODUCED"
    return f"{cap.cure} could make it REPRODUCED; {lost}" if cap else lost


def reason_of_ordering(
    parts: Sequence[Estimate], steps: Sequence[Step], verdict: Verdict, cap: Cap | None, case: str
) -> str:
    """Why an ordering got this verdict."""
    chain = " < ".join(estimate_words(part).partition(" (")[0] for part in parts)
    at = f" at {case}" if case else ""
    if verdict in _HOLDS:
        reason = f"the figures rise as claimed{at}: {chain}"
        return f"{reason}; no more than the trend, since {cap.why}" if cap else reason
    wanted = False if verdict is Verdict.NOT_REPRODUCED else None
    step = next(each for each in steps if each.rises is wanted)
    does = "does not lie above" if wanted is False else "cannot be told from"
    reason = f"{step.upper} {does} {step.lower}{at} ({step.words})"
    return f"{reason}; {cap.why}" if cap and cap.other_hardware and wanted is False else reason


def flip_of_ordering(steps: Sequence[Step], verdict: Verdict, cap: Cap | None) -> str:
    """What would change the verdict of an ordering."""
    if verdict is Verdict.UNSTABLE:
        return "more repeats: differences that are all on one side of zero"
    if verdict is Verdict.NOT_REPRODUCED:
        count = sum(step.rises is False for step in steps)
        return f"a rise in the {count} of {len(steps)} steps that show none"
    lost = f"one of {len(steps)} steps that does not rise makes it NOT-REPRODUCED"
    return f"{cap.cure} could make it REPRODUCED; {lost}" if cap else lost


def flip_without_figure(claim: Claim, verdict: Verdict, evidence: Evidence) -> str:
    """What it takes to get a figure. The command stands beside it wherever it is shown."""
    if verdict is Verdict.NOT_APPLICABLE:
        if claim.not_comparable:
            return "another experiment, one that measures what was published"
        return f"a run on {claim.device or ' or '.join(claim.expected)}"
    if verdict is Verdict.INVALID and evidence.invalid:
        return f"valid rows, at least {claim.minimum_repeats} for each figure"
    if verdict is Verdict.INVALID:
        return f"at least {claim.minimum_repeats} valid repeats of every figure"
    return "a run of it"
