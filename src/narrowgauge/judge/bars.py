"""What keeps a claim from being judged by a figure."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.judge.evidence import Evidence
from narrowgauge_contract.claims import Claim, Verdict

__all__ = ["Unmeasured", "barred"]


@dataclass(frozen=True)
class Unmeasured:
    """Why nothing was measured for a claim: the verdict that it gets then, and the reason."""

    verdict: Verdict
    reason: str


def barred(claim: Claim, evidence: Evidence, unmeasured: Unmeasured | None) -> Unmeasured | None:
    """What keeps a claim from being judged; None where nothing does. `unmeasured`: what whoever
    planned the runs knows of why there are none, or no whole ones."""
    found = _barred(claim, evidence, unmeasured)
    cut_off = unmeasured is not None and _only_cut_off(evidence)
    return unmeasured if found is not None and cut_off else found


def _barred(claim: Claim, evidence: Evidence, unmeasured: Unmeasured | None) -> Unmeasured | None:
    if not evidence.cases:
        return _nothing(evidence, unmeasured)
    if evidence.lost:
        few, more = ", ".join(evidence.lost[:3]), len(evidence.lost) - 3
        also = f" and at {more} other settings" if more > 0 else ""
        return Unmeasured(Verdict.INVALID, f"no valid row at {few}{also}")
    fewest = min(len(side) for case in evidence.cases for side in case.sides)
    if fewest < claim.minimum_repeats:
        lost = f", and {evidence.invalid} rows are INVALID" if evidence.invalid else ""
        reason = f"{fewest} valid repeats of the {claim.minimum_repeats} that it needs{lost}"
        return Unmeasured(Verdict.INVALID, reason)
    return None


def _only_cut_off(evidence: Evidence) -> bool:
    """Whether all rows that may not be used were ended before their end: nothing is wrong with what
    was measured, it is only not there."""
    return 0 < evidence.invalid == evidence.cut_off


def _nothing(evidence: Evidence, unmeasured: Unmeasured | None) -> Unmeasured:
    if evidence.ambiguous:
        return Unmeasured(Verdict.INVALID, evidence.ambiguous)
    if evidence.spoiled:
        rows = f"{evidence.invalid} row{'s are' if evidence.invalid != 1 else ' is'} INVALID"
        return Unmeasured(Verdict.INVALID, f"no valid row of {', '.join(evidence.spoiled)}: {rows}")
    if evidence.lacking and evidence.records:
        return Unmeasured(Verdict.SKIPPED, f"no run has measured {', '.join(evidence.lacking)}")
    if evidence.records:
        reason = "the selections of the claim were never measured at the same settings"
        return Unmeasured(Verdict.INVALID, reason)
    if evidence.invalid:
        why = next(each.why for each in evidence.exclusions if each.row is not None)
        return Unmeasured(Verdict.INVALID, f"no valid row: {evidence.invalid} are INVALID ({why})")
    if evidence.skipped:
        return Unmeasured(Verdict.SKIPPED, evidence.skipped)
    if unmeasured is not None:
        return unmeasured
    if evidence.exclusions:
        why = evidence.exclusions[0].why
        return Unmeasured(Verdict.SKIPPED, f"no run of the claim's settings: {why}")
    return Unmeasured(Verdict.SKIPPED, "no run has measured it")
