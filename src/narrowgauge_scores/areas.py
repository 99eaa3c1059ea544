"""Accuracy over the logarithm of a cost, as one number.

    area = ∫ accuracy d(ln cost) / ln(high / low), from low to high

A network that gives its answers at costs c_1 < c_2 < … has, at a cost between c_k and c_k+1, the
answer of exit k: the step interpolation, with chance level before the first answer. That is what
somebody who interrupts it gets. `linear` draws straight lines over ln(cost) from point to point
instead, as a plot does, which flatters by what lies between two exits; the figures that the notes'
printed curves give, 0.9292 and 0.7108, are of this kind.

The range decides what an area is worth, so it is fixed for each data set (`RANGES`); from a
network's own first exit to its last (`own_range`) areas of different networks do not compare.
"""

from __future__ import annotations

import dataclasses
import math
from typing import TYPE_CHECKING, Any, Dict, Optional

import numpy as np

from narrowgauge_contract.errors import BadValueError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    Array = NDArray[Any]

__all__ = [
    "RANGES",
    "CostRange",
    "accuracy_at",
    "area",
    "area_weights",
    "cost_reaching",
    "own_range",
]


@dataclasses.dataclass(frozen=True)
class CostRange:
    """From where to where an area is taken, and whose costs these are. `high` stands for 100 % of
    the budget in `accuracy_at_25` and its like."""

    low: float
    high: float
    why: str


def _share_of(macs: int, whose: str) -> CostRange:
    return CostRange(0.02 * macs, float(macs), f"2 to 100 % of {whose}, {macs / 1e6:.4g} MMAC")


#: Multiply-accumulates of convolutions and fully connected layers of the plain network that the
#: published systems on that data set start from, to the unit: at 100 % that network itself counts.
#: Tests count them. With 100 classes the last layer of ResNet-32 is 64·90 larger.
_RESNET_32, _RESNET_32_OF_100, _LENET = 68_862_592, 68_868_352, 1_140_070
RANGES: Dict[str, CostRange] = {
    "cifar10": _share_of(_RESNET_32, "plain ResNet-32"),
    "cifar100": _share_of(_RESNET_32_OF_100, "plain ResNet-32 of 100 classes"),
    "fashion-mnist": _share_of(_LENET, "BranchyNet's plain LeNet"),
    "mnist": _share_of(_LENET, "BranchyNet's plain LeNet"),
}


def own_range(costs: ArrayLike) -> CostRange:
    """From a network's first exit to its last; half a factor of two around a single one."""
    found = np.asarray(costs, np.float64)
    low, high = float(found.min()), float(found.max())
    if low == high:
        return CostRange(low / math.sqrt(2), high * math.sqrt(2), "around its only exit")
    return CostRange(low, high, "its own first exit to its last")


def area_weights(costs: ArrayLike, low: float, high: float) -> Array:
    """What each point's accuracy counts in a step area, and chance level's weight first.

    `costs` [points], ascending; the weights [1 + points] are 0 or more and sum up to 1. A point
    counts from its cost to the next one's; of points of one cost the last.
    """
    _require_range(low, high)
    found = _ascending(costs)
    edges = np.concatenate(([0.0], np.log(np.clip(found / low, 1.0, high / low)), [0.0]))
    edges[-1] = math.log(high / low)
    weights: Array = np.diff(edges) / math.log(high / low)
    return weights


def area(
    costs: ArrayLike,
    accuracies: ArrayLike,
    low: float,
    high: float,
    *,
    chance: float,
    linear: bool = False,
) -> float:
    """The normalised area under points [points] of ascending costs; see the module's text.

    Chance level holds before the first point, the last accuracy beyond the last. Raises
    BadValueError for costs that are not positive or fall, and for a range that is none.
    """
    heights = np.asarray(accuracies, np.float64)
    weights = area_weights(costs, low, high)
    if heights.shape != (len(weights) - 1,):
        raise BadValueError(f"{heights.size} accuracies for {len(weights) - 1} costs")
    stepped = float(weights @ np.concatenate(([chance], heights)))
    if not linear:
        return stepped
    return stepped + _triangles(np.log(_ascending(costs)), heights, math.log(low), math.log(high))


def _triangles(logs: Array, heights: Array, low: float, high: float) -> float:
    """What straight lines between points have beyond steps, within the range, normalised."""
    extra = 0.0
    for k in range(len(logs) - 1):
        left, right = max(logs[k], low), min(logs[k + 1], high)
        if right <= left:
            continue
        slope = (heights[k + 1] - heights[k]) / (logs[k + 1] - logs[k])
        extra += slope * ((right - logs[k]) ** 2 - (left - logs[k]) ** 2) / 2
    return float(extra / (high - low))


def accuracy_at(costs: ArrayLike, accuracies: ArrayLike, budget: float, *, chance: float) -> float:
    """What somebody has who stops at that cost: the last answer until then, or chance."""
    reached = int(np.searchsorted(_ascending(costs), budget, side="right"))
    return float(np.asarray(accuracies, np.float64)[reached - 1]) if reached else chance


def cost_reaching(costs: ArrayLike, accuracies: ArrayLike, wanted: float) -> Optional[float]:
    """The least cost of a point that is at least as accurate; None where none is."""
    enough = np.asarray(costs, np.float64)[np.asarray(accuracies, np.float64) >= wanted]
    return float(enough.min()) if enough.size else None


def _ascending(costs: ArrayLike) -> Array:
    found = np.asarray(costs, np.float64)
    good = found.ndim == 1 and found.size and np.isfinite(found).all()
    if not good or found[0] <= 0 or (np.diff(found) < 0).any():
        raise BadValueError(
            "these costs make no curve", why="they should be finite, above 0 and never fall"
        )
    return found


def _require_range(low: float, high: float) -> None:
    if not 0 < low < high < math.inf:
        raise BadValueError(
            f"there is no area from {low:g} to {high:g}",
            why="a range goes from a cost above 0 to a larger one",
        )
