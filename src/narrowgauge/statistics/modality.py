"""Whether samples have two modes: then a median, and an interval of it, stand for neither.

The test is Hartigan and Hartigan's dip (Annals of Statistics 13, 1985): how far the distribution of
the samples is, at the least, from any with one mode. Its distribution for one mode is taken from
the uniform, the worst case of theirs, by simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["Modes", "dip", "dip_p_value", "modes_of", "null_quantiles"]

#: Fewer samples show two modes only where they lie worlds apart.
_LEAST = 20
#: More are thinned to so many order statistics, evenly spaced: their dip is as good.
_MOST = 1024
_SIGNIFICANT = 0.01
#: Modes nearer than this share of the median move no figure further than the usual noise does.
_APART = 0.01
#: A mode that holds fewer samples than this is a handful of outliers, which a median ignores.
_SHARE = 0.1
#: Chance that a sample of one mode has a larger dip, per column of `_CRITICAL`.
_CHANCES = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001)
#: sqrt(n) * dip of n uniform samples that is exceeded with these chances: what
#: `null_quantiles(n, 20000)` gives.
_CRITICAL: dict[int, tuple[float, ...]] = {
    20: (0.3279, 0.3940, 0.4342, 0.4689, 0.5099, 0.5349, 0.5641, 0.5945, 0.6178),
    24: (0.3335, 0.3993, 0.4400, 0.4765, 0.5208, 0.5503, 0.5782, 0.6159, 0.6452),
    32: (0.3386, 0.4078, 0.4488, 0.4867, 0.5327, 0.5631, 0.5884, 0.6199, 0.6373),
    48: (0.3457, 0.4159, 0.4576, 0.4949, 0.5404, 0.5705, 0.5993, 0.6376, 0.6657),
    64: (0.3494, 0.4203, 0.4638, 0.5008, 0.5482, 0.5802, 0.6124, 0.6475, 0.6675),
    96: (0.3537, 0.4253, 0.4695, 0.5091, 0.5572, 0.5911, 0.6234, 0.6610, 0.6791),
    128: (0.3572, 0.4300, 0.4751, 0.5142, 0.5615, 0.5918, 0.6189, 0.6564, 0.6833),
    256: (0.3633, 0.4383, 0.4825, 0.5240, 0.5721, 0.6061, 0.6376, 0.6733, 0.6952),
    512: (0.3685, 0.4441, 0.4908, 0.5311, 0.5793, 0.6155, 0.6458, 0.6922, 0.7383),
    1024: (0.3715, 0.4464, 0.4930, 0.5372, 0.5880, 0.6212, 0.6546, 0.6937, 0.7322),
}


@dataclass(frozen=True)
class Modes:
    """Two modes. `p`: the chance of such a dip with one mode; `low` and `high`: their medians;
    `share`: of the samples in the upper one."""

    p: float
    low: float
    high: float
    share: float


def modes_of(samples: Sequence[float]) -> Modes | None:
    """The two modes of the samples; None where one mode explains them, or they are too few.

    For samples of a clock: ticks are seen, for they are evenly spaced. Ratios of ticks, and what
    else is drawn from unevenly spaced values, have combs of their own, which pass for modes.

    Two: at a chance of 1 % at most, with 1 % of the median between them and 10 % of the samples in
    either. Outliers count as the last samples that are none, or they would be the second mode.
    """
    import numpy as np

    if len(samples) < _LEAST or not all(map(math.isfinite, samples)):
        return None
    values = np.sort(np.asarray(samples, float))
    if values[0] == values[-1]:
        return None
    p = dip_p_value(dip(_thinned(_smoothed(values))), min(len(values), _MOST))
    if p > _SIGNIFICANT:
        return None
    split = _split(np.clip(values, *np.quantile(values, [_SHARE / 2, 1 - _SHARE / 2])))
    if min(split, len(values) - split) < _SHARE * len(values):
        return None
    low, high = float(np.median(values[:split])), float(np.median(values[split:]))
    if high - low < _APART * abs(float(np.median(values))):
        return None
    return Modes(p, low, high, (len(values) - split) / len(values))


def _smoothed(values: Floats) -> Floats:
    """Sorted values without ties. A clock that ticks makes a comb of one mode: samples between two
    ticks are spread over the tick they were rounded to."""
    import numpy as np

    steps = np.diff(values)
    if steps.min() > 0:
        return values
    tick = steps[steps > 0].min()
    jitter = np.random.default_rng(0).uniform(-0.5, 0.5, len(values))
    return np.sort(values + tick * jitter)


def _thinned(values: Floats) -> Floats:
    import numpy as np

    if len(values) <= _MOST:
        return values
    kept = np.linspace(0, len(values) - 1, _MOST).round().astype(int)
    thinned: Floats = values[kept]
    return thinned


def _split(values: Floats) -> int:
    """How many of the sorted values belong to the lower mode: the cut with the least variance
    within both parts."""
    import numpy as np

    count = np.arange(1, len(values))
    sums = np.cumsum(values)[:-1]
    total = values.sum()
    between = (sums / count - (total - sums) / (len(values) - count)) ** 2
    return int(np.argmax(between * count * (len(values) - count))) + 1


def dip(values: Floats) -> float:
    """The dip of sorted values without ties; at least 1 / (2 n), which is what one mode gives.

    The modal interval shrinks from both ends. In each round, below it the distribution is compared
    with the greatest convex function under it, above it with the least concave one over it.
    """
    import numpy as np

    n = len(values)
    largest = 1.0  # in steps of the distribution, which are 1 high here
    low, high = 0, n - 1
    while high > low:
        x = values[low : high + 1]
        under = np.arange(low, high + 1, dtype=float)  # below each step; above it is 1 more
        convex, concave = _hull(x, under, 1.0), _hull(x, under, -1.0)
        floor = np.interp(x, x[convex], under[convex])
        ceiling = np.interp(x, x[concave], under[concave] + 1.0)
        gaps = ceiling - floor
        at_convex, at_concave = convex[np.argmax(gaps[convex])], concave[np.argmax(gaps[concave])]
        if max(gaps[at_convex], gaps[at_concave]) <= largest:
            break
        if gaps[at_convex] > gaps[at_concave]:
            left, right = at_convex, concave[np.searchsorted(concave, at_convex)]
        else:
            left, right = convex[np.searchsorted(convex, at_concave, "right") - 1], at_concave
        largest = max(
            largest,
            float(np.max(under[: left + 1] + 1.0 - floor[: left + 1])),
            float(np.max(ceiling[right:] - under[right:])),
        )
        if right - left == high - low:
            break
        low, high = low + int(left), low + int(right)
    return largest / (2 * n)


def _hull(x: Floats, y: Floats, side: float) -> NDArray[np.int64]:
    """The indices of the points on the lower (side 1) or upper (-1) convex hull, in order."""
    import numpy as np

    knots: list[int] = []
    xs, ys = x.tolist(), (side * y).tolist()
    for i in range(len(xs)):
        while len(knots) > 1:
            a, b = knots[-2], knots[-1]
            if (ys[b] - ys[a]) * (xs[i] - xs[a]) < (ys[i] - ys[a]) * (xs[b] - xs[a]):
                break
            knots.pop()
        knots.append(i)
    return np.asarray(knots)


def dip_p_value(value: float, n: int) -> float:
    """The chance that n samples of one mode have a larger dip; 0.5 and 0.001 stand for beyond."""
    import numpy as np

    sizes = list(_CRITICAL)
    table = np.asarray([_CRITICAL[size] for size in sizes])
    critical = [np.interp(math.log(n), np.log(sizes), column) for column in table.T]
    logs = np.interp(math.sqrt(n) * value, critical, np.log(_CHANCES))
    return float(np.exp(logs))


def null_quantiles(n: int, samples: int, seed: int = 0) -> tuple[float, ...]:
    """A row of `_CRITICAL`, from so many simulated samples of the uniform."""
    import numpy as np

    chance = np.random.default_rng([seed, n])
    dips = [dip(np.sort(chance.uniform(size=n))) for _ in range(samples)]
    return tuple(float(q) for q in math.sqrt(n) * np.quantile(dips, 1 - np.asarray(_CHANCES)))
