"""Orderings: each selection of a claim against the next."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge.judge.evidence import Case
from narrowgauge.judge.model import Estimate
from narrowgauge.judge.parts import EXTREMES, pairs_of, parts_of, summary
from narrowgauge.judge.rows import Measured
from narrowgauge_contract.claims import Claim

__all__ = ["Step", "steps_of"]


@dataclass(frozen=True)
class Step:
    """One selection of an ordering against the next. `rises`: None where it cannot be told."""

    lower: str
    upper: str
    rises: bool | None
    words: str


def steps_of(claim: Claim, case: Case) -> tuple[Step, ...]:
    """Each selection of an ordering against the next, by the differences of their repeats."""
    parts = parts_of(claim, case)
    steps = []
    for i, (lower, upper) in enumerate(itertools.pairwise(parts)):
        rises, words = _rises(claim, case.sides[i], case.sides[i + 1], lower, upper)
        steps.append(Step(lower.label, upper.label, rises, words))
    return tuple(steps)


def _rises(
    claim: Claim,
    below: Sequence[Measured],
    above: Sequence[Measured],
    lower: Estimate,
    upper: Estimate,
) -> tuple[bool | None, str]:
    pairs = pairs_of(below, above)
    if any(map(math.isnan, (lower.figure, upper.figure))):
        return False, "a figure is not a number"
    if pairs is not None and claim.statistic not in EXTREMES:
        gaps = [upper.per_repeat[j] - lower.per_repeat[i] for i, j in pairs]
        value, interval, _ = summary(gaps, claim.statistic)
        least, most = (interval.low, interval.high) if interval else (min(gaps), max(gaps))
        how = "95 % interval of the difference" if interval else "differences of the repeats"
        return _sign(least, most), f"{how}: {least:.4g} to {most:.4g} (figure {value:.4g})"
    if claim.statistic in EXTREMES:
        gap = upper.figure - lower.figure
        return _sign(gap, gap), f"difference {gap:.4g}"
    least = min(upper.per_repeat) - max(lower.per_repeat)
    most = max(upper.per_repeat) - min(lower.per_repeat)
    return _sign(least, most), f"repeats apart by {least:.4g} to {most:.4g}"


def _sign(least: float, most: float) -> bool | None:
    """Whether all of it is above zero; not to rise at all is not to rise."""
    if least > 0:
        return True
    return False if most <= 0 else None
