"""The figure that a claim speaks of in each case: a selection's own, a ratio of two, a mean of all,
a share of comparisons. Ratios have the intervals of `statistics.ratios`; see `parts` for the rest.
"""

from __future__ import annotations

import dataclasses
import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge import statistics
from narrowgauge.judge.evidence import Case
from narrowgauge.judge.model import Estimate
from narrowgauge.judge.parts import EXTREMES, MEANS, pairs_of, part_of, parts_of, summary
from narrowgauge.judge.rows import Measured
from narrowgauge.noise import Trials, trials_of
from narrowgauge.statistics import COVERAGE, LogRatio
from narrowgauge_contract.claims import Claim, ClaimKind, MetricOperator
from narrowgauge_contract.figures import is_time
from narrowgauge_contract.record import Record

__all__ = ["RATES", "Found", "found_in"]

RATES = ("alarm-rate", "slower-rate")
#: Two one-sided tests at 5 % are a 90 % interval within the margin.
_EQUIVALENCE_COVERAGE = 0.90


@dataclass(frozen=True)
class Found:
    """A claim's figure in one case. `low` to `high` is what decides: the interval, or where there
    is none the least and the most of the repeats (`by_repeats`).

    `modes`: by how much the figure would be less or more if the samples' lower or upper mode were
    taken for the whole, as factors; 1 and 1 where there is one mode. `unknown`: why there is no
    figure.
    """

    case: Case
    estimate: Estimate
    low: float
    high: float
    by_repeats: bool
    modes: tuple[float, float] = (1.0, 1.0)
    bimodal: str = ""
    unknown: str = ""

    @property
    def all_equal(self) -> bool:
        """Whether there is no interval only because no repeat differs from another."""
        return len(set(self.estimate.per_repeat)) == 1


def found_in(claim: Claim, cases: Sequence[Case], records: Sequence[Record]) -> tuple[Found, ...]:
    """The claim's figure in each case; one over all of them for a rate and a geometric mean."""
    if claim.statistic in RATES:
        return (_rate(claim, cases, records),)
    if claim.operator is MetricOperator.GEOMEAN:
        return (_geomean(claim, cases),)
    return tuple(_found(claim, case) for case in cases)


def _found(claim: Claim, case: Case) -> Found:
    if claim.operator is MetricOperator.RATIO:
        return _ratio(claim, case)
    (selection,), (side,) = claim.selections, case.sides
    part = part_of(str(selection), selection.metric, side, claim.statistic)
    modes, said = _modes(side, selection.metric)
    return dataclasses.replace(_spread(case, part), modes=modes, bimodal=said)


def _spread(case: Case, estimate: Estimate, extremes: tuple[float, float] | None = None) -> Found:
    """What decides: the interval; else the repeats from least to most; an extreme decides alone."""
    low, high, by_repeats = estimate.low, estimate.high, False
    if low is None or high is None:
        by_repeats = True
        repeats = estimate.per_repeat or (estimate.figure,)
        low, high = extremes or (min(repeats), max(repeats))
        if estimate.extreme or math.isnan(estimate.figure):
            low, high = estimate.figure, estimate.figure
    return Found(case, estimate, low, high, by_repeats)


def _ratio(claim: Claim, case: Case) -> Found:
    above, below = parts_of(claim, case)
    pairs = pairs_of(case.sides[0], case.sides[1])
    label = f"{above.label} / {below.label}"
    tops, bottoms = above.per_repeat, below.per_repeat
    if pairs is not None:
        tops = tuple(above.per_repeat[i] for i, _ in pairs)
        bottoms = tuple(below.per_repeat[j] for _, j in pairs)
    found = _log_ratio(claim, tops, bottoms, paired=pairs is not None)
    interval = found.ratio_interval
    per_repeat: tuple[float, ...] = ()
    extremes = None
    if found.value is not None:
        if pairs is not None:
            per_repeat = tuple(a / b for a, b in zip(tops, bottoms, strict=True))
        extremes = (min(tops) / max(bottoms), max(tops) / min(bottoms))
    estimate = Estimate(
        label=label,
        figure=found.ratio,
        unit="1",
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        repeats=min(len(tops), len(bottoms)),
        per_repeat=per_repeat,
        rows=tuple(case.sides[0][i].name for i, _ in pairs or ()),
        no_interval=found.reason,
        coverage=_coverage(claim),
    )
    spread = _spread(case, estimate, None if per_repeat else extremes)
    sides = [
        _modes(side, selection.metric)
        for side, selection in zip(case.sides, claim.selections, strict=True)
    ]
    (top_low, top_high), (bottom_low, bottom_high) = (factors for factors, _ in sides)
    modes = (top_low / bottom_high, top_high / bottom_low)
    said = "; ".join(filter(None, (words for _, words in sides)))
    unknown = "" if found.value is not None else found.reason
    return dataclasses.replace(spread, modes=modes, bimodal=said, unknown=unknown)


