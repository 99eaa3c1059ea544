"""What becomes of a pruned network: what it gets right, what it costs, and which ratio to take."""

from __future__ import annotations

import dataclasses
import statistics
from typing import List, Optional, Tuple

import torch

from narrowgauge_contract.order_statistics import median_bounds
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evaluation import evaluate
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.precision import Mode
from narrowgauge_lab.transforms.pruning import nonzero_macs

from .steps import Pruned

__all__ = ["Outcome", "examine", "record_chosen", "record_outcomes"]

_TEST_BATCH = 500
#: What a network may lose on validation images, in points, to be chosen: the most pruned one of
#: several that keep so much has been lucky there, and is to keep within a point on test images.
_KEPT = 0.7


@dataclasses.dataclass(frozen=True, eq=False)
class Outcome:
    """Accuracies in percent: of test images, of validation images, and of test images `before` it
    was trained on. Costs of one image, as they run, and if nothing were paid for zeros. `speedups`:
    how many times as fast as the whole network, pair by pair."""

    pruned: Pruned
    accuracy: float
    validation: float
    macs: int
    macs_nonzero: int
    parameters: int
    parameters_nonzero: int
    before: Optional[float] = None
    speedups: Tuple[float, ...] = (1.0,)

    @property
    def speedup(self) -> float:
        """The median of the pairs."""
        return statistics.median(self.speedups)

    @property
    def name(self) -> str:
        """What it is called in tables and pictures."""
        return f"{100 * self.pruned.ratio:g} % pruned" if self.before is not None else "whole"


def examine(pruned: Pruned, splits: Splits, mode: Mode) -> Outcome:
    """All of it but times and what was before."""
    model = pruned.model
    image, _ = splits.test.batch(torch.arange(1, device=mode.device))
    accuracy, validation = (
        evaluate(model, feed, mode, _TEST_BATCH).accuracy
        for feed in (splits.test, splits.validation)
    )
    return Outcome(
        pruned=pruned,
        accuracy=accuracy,
        validation=validation,
        macs=count(model, image).macs,
        macs_nonzero=nonzero_macs(model, image),
        parameters=sum(each.numel() for each in model.parameters()),
        parameters_nonzero=sum(int((each != 0).sum()) for each in model.parameters()),
    )


def record_outcomes(ctx: RowContext, outcomes: List[Outcome]) -> None:
    """A value for each ratio; `_whole` of the network that nothing was taken from."""
    whole, pruned = outcomes[0], outcomes[1:]
    ctx.metric("accuracy_whole", whole.accuracy, unit="%", source="computed")
    ctx.metric("macs_whole", whole.macs, unit="MAC", source="counted")
    ctx.metric("parameters_whole", whole.parameters, unit="1", source="counted")
    columns = {
        "accuracy_before": ("%", [each.before for each in pruned if each.before is not None]),
        "accuracy_after": ("%", [each.accuracy for each in pruned]),
        "removed": ("1", [each.pruned.removed for each in pruned]),
        "macs": ("MAC", [each.macs for each in pruned]),
        "macs_nonzero": ("MAC", [each.macs_nonzero for each in pruned]),
        "parameters": ("1", [each.parameters for each in pruned]),
        "parameters_nonzero": ("1", [each.parameters_nonzero for each in pruned]),
        "speedup": ("1", [each.speedup for each in pruned]),
    }
    for name, (unit, values) in columns.items():
        ctx.metric(name, values, unit=unit, source="computed", index="ratio")
    differences = [each.pruned.difference for each in pruned if each.pruned.difference is not None]
    if differences:
        ctx.metric("removal_difference", differences, unit="1", source="computed", index="ratio")


def record_chosen(ctx: RowContext, outcomes: List[Outcome]) -> Outcome:
    """Take the one of fewest multiply-accumulates, of equal ones the most pruned, that keeps within
    0.7 points on validation images, and record how fast it is, with the 95 % interval of the median
    where there are pairs enough for one (six), and what it loses on test images.
    Chosen by these themselves, it would look better than it is. The whole network is one to choose
    from.
    """
    whole = outcomes[0]
    keeping = [each for each in outcomes if each.validation >= whole.validation - _KEPT]
    chosen = min(keeping, key=lambda each: (each.macs, -each.pruned.ratio))
    saved = 1.0 - chosen.macs / whole.macs
    lost = whole.accuracy - chosen.accuracy
    ctx.metric("chosen_ratio", chosen.pruned.ratio, unit="1", source="computed")
    ctx.metric("chosen_speedup", chosen.speedup, unit="1", source="computed")
    bounds = median_bounds(chosen.speedups)
    if bounds is not None:
        ctx.metric("chosen_speedup_low", bounds[0], unit="1", source="computed")
        ctx.metric("chosen_speedup_high", bounds[1], unit="1", source="computed")
    ctx.metric("chosen_macs_saved", saved, unit="1", source="computed")
    ctx.metric("chosen_accuracy_lost", lost, unit="points", source="computed")
    return chosen
