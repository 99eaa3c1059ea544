"""What makes an anytime algorithm a good one, after Zilberstein (AI Magazine 17(3), 1996).

monotonicity         quality does not fall with time
consistency          the answer that is kept is not given up again
diminishing returns  each further step gains less than the one before
interruptibility     what there is when it is stopped at a time: `performance_profile`
recognisable quality see `calibration`
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Optional

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]

__all__ = [
    "Conditional",
    "conditional_profile",
    "consistency",
    "diminishing_returns",
    "monotonicity",
    "overthinking",
    "performance_profile",
    "spoiled",
]


def monotonicity(accuracies: ArrayLike) -> Optional[float]:
    """The share of steps from exit to exit at which accuracy does not fall; None of one exit."""
    steps = np.diff(np.asarray(accuracies, np.float64))
    return float((steps >= 0).mean()) if steps.size else None


def diminishing_returns(accuracies: ArrayLike) -> Optional[float]:
    """The share of second differences of accuracy below 0; None of fewer than three exits."""
    bends = np.diff(np.asarray(accuracies, np.float64), n=2)
    return float((bends < 0).mean()) if bends.size else None


def consistency(correct: Array) -> float:
    """The share of images [exits, images] whose answer, once right, stays right."""
    return float((np.diff(correct.astype(np.int8), axis=0) >= 0).all(axis=0).mean())


def overthinking(correct: Array) -> float:
    """The share of images [exits, images] that some exit gets right and the last gets wrong.

    Kaya and others, Shallow-Deep Networks, ICML 2019, call this the destructive kind.
    """
    return float((correct.any(axis=0) & ~correct[-1]).mean())


def spoiled(correct: Array) -> Array:
    """float64 [exits - 1]: the share of images that exit k gets right and exit k + 1 wrong."""
    found: Array = (correct[:-1] & ~correct[1:]).mean(axis=1)
    return found


def performance_profile(
    latency: Array, accuracies: ArrayLike, times: ArrayLike, *, chance: float
) -> Array:
    """Q(t): the accuracy expected of a network that is killed t seconds after its start.

    `latency` [exits, repeats] in seconds; a repeat is one pass, and what it has at `times` [n] is
    its last answer until then, or chance. The mean over the repeats, [n].
    """
    heights = np.concatenate(([chance], np.asarray(accuracies, np.float64)))
    # A later exit cannot answer before an earlier one of the same pass.
    passed = np.maximum.accumulate(latency, axis=0)
    ready = (passed[:, :, np.newaxis] <= np.asarray(times, np.float64)).sum(axis=0)
    profile: Array = heights[ready].mean(axis=0)
    return profile


@dataclasses.dataclass(frozen=True)
class Conditional:
    """Pr(quality out | quality in): of the images whose answer at one exit has a confidence within
    `edges` [bins + 1], `share` [bins] of all, each later exit gets `right` [exits, bins] right; NaN
    of a bin without images. `kept` and `mended` [exits]: of those right, and wrong, there."""

    edges: Array
    share: Array
    right: Array
    kept: Array
    mended: Array


def conditional_profile(
    confidence: Array, correct: Array, exit: int = 0, bins: int = 5
) -> Conditional:
    """What later exits make of an answer, by how good it looks at `exit`.

    `confidence` and bool `correct` are [exits, images]. Bins hold about as many images each: their
    edges are quantiles of the confidence, those that coincide made one.
    """
    seen = confidence[exit]
    edges = np.unique(np.quantile(seen, np.linspace(0.0, 1.0, bins + 1)))
    if len(edges) < 2:
        edges = np.array([edges[0], edges[0]])
    count = len(edges) - 1
    places = np.clip(np.searchsorted(edges, seen, side="right") - 1, 0, count - 1)
    held = np.bincount(places, minlength=count)
    sums = np.stack([np.bincount(places, weights=each, minlength=count) for each in correct])
    right = np.divide(sums, held, out=np.full(sums.shape, np.nan), where=held > 0)
    good = correct[exit]
    return Conditional(
        edges=edges,
        share=held / seen.size,
        right=right,
        kept=_mean_over(correct, good),
        mended=_mean_over(correct, ~good),
    )


def _mean_over(correct: Array, chosen: Array) -> Array:
    """[exits], NaN where nothing is chosen."""
    if not chosen.any():
        return np.full(len(correct), np.nan)
    found: Array = correct[:, chosen].mean(axis=1)
    return found
