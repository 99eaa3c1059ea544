"""Ratios of medians, on the log scale, where a factor of two up and down are equally far from none.

The samples are figures of processes, not samples within one: what differs from process to process
(addresses, clocks, which core) is the larger part of the noise, and no number of samples in one
process shows it.

Where the i-th figures of both sides belong together, they share what drifts, and only their own
ratios are free of it: value and interval are the median of the logarithms of the ratios of pairs,
and its interval by order statistics. That assumes nothing but that pairs are independent of each
other, and misses at most as often as it says: 3.1 % at six pairs, 2.1 % at ten, 4.1 % at twenty.
A bootstrap of the ratio of medians does not: of pairs that share more than they differ in, BCa
misses 14 to 21 % at six.

Where they do not belong together, intervals are those of a bootstrap, BCa where there is one level
(Efron 1987; for several samples Davison and Hinkley 1997, section 5.4): from six figures a side it
misses 4 to 7 % of the time (8 % with six on one side and many on the other), and 9 to 13 % where
10 % is asked for. Percentiles where processes hold samples. All are the same for the same samples.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING, Any

from narrowgauge.statistics.configurations import Configuration
from narrowgauge.statistics.samples import COVERAGE, Interval, median_interval
from narrowgauge_contract.order_statistics import median_rank

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = [
    "LEAST",
    "Equivalence",
    "LogRatio",
    "equivalent",
    "geometric_mean_interval",
    "hierarchical_log_ratio_interval",
    "log_ratio_interval",
    "ratio_of",
]

#: Fewer figures cannot tell their own spread: the least and the most of five do not hold a median
#: with 95 %. BCa intervals cover from here on.
LEAST = 6
_RESAMPLES = 9999
#: With two levels each resample costs as much as there are raw samples.
_HIERARCHICAL_RESAMPLES = 1999
#: How many samples are resampled at a time.
_AT_ONCE = 1_000_000
_SEED = 0
_NO_SPREAD = "the samples do not differ, so their spread is not known"


@dataclass(frozen=True)
class LogRatio:
    """The natural logarithm of a ratio, and the interval that holds it.

    Either is None where the samples do not tell; `reason` says why.
    """

    value: float | None
    interval: Interval | None = None
    reason: str = ""

    @property
    def ratio(self) -> float:
        """NaN where there is none."""
        return math.nan if self.value is None else math.exp(self.value)

    @property
    def ratio_interval(self) -> Interval | None:
        """The interval of the ratio itself."""
        if self.interval is None:
            return None
        low, high = math.exp(self.interval.low), math.exp(self.interval.high)
        return Interval(low, high, self.interval.coverage)

    @property
    def holds_one(self) -> bool | None:
        """Whether the ratio may be 1 as far as the interval tells; None without an interval."""
        if self.interval is None:
            return None
        return self.interval.low <= 0.0 <= self.interval.high


@dataclass(frozen=True)
class Equivalence:
    """Whether a ratio lies within 1 / (1 + margin) … 1 + margin, and the interval that says so."""

    equivalent: bool | None
    margin: float
    found: LogRatio


def ratio_of(above: Configuration, below: Configuration, metric: str) -> LogRatio:
    """above / below over the valid repeats, paired where the repeats are the same.

    For configurations of one record only: its rows of one repeat are measured next to each other,
    so that pairs share what drifts. The repeats of two records have nothing but a number in common.
    """
    tops, bottoms = above.by_repeat(metric), below.by_repeat(metric)
    if tops and tops.keys() == bottoms.keys():
        order = sorted(tops)
        pairs = [tops[i] for i in order], [bottoms[i] for i in order]
        return log_ratio_interval(*pairs, paired=True)
    return log_ratio_interval(above.figures(metric), below.figures(metric))


def log_ratio_interval(
    above: Sequence[float],
    below: Sequence[float],
    *,
    paired: bool = False,
    coverage: float = COVERAGE,
) -> LogRatio:
    """log(median(above) / median(below)) with its BCa interval.

    `paired`: the i-th of both belong together. Then it is the median of log(above / below) of the
    pairs, with its interval by order statistics: the narrowest that covers at least as asked.
    """
    import numpy as np

    reason = _no_logarithm((above, below))
    if reason:
        return LogRatio(None, reason=reason)
    tops, bottoms = np.asarray(above, float), np.asarray(below, float)
    if paired and len(tops) != len(bottoms):
        raise ValueError(f"{len(tops)} and {len(bottoms)} samples are no pairs")
    if paired:
        return _of_pairs(np.log(tops / bottoms), coverage)
    value = _log_ratio(tops, bottoms)
    reason = _too_few((above, below))
    if reason:
        return LogRatio(value, reason=reason)
    chance = np.random.default_rng(_SEED)
    above_medians = _resampled_medians(tops, _RESAMPLES, chance)
    resampled = np.log(above_medians / _resampled_medians(bottoms, _RESAMPLES, chance))
    if resampled.min() == resampled.max():
        return LogRatio(value, reason=_NO_SPREAD)
    return LogRatio(value, _bca(value, resampled, _jackknives(tops, bottoms), coverage))


def _of_pairs(logs: Floats, coverage: float) -> LogRatio:
    """The median of the pairs' log ratios, and its interval."""
    import numpy as np

    value = float(np.median(logs))
    least = next(n for n in itertools.count(1) if median_rank(n, coverage))
    reason = _too_few([logs], least)
    if not reason and logs.min() == logs.max():
        reason = _NO_SPREAD
    if reason:
        return LogRatio(value, reason=reason)
    return LogRatio(value, median_interval(logs.tolist(), coverage))


