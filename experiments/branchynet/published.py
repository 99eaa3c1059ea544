"""The thresholds that were published with figures, each scored on the test split."""

from __future__ import annotations

from typing import Dict, Tuple

from narrowgauge_lab.anytime.operating import of_test_split
from narrowgauge_lab.anytime.policies import Entropy
from narrowgauge_lab.anytime.thresholds import score
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.side_file import RunLogits

__all__ = ["THRESHOLDS", "record_published"]

#: Of the entropy in nats: those of Table I and of the program's notebooks.
THRESHOLDS: Dict[str, Tuple[Tuple[float, ...], ...]] = {
    "b-lenet": ((1e-4,), (0.025,), (0.1,), (0.5,)),
    "b-alexnet": ((1e-4, 0.05), (0.01, 0.05), (1e-4, 10.0)),
    "b-resnet-110": ((0.3, 0.2),),
}


def record_published(ctx: RowContext, net: str, run: RunLogits) -> None:
    """`entropy_0.01_0.05_accuracy`, `…_macs` and `…_exit0_share` of such thresholds."""
    test, costs = of_test_split(run)
    for thresholds in THRESHOLDS[net]:
        point = score(Entropy(thresholds), test, costs)
        name = "_".join(["entropy", *(f"{each:g}" for each in thresholds)])
        ctx.metric(f"{name}_accuracy", point.accuracy, unit="%", source="computed")
        ctx.metric(f"{name}_macs", point.macs, unit="MAC", source="computed")
        share = 100.0 * point.shares[0]
        ctx.metric(f"{name}_exit0_share", share, unit="%", source="computed")
