"""Operating points: where on the plane of cost and accuracy a network can be run.

    A  anytime     everybody stops at exit k: `exit_points`
    B  budgeted    each image leaves by its confidence, with thresholds from the validation split
                   alone, scored once on the test split: `budgeted_points`
    C  static      variants of a family (widths, bits, cuts), each as a whole: the scorer of many
                   runs makes them of last exits

and the staircase that no rule can climb beyond: `oracle_points`.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from narrowgauge_scores.answers import accuracies, correct_of, costs_of, entropies

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

    from narrowgauge_scores.side_file import RunLogits

    Array = NDArray[Any]

__all__ = [
    "Point",
    "budgeted_points",
    "exit_costs",
    "exit_points",
    "exits_taken",
    "geometric_thresholds",
    "law_points",
    "limits_for",
    "mean_points",
    "oracle_points",
    "scored",
]

#: The ratios of the geometric laws: what each exit lets go, to what the one before does.
_LAWS = tuple(number / 20.0 for number in range(1, 40))


@dataclasses.dataclass(frozen=True)
class Point:
    """`macs`: per image, on average; `accuracy` from 0 to 1; `shares` [exits] leave at each exit,
    of all images; `thresholds` [exits - 1] in nats, where there are any."""

    kind: str
    label: str
    macs: float
    accuracy: float
    shares: Tuple[float, ...] = ()
    thresholds: Tuple[float, ...] = ()


def exit_costs(run: RunLogits, *, interruptible: bool = False) -> Array:
    """float64 [exits]: MACs per image of the test split to each exit's answer.

    The exit is known beforehand, so heads before it are left out (Zilberstein's contract); or they
    are not (`interruptible`), since an answer has to be there whenever it is asked for.
    """
    macs: Array = costs_of(run.test, run.cumulative_macs).mean(axis=1)
    if interruptible:
        return macs
    # A mean of depths that depend on the image may round below what the heads before it cost.
    direct = macs - (run.cumulative_macs - run.direct_macs)
    found: Array = np.maximum.accumulate(np.maximum(direct, 1.0))
    return found


def exit_points(run: RunLogits) -> Tuple[Point, ...]:
    """A: one for each exit."""
    costs, heights = exit_costs(run), accuracies(run.test)
    return tuple(
        Point("A", name, float(cost), float(height))
        for name, cost, height in zip(run.names(), costs, heights)
    )


def geometric_thresholds(val_logits: Array, ratio: float) -> Array:
    """float64 [exits - 1]: entropies in nats at and below which images leave, such that, of the
    validation split, each exit lets `ratio` times as many go as the one before.

    The protocol of MSDNet's evaluation (Huang and others, ICLR 2018), with the entropy as its
    confidence. An exit whose part is less than one image lets nobody go: -1.
    """
    parts = ratio ** np.arange(val_logits.shape[0], dtype=np.float64)
    found = limits_for(entropies(val_logits[:-1]), parts / parts.sum())
    return np.where(np.isneginf(found), -1.0, found)


def limits_for(measured: Array, shares: ArrayLike) -> Array:
    """float64 [exits - 1]: limits at and below which images leave, such that these `shares`
    [exits or exits - 1] of all images do, rounded down to whole ones; -inf where that is none.

    `measured` [exits - 1, images] is the lower, the surer an exit is. Equally sure images leave
    together, so where many are, more leave.
    """
    exits, images = measured.shape
    # A share such as 0.29 of 100 is 29, not what its product in binary rounds down to.
    quotas = np.floor(np.asarray(shares, np.float64) * images + 1e-9).astype(np.int64)
    found = np.full(exits, -np.inf)
    staying = np.ones(images, bool)
    for number in range(exits):
        left = np.sort(measured[number][staying])
        quota = min(int(quotas[number]), left.size)
        if quota > 0:
            found[number] = left[quota - 1]
            staying &= measured[number] > found[number]
    return found


def exits_taken(measured: Array, thresholds: ArrayLike) -> Array:
    """int64 [images]: the first exit whose entropy [exits, images] is at most its threshold; the
    last takes whoever is left."""
    limits = np.append(np.asarray(thresholds, np.float64), np.inf)
    taken: Array = (measured <= limits[:, np.newaxis]).argmax(axis=0)
    return taken


def scored(
    run: RunLogits, taken: Array, *, kind: str, label: str, thresholds: Sequence[float] = ()
) -> Point:
    """The point of a rule that lets each image of the test split leave at the exit `taken`."""
    everyone = np.arange(run.test.images)
    shares = np.bincount(taken, minlength=run.exits) / run.test.images
    return Point(
        kind,
        label,
        macs=float(costs_of(run.test, run.cumulative_macs)[taken, everyone].mean()),
        accuracy=float(correct_of(run.test)[taken, everyone].mean()),
        shares=tuple(shares.tolist()),
        thresholds=tuple(float(each) for each in thresholds),
    )


def law_points(run: RunLogits, laws: Optional[Sequence[float]] = None) -> Tuple[Point, ...]:
    """B: a point for each geometric law, in the laws' order, so that those of several seeds go
    together; none of a run without a validation split, or with one exit."""
    if run.val is None or run.exits < 2:
        return ()
    measured = entropies(run.test.logits)
    found: Dict[bytes, Point] = {}
    points: List[Point] = []
    for ratio in laws or _LAWS:
        thresholds = geometric_thresholds(run.val.logits, ratio)
        label, same = f"geometric, ratio {ratio:g}", found.get(thresholds.tobytes())
        if same is None:
            taken = exits_taken(measured, thresholds)
            limits = thresholds.tolist()
            same = scored(run, taken, kind="B", label=label, thresholds=limits)
            found[thresholds.tobytes()] = same
        points.append(dataclasses.replace(same, label=label))
    return tuple(points)


def budgeted_points(run: RunLogits, laws: Optional[Sequence[float]] = None) -> Tuple[Point, ...]:
    """`law_points`, cheapest first, those whose thresholds coincide once."""
    found: Dict[Tuple[float, ...], Point] = {}
    for point in law_points(run, laws):
        found.setdefault(point.thresholds, point)
    return tuple(sorted(found.values(), key=lambda point: (point.macs, point.accuracy)))


def mean_points(seeds: Sequence[RunLogits]) -> Tuple[Point, ...]:
    """A and B of one network over its seeds: the mean cost and accuracy of each exit, and of each
    law where all seeds have a validation split. A point of one lucky seed is none of these."""
    exits = [exit_points(run) for run in seeds]
    laws = [law_points(run) for run in seeds]
    listed = [*zip(*exits), *(zip(*laws) if all(laws) else ())]
    return tuple(
        Point(
            points[0].kind,
            points[0].label,
            macs=float(np.mean([point.macs for point in points])),
            accuracy=float(np.mean([point.accuracy for point in points])),
        )
        for points in listed
    )


def oracle_points(run: RunLogits) -> Tuple[Point, ...]:
    """The staircase of somebody who knows the labels and may go up to exit k, for each k: an image
    leaves at the first exit that is right, and at the first of all where none is."""
    correct = correct_of(run.test)
    points = []
    for number in range(run.exits):
        # Of no true value argmax gives the first exit, which is where to leave then.
        taken = correct[: number + 1].argmax(axis=0)
        points.append(scored(run, taken, kind="oracle", label=f"up to {run.names()[number]}"))
    return tuple(points)