def _coverage(claim: Claim) -> float:
    return _EQUIVALENCE_COVERAGE if claim.kind is ClaimKind.EQUIVALENCE else COVERAGE


def _log_ratio(
    claim: Claim, tops: Sequence[float], bottoms: Sequence[float], *, paired: bool
) -> LogRatio:
    if claim.statistic not in (*MEANS, *EXTREMES):
        coverage = _coverage(claim)
        return statistics.log_ratio_interval(tops, bottoms, paired=paired, coverage=coverage)
    if not all(math.isfinite(value) and value > 0 for value in (*tops, *bottoms)):
        return LogRatio(None, reason="a figure is not a positive number, so it has no logarithm")
    if claim.statistic in EXTREMES or not paired:
        value = summary(tops, claim.statistic)[0] / summary(bottoms, claim.statistic)[0]
        reason = "an extreme has no interval"
        if claim.statistic in MEANS:
            reason = "the repeats are no pairs, and means of others have no interval here"
        return LogRatio(math.log(value), reason=reason)
    logs = [math.log(a / b) for a, b in zip(tops, bottoms, strict=True)]
    value, interval, reason = summary(logs, "mean", _coverage(claim))
    return LogRatio(value, interval, reason)


def _geomean(claim: Claim, cases: Sequence[Case]) -> Found:
    """The geometric mean over all selections in all cases, of figures (not of their ratios)."""
    parts = [part for case in cases for part in parts_of(claim, case)]
    found = statistics.geometric_mean_interval(
        [(part.per_repeat, (1.0,) * part.repeats) for part in parts], paired=True
    )
    interval = found.ratio_interval
    same = {part.repeats for part in parts}
    per_repeat: tuple[float, ...] = ()
    if found.value is not None and len(same) == 1:
        columns = zip(*(part.per_repeat for part in parts), strict=True)
        per_repeat = tuple(plain.geometric_mean(column) for column in columns)
    estimate = Estimate(
        label=f"geometric mean of {len(parts)} figures",
        figure=found.ratio,
        unit=parts[0].unit,
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        repeats=min(same),
        per_repeat=per_repeat,
        no_interval=found.reason,
    )
    unknown = "" if found.value is not None else found.reason
    return dataclasses.replace(_spread(cases[0], estimate), unknown=unknown)


def _rate(claim: Claim, cases: Sequence[Case], records: Sequence[Record]) -> Found:
    """The share of comparisons, over all rows of the claim, with its exact binomial interval."""
    from scipy.stats import binomtest

    chosen = [each for case in cases for each in case.sides[0]]
    trials: list[Trials] = []
    for record in records:
        rows = tuple(each.row for each in chosen if each.run == record.run_id)
        trials += trials_of(dataclasses.replace(record, rows=rows)) if rows else []
    total = sum(each.total for each in trials)
    if not total:
        empty = Estimate(claim.statistic, math.nan, "1", None, None, 0)
        return Found(cases[0], empty, math.nan, math.nan, True, unknown="no row has comparisons")
    hits = sum(e.alarms if claim.statistic == "alarm-rate" else e.slower for e in trials)
    interval = binomtest(hits, total).proportion_ci(COVERAGE)
    label = f"{claim.statistic} of {total} comparisons"
    estimate = Estimate(
        label=label,
        figure=hits / total,
        unit="1",
        low=float(interval.low),
        high=float(interval.high),
        repeats=min(len(case.sides[0]) for case in cases),
        rows=tuple(each.name for each in chosen),
    )
    return _spread(cases[0], estimate)


def _modes(side: Sequence[Measured], metric: str) -> tuple[tuple[float, float], str]:
    """How far the modes lie from the median, as factors, where half of the processes or more have
    two; and the words for it. Only times: the ticks of a clock can be told from modes."""
    found = []
    for each in side:
        samples = each.row.metric(metric)
        if samples is not None and not samples.index and is_time(samples.unit):
            modes = statistics.modes_of(samples.values)
            middle = plain.median(samples.values)
            if modes is not None and middle > 0:
                found.append((modes.low / middle, modes.high / middle, each.name))
    if not found or 2 * len(found) < len(side):
        return (1.0, 1.0), ""
    low, high = min(each[0] for each in found), max(each[1] for each in found)
    where = ", ".join(each[2] for each in found[:3])
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    words = f"{metric} has two modes in {len(found)} of {len(side)} rows ({where}{more})"
    return (min(low, 1.0), max(high, 1.0)), words
