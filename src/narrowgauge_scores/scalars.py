"""All figures of one run, by the names that records, claims and tables have for them.

    exit<k>_accuracy          %    of the test images, exits from 0
    exit<k>_macs              MAC  per image, without the heads before it
    exit<k>_cumulative_macs   MAC  with them, as a pass pays that may leave at each
    exit<k>_latency           s    to its answer, every sample, where it was measured
    ece_exit<k>               1    expected calibration error
    auroc_exit<k>             1    of its largest probability against being right
    overthinking_exit<k>      %    right at exit k - 1 and wrong at k
    overthinking              %    right at some exit and wrong at the last
    area                      1    under accuracy over ln(MACs), steps, on the data set's range
    area_interruptible        1    the same with the heads before each exit paid
    area_own                  1    from its own first exit to its last, by straight lines, as the
                                   notes' reference areas are
    area_latency              1    over ln(seconds), steps, own range
    accuracy_at_<s>           %    at s = 10, 25, 50, 100 % of the range's end
    macs_at_base_less_1       MAC  the least that keeps within a point of the plain network that the
                                   run names; not there where it names none
    macs_at_last_less_1       MAC  the least that keeps within a point of its own last exit
    hypervolume               1    of its exits and thresholds on the data set's range
    monotonicity, consistency, diminishing_returns   1   shares; see `quality`
    oracle_accuracy, oracle_macs                     where nothing is lost to the choice of exits
    budgeted_accuracy, budgeted_macs                 a value for each operating point B
    adaptive_accuracy, mean_macs, exit<k>_share      of the run's own policy, where it has one

What cannot be told is not there: no AUROC where all answers are right, no `area` on a data set
that has no range of its own (made-up data), no validation split and so no operating points.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Iterator, List, Optional, Tuple, Union

import numpy as np

from narrowgauge_contract.errors import BadValueError
from narrowgauge_scores.answers import accuracies, confidences, correct_of
from narrowgauge_scores.areas import (
    RANGES,
    CostRange,
    accuracy_at,
    area,
    area_weights,
    cost_reaching,
    own_range,
)
from narrowgauge_scores.calibration import auroc, expected_calibration_error
from narrowgauge_scores.fronts import hypervolume
from narrowgauge_scores.points import (
    Point,
    budgeted_points,
    exit_costs,
    exit_points,
    oracle_points,
    scored,
)
from narrowgauge_scores.quality import (
    consistency,
    diminishing_returns,
    monotonicity,
    overthinking,
    spoiled,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from narrowgauge_scores.side_file import RunLogits

    Array = NDArray[Any]

__all__ = [
    "BUDGETS",
    "Scalar",
    "area_of",
    "area_values",
    "chance_of",
    "median_latency",
    "range_of",
    "scalars_of",
]

#: Shares of the range's end, in %.
BUDGETS = (10, 25, 50, 100)


@dataclasses.dataclass(frozen=True)
class Scalar:
    """A figure, or several of one name with `index` saying what counts them."""

    name: str
    values: Tuple[float, ...]
    unit: str
    source: str = "computed"
    index: str = ""

    @property
    def value(self) -> float:
        """The only, or the first of several."""
        return self.values[0]


def range_of(run: RunLogits) -> Optional[CostRange]:
    """That of its data set; None of made-up data and sets without one."""
    return None if run.synthetic else RANGES.get(run.data)


def chance_of(run: RunLogits) -> float:
    """What guessing gets."""
    return 1.0 / run.test.classes


def area_of(run: RunLogits, within: CostRange, *, interruptible: bool = False) -> float:
    """The step area of its exits on a range."""
    costs = exit_costs(run, interruptible=interruptible)
    heights = accuracies(run.test)
    return area(costs, heights, within.low, within.high, chance=chance_of(run))


def area_values(run: RunLogits, costs: Array, within: CostRange) -> Array:
    """float64 [images]: each image's part in the step area, whose mean the area is.

    `costs` [exits]: MACs or seconds, whatever the range is of.
    """
    weights = area_weights(costs, within.low, within.high)
    values: Array = weights[0] * chance_of(run) + weights[1:] @ correct_of(run.test)
    return values


def scalars_of(
    run: RunLogits, taken: Optional[Array] = None, within: Optional[CostRange] = None
) -> Tuple[Scalar, ...]:
    """Every figure of a run that can be told; `taken` int [images] is where its own policy lets
    each test image leave. `within`: the range that runs share, where their data set has none.
    Raises BadValueError for exits that there are not."""
    found: List[Scalar] = []
    shared = range_of(run) or within
    for part in (_per_exit(run), _areas(run, shared), _quality(run), _points(run, shared)):
        found.extend(part)
    if taken is not None:
        found.extend(_adaptive(run, taken))
    return tuple(found)


def _one(name: str, value: Optional[float], unit: str = "1") -> Iterator[Scalar]:
    if value is not None:
        yield Scalar(name, (float(value),), unit)


def _percent(name: str, value: Union[float, np.floating[Any]]) -> Iterator[Scalar]:
    yield from _one(name, 100.0 * float(value), "%")


def _per_exit(run: RunLogits) -> Iterator[Scalar]:
    correct, sure = correct_of(run.test), confidences(run.test.logits)
    direct, cumulative = exit_costs(run), exit_costs(run, interruptible=True)
    lost = spoiled(correct)
    for k in range(run.exits):
        yield from _percent(f"exit{k}_accuracy", correct[k].mean())
        yield from _one(f"exit{k}_macs", direct[k], "MAC")
        yield from _one(f"exit{k}_cumulative_macs", cumulative[k], "MAC")
        yield from _one(f"ece_exit{k}", expected_calibration_error(sure[k], correct[k]))
        yield from _one(f"auroc_exit{k}", auroc(sure[k], correct[k]))
        if k:
            yield from _percent(f"overthinking_exit{k}", lost[k - 1])
        if run.latency is not None:
            samples = tuple(run.latency[k].tolist())
            yield Scalar(f"exit{k}_latency", samples, "s", "monotonic", "pass")


def _areas(run: RunLogits, within: Optional[CostRange]) -> Iterator[Scalar]:
    heights, costs, chance = accuracies(run.test), exit_costs(run), chance_of(run)
    own = own_range(costs)
    if within is not None:
        yield from _one("area", area_of(run, within))
        yield from _one("area_interruptible", area_of(run, within, interruptible=True))
    straight = area(costs, heights, own.low, own.high, chance=chance, linear=True)
    yield from _one("area_own", straight)
    if run.latency is not None:
        times = median_latency(run.latency)
        over = own_range(times)
        yield from _one("area_latency", area(times, heights, over.low, over.high, chance=chance))
    end = (within or own).high
    for share in BUDGETS:
        reached = accuracy_at(costs, heights, share / 100.0 * end, chance=chance)
        yield from _percent(f"accuracy_at_{share}", reached)
    for name, base in (("base", run.base_accuracy), ("last", 100.0 * float(heights[-1]))):
        if base is not None:
            # A rounding must not lose the exit that is exactly a point below.
            least = cost_reaching(costs, heights, base / 100.0 - 0.01 - 1e-12)
            yield from _one(f"macs_at_{name}_less_1", least, "MAC")


def _quality(run: RunLogits) -> Iterator[Scalar]:
    correct, heights = correct_of(run.test), accuracies(run.test)
    yield from _one("monotonicity", monotonicity(heights))
    yield from _one("consistency", consistency(correct))
    yield from _one("diminishing_returns", diminishing_returns(heights))
    yield from _percent("overthinking", overthinking(correct))


def _points(run: RunLogits, within: Optional[CostRange]) -> Iterator[Scalar]:
    budgeted, best = budgeted_points(run), oracle_points(run)[-1]
    yield from _percent("oracle_accuracy", best.accuracy)
    yield from _one("oracle_macs", best.macs, "MAC")
    if budgeted:
        index = "operating point"
        heights = tuple(100.0 * point.accuracy for point in budgeted)
        yield Scalar("budgeted_accuracy", heights, "%", index=index)
        macs = tuple(point.macs for point in budgeted)
        yield Scalar("budgeted_macs", macs, "MAC", index=index)
    if within is not None:
        every: Tuple[Point, ...] = (*exit_points(run), *budgeted)
        costs, shares = [p.macs for p in every], [p.accuracy for p in every]
        value = hypervolume(costs, shares, within.low, within.high, floor=chance_of(run))
        yield from _one("hypervolume", value)


def _adaptive(run: RunLogits, taken: Array) -> Iterator[Scalar]:
    fits = taken.shape == (run.test.images,) and taken.dtype.kind in "iu"
    if not fits or taken.min() < 0 or taken.max() >= run.exits:
        raise BadValueError(
            "these are no exits that the test images leave at",
            why=f"wanted are {run.test.images} integers from 0 to {run.exits - 1}",
        )
    point = scored(run, taken, kind="B", label="its own policy")
    yield from _percent("adaptive_accuracy", point.accuracy)
    yield from _one("mean_macs", point.macs, "MAC")
    for k, share in enumerate(point.shares):
        yield from _percent(f"exit{k}_share", share)


def median_latency(latency: Array) -> Array:
    """float64 [exits]: the median seconds to each answer, never less than to the one before."""
    found: Array = np.maximum.accumulate(np.median(latency, axis=1))
    return found
