"""The figure of one selection in one case, with what is known of its spread.

One figure per process; processes are what repeats. Medians have intervals of order statistics,
means Student's t. Fewer than six processes tell no interval.
"""

from __future__ import annotations

import math
import statistics as plain
from collections.abc import Sequence

from narrowgauge import statistics
from narrowgauge.judge.evidence import Case
from narrowgauge.judge.model import Estimate
from narrowgauge.judge.rows import Measured
from narrowgauge.statistics import COVERAGE, Interval
from narrowgauge.statistics.ratios import LEAST
from narrowgauge_contract.claims import Claim
from narrowgauge_contract.figures import COST_UNITS, figure, is_rate

__all__ = ["EXTREMES", "MEANS", "pairs_of", "part_of", "parts_of", "summary"]

EXTREMES = ("min", "max")
MEANS = ("mean", "last-mean")


def parts_of(claim: Claim, case: Case) -> tuple[Estimate, ...]:
    """The figure of each selection in one case."""
    return tuple(
        part_of(str(selection), selection.metric, side, claim.statistic)
        for selection, side in zip(claim.selections, case.sides, strict=True)
        if side
    )


def part_of(label: str, metric: str, side: Sequence[Measured], statistic: str) -> Estimate:
    """What the processes of one selection say together."""
    figures = tuple(_process_figure(each, metric, statistic) for each in side)
    value, interval, reason = summary(figures, statistic)
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
    if statistic in EXTREMES:
        return min(found.values) if statistic == "min" else max(found.values)
    if statistic == "mean":
        warm = found.index and (is_rate(found.unit) or found.unit in COST_UNITS)
        return plain.fmean(found.values[1:] if warm and len(found.values) > 1 else found.values)
    return figure(found).value


def _unit(side: Sequence[Measured], metric: str) -> str:
    found = side[0].row.metric(metric)
    return found.unit if found is not None else ""


def summary(
    figures: Sequence[float], statistic: str, coverage: float = COVERAGE
) -> tuple[float, Interval | None, str]:
    """Value, interval, and why there is none."""
    if any(map(math.isnan, figures)):
        return math.nan, None, "a figure is not a number"
    if statistic in EXTREMES:
        return (min if statistic == "min" else max)(figures), None, "an extreme has no interval"
    mean = statistic in MEANS
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


def pairs_of(
    above: Sequence[Measured], below: Sequence[Measured]
) -> tuple[tuple[int, int], ...] | None:
    """Which rows of both sides are one repeat of one run; None where they do not all have one."""
    tops = {(each.run, each.row.repeat): i for i, each in enumerate(above)}
    bottoms = {(each.run, each.row.repeat): i for i, each in enumerate(below)}
    if (len(tops), len(bottoms)) != (len(above), len(below)) or tops.keys() != bottoms.keys():
        return None
    return tuple((tops[key], bottoms[key]) for key in sorted(tops))
