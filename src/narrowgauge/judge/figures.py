"""From rows to the figure that a claim speaks of, with what is known of its spread.

One figure per process; processes are what repeats. Medians have intervals of order statistics,
means Student's t, ratios those of `statistics.ratios`. Fewer than six processes tell no interval.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics as plain
from collections.abc import Sequence
from dataclasses import dataclass

from narrowgauge import statistics
from narrowgauge.judge.evidence import Case
from narrowgauge.judge.model import Estimate
from narrowgauge.judge.rows import Measured, selection_label
from narrowgauge.noise import Trials, trials_of
from narrowgauge.statistics import COVERAGE, Interval, LogRatio
from narrowgauge.statistics.ratios import LEAST
from narrowgauge_contract.claims import Claim, ClaimKind, MetricOperator
from narrowgauge_contract.figures import COST_UNITS, figure, is_rate, is_time
from narrowgauge_contract.record import Record

__all__ = ["RATES", "Found", "Step", "found_in", "part_of", "parts_of", "steps_of"]

RATES = ("alarm-rate", "slower-rate")
_EXTREMES = ("min", "max")
_MEANS = ("mean", "last-mean")
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


@dataclass(frozen=True)
class Step:
    """One selection of an ordering against the next. `rises`: None where it cannot be told."""

    lower: str
    upper: str
    rises: bool | None
    words: str


def found_in(claim: Claim, cases: Sequence[Case], records: Sequence[Record]) -> tuple[Found, ...]:
    """The claim's figure in each case; one over all of them for a rate and a geometric mean."""
    if claim.statistic in RATES:
        return (_rate(claim, cases, records),)
    if claim.operator is MetricOperator.GEOMEAN:
        return (_geomean(claim, cases),)
    return tuple(_found(claim, case) for case in cases)


def parts_of(claim: Claim, case: Case) -> tuple[Estimate, ...]:
    """The figure of each selection in one case."""
    return tuple(
        part_of(selection_label(selection), selection.metric, side, claim.statistic)
        for selection, side in zip(claim.selections, case.sides, strict=True)
        if side
    )


def part_of(label: str, metric: str, side: Sequence[Measured], statistic: str) -> Estimate:
    """What the processes of one selection say together."""
    figures = tuple(_process_figure(each, metric, statistic) for each in side)
    value, interval, reason = _summary(figures, statistic)
    return Estimate(
        label=label,
        figure=value,
        unit=_unit(side, metric),
        low=interval.low if interval else None,
        high=interval.high if interval else None,
        repeats=len(figures),
        per_repeat=figures,
        rows=tuple(each.name for each in side),
        no_interval=reason,
    )


def _process_figure(each: Measured, metric: str, statistic: str) -> float:
    found = each.row.metric(metric)
    assert found is not None  # evidence keeps only rows that have it
    if statistic in ("last", "last-mean"):
        return found.values[-1]
    if statistic in _EXTREMES:
        return min(found.values) if statistic == "min" else max(found.values)
    if statistic == "mean":
        warm = found.index and (is_rate(found.unit) or found.unit in COST_UNITS)
        return plain.fmean(found.values[1:] if warm and len(found.values) > 1 else found.values)
    return figure(found).value


def _unit(side: Sequence[Measured], metric: str) -> str:
    found = side[0].row.metric(metric)
    return found.unit if found is not None else ""


def _summary(
    figures: Sequence[float], statistic: str, coverage: float = COVERAGE
) -> tuple[float, Interval | None, str]:
    """Value, interval, and why there is none."""
    if any(map(math.isnan, figures)):
        return math.nan, None, "a figure is not a number"
    if statistic in _EXTREMES:
        return (min if statistic == "min" else max)(figures), None, "an extreme has no interval"
    mean = statistic in _MEANS
    value = plain.fmean(figures) if mean else plain.median(figures)
    if len(figures) < LEAST:
        return value, None, f"{len(figures)} repeats, and fewer than {LEAST} do not tell"
    if min(figures) == max(figures):
        return value, None, "the repeats do not differ"
    if mean:
        return value, _t_interval(figures, coverage), ""
    return value, statistics.median_interval(figures), ""