def _log_ratio(tops: Floats, bottoms: Floats) -> Any:
    import numpy as np

    return np.log(np.median(tops, axis=-1) / np.median(bottoms, axis=-1))


def _jackknives(tops: Floats, bottoms: Floats) -> list[Floats]:
    """The statistic without one sample: one array per independently drawn sample."""
    import numpy as np

    above, below = _medians_without_each(tops), _medians_without_each(bottoms)
    return [np.log(above / np.median(bottoms)), np.log(np.median(tops) / below)]


def _medians_without_each(values: Floats) -> Floats:
    """The i-th is the median of all but `values[i]`."""
    import numpy as np

    order = np.argsort(values, kind="stable")
    ranks = np.empty(len(values), int)
    ranks[order] = np.arange(len(values))
    ordered = values[order]
    # What is left out moves everything above it down by one place.
    low, high = (len(values) - 2) // 2, (len(values) - 1) // 2
    middles = [ordered[np.where(place < ranks, place, place + 1)] for place in (low, high)]
    medians: Floats = np.mean(middles, axis=0)
    return medians


def _resampled_medians(samples: Floats, count: int, chance: np.random.Generator) -> Floats:
    """The medians of so many resamples. They are drawn in parts: all those of ten thousand samples
    at once would take 2 GB."""
    import numpy as np

    medians = np.empty(count)
    rows = max(1, _AT_ONCE // len(samples))
    for first in range(0, count, rows):
        part = medians[first : first + rows]
        which = chance.integers(len(samples), size=(len(part), len(samples)))
        part[:] = np.median(samples[which], axis=1)
    return medians


def _bca(value: float, resampled: Floats, jackknives: list[Floats], coverage: float) -> Interval:
    """The bias-corrected and accelerated interval of a statistic."""
    import numpy as np

    normal = NormalDist()
    count = len(resampled)
    below = (np.sum(resampled < value) + np.sum(resampled <= value)) / (2 * count)
    bias = normal.inv_cdf(min(max(float(below), 0.5 / count), 1.0 - 0.5 / count))
    influences = [(len(each) - 1) * (each.mean() - each) for each in jackknives]
    cubes = sum(float((u**3).sum()) / len(u) ** 3 for u in influences)
    squares = sum(float((u**2).sum()) / len(u) ** 2 for u in influences)
    # Zero where no single sample moves the median, as with many ties: then there is no skew to see.
    acceleration = cubes / (6 * squares**1.5) if squares else 0.0
    levels = []
    for tail in ((1 - coverage) / 2, (1 + coverage) / 2):
        shifted = bias + normal.inv_cdf(tail)
        levels.append(normal.cdf(bias + shifted / (1 - acceleration * shifted)))
    low, high = np.quantile(resampled, levels)
    return Interval(float(low), float(high), coverage)


def hierarchical_log_ratio_interval(
    above: Sequence[Sequence[float]],
    below: Sequence[Sequence[float]],
    *,
    paired: bool = False,
    coverage: float = COVERAGE,
) -> LogRatio:
    """The same of processes that hold raw samples.

    The statistic is the median over processes of each one's median. Processes and samples are both
    resampled, and percentiles taken: a conservative interval, since a process's own median already
    has the noise of its samples in it, and drawing these again adds it once more.

    `paired`: the i-th processes of both belong together, and their samples too where they are
    equally many. Then each pair of processes has one log ratio, and the interval is that of their
    median by order statistics; what samples differ within a process is in these ratios.
    """
    import numpy as np

    reason = _no_logarithm([*above, *below]) if above and below else "there are no samples"
    if reason:
        return LogRatio(None, reason=reason)
    if paired and len(above) != len(below):
        raise ValueError(f"{len(above)} and {len(below)} processes are no pairs")
    tops, bottoms = ([np.asarray(each, float) for each in side] for side in (above, below))
    if paired:
        pairs = zip(tops, bottoms, strict=True)
        return _of_pairs(np.asarray([_median_of_pairs(*pair) for pair in pairs]), coverage)
    middles = [np.asarray([np.median(each) for each in side]) for side in (tops, bottoms)]
    value = _log_ratio(middles[0], middles[1])
    reason = _too_few((above, below))
    if reason:
        return LogRatio(value, reason=reason)
    chance = np.random.default_rng(_SEED)
    which = chance.integers(len(tops), size=(_HIERARCHICAL_RESAMPLES, len(tops)))
    others = chance.integers(len(bottoms), size=(_HIERARCHICAL_RESAMPLES, len(bottoms)))
    drawn = _resampled_middles(tops, which, chance), _resampled_middles(bottoms, others, chance)
    return _percentiles(value, _log_ratio(*drawn), coverage)


def _median_of_pairs(tops: Floats, bottoms: Floats) -> Any:
    """Of one process: the median log ratio of its pairs, or of its medians where there are none."""
    import numpy as np

    if len(tops) != len(bottoms):
        return _log_ratio(tops, bottoms)
    return np.median(np.log(tops / bottoms))


def _resampled_middles(
    processes: list[Floats], picks: NDArray[np.int64], chance: np.random.Generator
) -> Floats:
    """For every picked process the median of a resample of its samples; the shape of `picks`."""
    import numpy as np

    middles = np.empty(picks.shape)
    for number, samples in enumerate(processes):
        here = picks == number
        middles[here] = _resampled_medians(samples, int(here.sum()), chance)
    return middles


def geometric_mean_interval(
    sides: Sequence[tuple[Sequence[float], Sequence[float]]],
    *,
    paired: bool = False,
    coverage: float = COVERAGE,
) -> LogRatio:
    """The geometric mean over configurations of median(above) / median(below), or of the median
    ratio of pairs.

    The configurations are resampled, and the processes within each, and percentiles taken: the
    interval is of the mean over configurations like these, not over these alone. Where these hardly
    differ it is conservative, since the noise of the processes is in it twice: it misses 1 % of the
    time. Where they differ by more than that noise it is short while they are few: six miss up to
    14 % of the time, eight 11 %, twelve 9 %.
    """
    import numpy as np

    if not sides:
        return LogRatio(None, reason="there are no samples")
    reason = _no_logarithm([side for pair in sides for side in pair])
    if reason:
        return LogRatio(None, reason=reason)
    data = [(np.asarray(above, float), np.asarray(below, float)) for above, below in sides]
    if paired and any(len(above) != len(below) for above, below in data):
        raise ValueError("the samples of a configuration are no pairs")
    middle = _median_of_pairs if paired else _log_ratio
    value = float(np.mean([middle(above, below) for above, below in data]))
    reason = _too_few([side for pair in sides for side in pair]) or _too_few(
        [sides], what="configurations"
    )
    if reason:
        return LogRatio(value, reason=reason)
    chance = np.random.default_rng(_SEED)
    picks = chance.integers(len(data), size=(_HIERARCHICAL_RESAMPLES, len(data)))
    drawn = np.empty(picks.shape)
    for number, (above, below) in enumerate(data):
        here = picks == number
        count = int(here.sum())
        if paired:
            drawn[here] = _resampled_medians(np.log(above / below), count, chance)
        else:
            medians = _resampled_medians(above, count, chance)
            drawn[here] = np.log(medians / _resampled_medians(below, count, chance))
    return _percentiles(value, drawn.mean(axis=1), coverage)


def _percentiles(value: float, resampled: Floats, coverage: float) -> LogRatio:
    import numpy as np

    if resampled.min() == resampled.max():
        return LogRatio(value, reason=_NO_SPREAD)
    low, high = np.quantile(resampled, [(1 - coverage) / 2, (1 + coverage) / 2])
    return LogRatio(value, Interval(float(low), float(high), coverage))


def equivalent(
    above: Sequence[float], below: Sequence[float], margin: float, *, paired: bool = False
) -> Equivalence:
    """Two one-sided tests at 5 %: equivalent where the 90 % interval lies within the margin.

    Of pairs that interval is one of order statistics, from five pairs on. None where there is no
    interval: too few samples show no difference either, and that is not equivalence. Raises
    ValueError for a margin that is not above 0.
    """
    if not margin > 0:
        raise ValueError(f"a margin of {margin} holds nothing")
    found = log_ratio_interval(above, below, paired=paired, coverage=0.90)
    if found.interval is None:
        return Equivalence(None, margin, found)
    bound = math.log1p(margin)
    inside = -bound < found.interval.low and found.interval.high < bound
    return Equivalence(inside, margin, found)


def _no_logarithm(sides: Sequence[Sequence[float]]) -> str:
    """Why these samples have no log ratio; empty where they have."""
    if not all(sides):
        return "there are no samples"
    if not all(math.isfinite(value) for side in sides for value in side):
        return "a sample is not finite"
    if any(value <= 0 for side in sides for value in side):
        return "a sample is zero or negative, so it has no logarithm"
    values = [value for side in sides for value in side]
    if math.isinf(max(values) / min(values)):
        return "samples are so far apart that no float64 holds their ratio"
    return ""


def _too_few(sides: Sequence[Any], least: int = LEAST, what: str = "repeats") -> str:
    """Why sides with so many samples have no interval; empty where they have."""
    fewest = min(len(side) for side in sides)
    counted = f"{fewest} {what if fewest != 1 else what[:-1]}"
    return f"{counted}, and fewer than {least} do not tell" if fewest < least else ""
