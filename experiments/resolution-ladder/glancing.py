"""A glance and a second look, operated by the entropy of the glance, beside the plain sizes."""

from __future__ import annotations

from typing import Sequence

import torch
from torch import nn

from narrowgauge_lab.anytime import logits_file, operating, policies, scores, thresholds
from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.ladder import Rung
from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.systems.glance import Glance
from narrowgauge_lab.anytime.thresholds import OperatingPoint
from narrowgauge_lab.batch_statistics import reestimate_from
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.precision import Mode
from narrowgauge_scores.fronts import best_static_gain
from narrowgauge_scores.side_file import RunLogits

from .sizing import at

__all__ = ["record_glance"]

_BATCH = 500


def record_glance(
    ctx: RowContext,
    net: nn.Module,
    splits: Splits,
    mode: Mode,
    rungs: Sequence[Rung],
    about: About,
) -> None:
    """Leave `logits.npz` of the two exits, fit the entropy on the validation split, score it once
    on the test split, and hold it against the sizes that cost no more."""
    splits.record(ctx)
    glance = _glance(ctx, net, splits, mode)
    run = logits_file.write(ctx, glance, splits, about, mode, batch_size=_BATCH)
    point = _operate(ctx, run)
    scores.record(ctx, run, policies.simulate(policies.parse(point.policy, 2), run.test.logits))
    _hold_against(ctx, splits, mode, rungs, point)


def _glance(ctx: RowContext, net: nn.Module, splits: Splits, mode: Mode) -> Glance:
    parameters = ctx.parameters
    look = at(ctx, net, splits, mode, parameters["look"])
    glance = Glance(
        at(ctx, net, splits, mode, parameters["glance"]), look, parameters["crop"],
        parameters["place"], parameters["combined"],
    )  # fmt: skip
    if parameters["statistics"] == "anew" and parameters["place"] != "whole":
        # Windows are other pictures than whole ones of their size.
        _settle(ctx, glance, splits, mode)
    return glance.eval()


def _settle(ctx: RowContext, glance: Glance, splits: Splits, mode: Mode) -> None:
    glance.eval()
    count = min(ctx.parameters["recalibration"], len(splits.training))
    if not count:
        return
    parts = torch.arange(count, device=mode.device).split(ctx.parameters["batch_size"])

    def cut(indices: torch.Tensor) -> torch.Tensor:
        with mode.autocast():
            return glance.window(splits.training.batch(indices)[0])

    reestimate_from(glance.look, (cut(indices) for indices in parts), mode.autocast)


def _operate(ctx: RowContext, run: RunLogits) -> OperatingPoint:
    """The policy that the row asks for, or the one fitted, scored on the test split."""
    test, costs = operating.of_test_split(run)
    asked, lose = ctx.parameters["policy"], ctx.parameters["lose"]
    kept = thresholds.fit(thresholds.validation_of(run), costs, "entropy", "knapsack")
    policy = thresholds.choose(kept, lose).policy if asked == operating.FITTED else asked
    point = thresholds.score(policies.parse(policy, 2), test, costs)
    ctx.fact("policy_ran", point.policy)
    return point


def _hold_against(
    ctx: RowContext, splits: Splits, mode: Mode, rungs: Sequence[Rung], point: OperatingPoint
) -> None:
    """`gain_over_sizes`: points of accuracy by which the glance beats the best plain size that
    costs no more; missing where all cost more."""
    macs = [rung.macs for rung in rungs if rung.macs is not None]
    heights = [_accuracy(rung, splits, mode) for rung in rungs]
    gain = best_static_gain(point.macs, point.accuracy, macs, heights)
    if gain is not None:
        ctx.metric("gain_over_sizes", gain, unit="points", source="computed")
    ctx.fact("sizes_accuracy", dict(zip((rung.name for rung in rungs), heights)))


def _accuracy(rung: Rung, splits: Splits, mode: Mode) -> float:
    """Percent of the test images that a rung gets right."""
    right, test = 0, splits.test
    with torch.no_grad():
        for indices in torch.arange(len(test), device=mode.device).split(_BATCH):
            images, labels = test.batch(indices)
            with mode.autocast():
                logits = rung.forward(images)
            assert isinstance(logits, torch.Tensor)
            right += int((logits.argmax(1) == labels).sum())
    return 100.0 * right / len(test)