def _t_interval(figures: Sequence[float], coverage: float) -> Interval:
    from scipy.special import stdtrit  # what `scipy.stats.t.ppf` calls, in half a second less

    mean = plain.fmean(figures)
    width = float(stdtrit(len(figures) - 1, (1 + coverage) / 2))
    width *= plain.stdev(figures) / math.sqrt(len(figures))
    return Interval(mean - width, mean + width, coverage)


def _found(claim: Claim, case: Case) -> Found:
    if claim.operator is MetricOperator.RATIO:
        return _ratio(claim, case)
    (selection,), (side,) = claim.selections, case.sides
    part = part_of(selection_label(selection), selection.metric, side, claim.statistic)
    modes, said = _modes(side, selection.metric)
    return dataclasses.replace(_spread(case, part), modes=modes, bimodal=said)


def _spread(case: Case, estimate: Estimate, extremes: tuple[float, float] | None = None) -> Found:
    """What decides: the interval; else the repeats from least to most; an extreme decides alone."""
    low, high, by_repeats = estimate.low, estimate.high, False
    if low is None or high is None:
        by_repeats = True
        repeats = estimate.per_repeat or (estimate.figure,)
        low, high = extremes or (min(repeats), max(repeats))
        if estimate.no_interval.startswith("an extreme") or math.isnan(estimate.figure):
            low, high = estimate.figure, estimate.figure
    return Found(case, estimate, low, high, by_repeats)


def _ratio(claim: Claim, case: Case) -> Found:
    above, below = parts_of(claim, case)
    pairs = _pairs(case.sides[0], case.sides[1])
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
    if claim.statistic not in (*_MEANS, *_EXTREMES):
        coverage = _coverage(claim)
        return statistics.log_ratio_interval(tops, bottoms, paired=paired, coverage=coverage)
    if not all(math.isfinite(value) and value > 0 for value in (*tops, *bottoms)):
        return LogRatio(None, reason="a figure is not a positive number, so it has no logarithm")
    if claim.statistic in _EXTREMES or not paired:
        value = _summary(tops, claim.statistic)[0] / _summary(bottoms, claim.statistic)[0]
        reason = "an extreme has no interval"
        if claim.statistic in _MEANS:
            reason = "the repeats are no pairs, and means of others have no interval here"
        return LogRatio(math.log(value), reason=reason)
    logs = [math.log(a / b) for a, b in zip(tops, bottoms, strict=True)]
    value, interval, reason = _summary(logs, "mean", _coverage(claim))
    return LogRatio(value, interval, reason)


def _pairs(
    above: Sequence[Measured], below: Sequence[Measured]
) -> tuple[tuple[int, int], ...] | None:
    """Which rows of both sides are one repeat of one run; None where they do not all have one."""
    tops = {(each.run, each.row.repeat): i for i, each in enumerate(above)}
    bottoms = {(each.run, each.row.repeat): i for i, each in enumerate(below)}
    if (len(tops), len(bottoms)) != (len(above), len(below)) or tops.keys() != bottoms.keys():
        return None
    return tuple((tops[key], bottoms[key]) for key in sorted(tops))


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
    pairs = _pairs(below, above)
    if any(map(math.isnan, (lower.figure, upper.figure))):
        return False, "a figure is not a number"
    if pairs is not None and claim.statistic not in _EXTREMES:
        gaps = [upper.per_repeat[j] - lower.per_repeat[i] for i, j in pairs]
        value, interval, _ = _summary(gaps, claim.statistic)
        least, most = (interval.low, interval.high) if interval else (min(gaps), max(gaps))
        how = "95 % interval of the difference" if interval else "differences of the repeats"
        return _sign(least, most), f"{how}: {least:.4g} to {most:.4g} (figure {value:.4g})"
    if claim.statistic in _EXTREMES:
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
