"""Which points of which families nobody beats, and how much of the plane they have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Tuple

import numpy as np

from narrowgauge_scores.areas import area

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]

__all__ = ["best_static_gain", "hypervolume", "pareto_front"]


def pareto_front(costs: ArrayLike, accuracies: ArrayLike) -> Tuple[int, ...]:
    """The indices of the points that none beats, cheapest first.

    A point is beaten by one that costs no more and is more accurate, or is as accurate and costs
    less; of equal points the first stands.
    """
    costs_, heights = np.asarray(costs, np.float64), np.asarray(accuracies, np.float64)
    front, best = [], -np.inf
    for index in np.lexsort((np.arange(len(costs_)), -heights, costs_)):
        if heights[index] > best:
            front.append(int(index))
            best = heights[index]
    return tuple(front)


def hypervolume(
    costs: ArrayLike, accuracies: ArrayLike, low: float, high: float, *, floor: float
) -> float:
    """The part of the plane that points beat, from `floor` to 1 and over ln(cost) from `low` to
    `high`: 0 of no point in it, 1 of one that is always right at `low` or below.

    Zitzler and Thiele's measure with the reference point (high, floor), normalised.
    """
    front = list(pareto_front(costs, accuracies))
    if not front:
        return 0.0
    heights = np.maximum(np.asarray(accuracies, np.float64)[front], floor)
    under = area(np.asarray(costs, np.float64)[front], heights, low, high, chance=floor)
    return max(0.0, float((under - floor) / (1.0 - floor)))  # sums of weights round


def best_static_gain(
    cost: float, accuracy: float, costs: ArrayLike, accuracies: ArrayLike
) -> Optional[float]:
    """How much more accurate a point is than the best of static networks that cost no more; None
    where none is as cheap."""
    affordable = np.asarray(accuracies, np.float64)[np.asarray(costs, np.float64) <= cost]
    return float(accuracy - affordable.max()) if affordable.size else None
