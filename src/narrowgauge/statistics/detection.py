"""The least effect that a comparison would find, from measurements of A against A.

A comparison of `above` with `below` processes is judged by the ratio of their medians. (That of
paired processes, by the median of their ratios, sees as much, and more where pairs share what
drifts.) Between
equal things that ratio is noise, and 5 % of such comparisons lie beyond some threshold: whoever
takes these for an effect raises 5 % false alarms. The least detectable effect is the one that 95 %
of comparisons of the same size would find beyond that threshold. It is what a comparison can see,
not what is worth seeing; a ratio within it may still be real, but this comparison does not show it.

The noise is taken as it is: processes of A are drawn anew, many times, into both sides. What
differs between processes is in it, which pairs within one process do not show. Drawn values are
smoothed by a normal kernel of Silverman's width and shrunk back to the variance of the data
(Silverman and Young 1987): medians of a handful of values drawn plainly take a handful of values,
and the tail is then a matter of luck. Half of the time the result is within a sixth of the truth
from ten processes, within a quarter from six.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.statistics.ratios import LEAST

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["FALSE_ALARMS", "POWER", "Effect", "least_detectable_effect"]

FALSE_ALARMS = 0.05
POWER = 0.95
_COMPARISONS = 10000


@dataclass(frozen=True)
class Effect:
    """`threshold` and `least` as shares: 0.02 is a ratio of 1.02. None where `reason` says why."""

    threshold: float | None
    least: float | None
    reason: str = ""


def least_detectable_effect(processes: Sequence[float], above: int, below: int) -> Effect:
    """From one figure per process of A, for a comparison of `above` with `below` processes."""
    import numpy as np

    if len(processes) < LEAST:
        return Effect(None, None, f"{len(processes)} processes, and fewer than {LEAST} do not tell")
    if not all(math.isfinite(value) and value > 0 for value in processes):
        return Effect(None, None, "a figure is not a positive number")
    if min(above, below) < 1:
        return Effect(None, None, "one side has no process")
    logs = np.log(np.asarray(processes, float))
    noise = logs - logs.mean()
    if not noise.any():
        return Effect(None, None, "the processes do not differ, so the clock is too coarse")
    chance = np.random.default_rng(0)
    ratios = _medians(noise, above, chance) - _medians(noise, below, chance)
    threshold = float(np.quantile(np.abs(ratios), 1 - FALSE_ALARMS))
    # Which way the effect goes is not known, so the worse of the two.
    short = max(float(np.quantile(ratios, POWER)), float(-np.quantile(ratios, 1 - POWER)))
    return Effect(math.expm1(threshold), math.expm1(threshold + short))


def _medians(noise: Floats, size: int, chance: np.random.Generator) -> Floats:
    """Medians of so many draws each from the smoothed noise."""
    import numpy as np

    spread = float(noise.std(ddof=1))
    width = 1.06 * spread * len(noise) ** -0.2
    shrink = spread / math.sqrt(float(noise.var()) + width**2)
    drawn = chance.choice(noise, (_COMPARISONS, size))
    drawn += width * chance.standard_normal(drawn.shape)
    medians: Floats = np.median(drawn, axis=1) * shrink
    return medians
