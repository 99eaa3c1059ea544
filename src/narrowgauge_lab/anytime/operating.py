"""Where a trained network is operated: thresholds fitted on its validation split, those that a
paper gives, and those that a row was asked for, each scored on the test split."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import numpy as np

from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.policies import Policy, parse, simulate
from narrowgauge_lab.anytime.thresholds import (
    LabelledLogits,
    OperatingPoint,
    choose,
    fit,
    score,
    test_of,
    validation_of,
)
from narrowgauge_lab.context import RowContext
from narrowgauge_scores.answers import correct_of
from narrowgauge_scores.resampling import draw_means, interval_of
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, read_logits

__all__ = [
    "FITTED", "PAPER", "Operation", "of_test_split", "operate", "operate_row", "require_policy",
]  # fmt: skip

#: What the parameter `policy` may say beside a policy: the fitted one, or the paper's.
FITTED, PAPER = "fitted", "paper"
_BEST = "best"


@dataclasses.dataclass(frozen=True)
class Operation:
    """The policy of the row, as `policies.parse` reads it, and the test split under it; `front`:
    the test split under every policy that the fit kept, cheapest on the validation split first."""

    policy: str
    point: OperatingPoint
    front: Tuple[OperatingPoint, ...]


def require_policy(asked: str, exits: int, *, paper: bool = True) -> None:
    """Raises what `policies.parse` raises for what the parameter `policy` cannot be, before
    anything is trained for it. `paper`: whether the system's paper gives one."""
    if asked != FITTED and not (paper and asked == PAPER):
        parse(asked, exits)


def of_test_split(run: RunLogits) -> Tuple[LabelledLogits, ExitCosts]:
    """What a run's exits said of its test split, and what they cost: what `score` takes."""
    costs = ExitCosts(tuple(run.cumulative_macs.tolist()), tuple(run.direct_macs.tolist()), (), ())
    return test_of(run), costs


def operate(
    ctx: RowContext,
    run: RunLogits,
    *,
    asked: str,
    kind: str,
    lose: float,
    paper: Optional[str] = None,
    method: str = "grid",
) -> Operation:
    """Fit thresholds of a `kind` of policy by a `method` of `thresholds` on the validation split,
    and choose the cheapest that lose at most `lose` points of accuracy there; score these, the
    `paper`'s where it gives any, and the `asked` ones (FITTED, PAPER, or a policy) on the test
    split, once each.

    Records `adaptive_accuracy`, `mean_macs`, `exit<k>_share` and `macs_gain` of the row's policy;
    `fitted_…` and `paper_accuracy`, `…_macs` and `…_exit<k>_share` of those two, and `best_…` of
    the cheapest that lose nothing on the validation split; `front_accuracy` and `front_macs` of all
    that the fit kept; and facts with the policies. `macs_gain` is against the whole network without
    its other heads. `adaptive_minus_base`, `…_low` and `…_high` where the run says which images its
    plain network got right: points of accuracy, and the interval of paired draws of test images.
    Raises BadValueError for a run without a validation split.
    """
    test, costs = of_test_split(run)
    kept = fit(validation_of(run), costs, kind, method)
    named = {FITTED: choose(kept, lose).policy, _BEST: choose(kept, 0.0).policy}
    if paper is not None:
        named[PAPER] = paper

    def scored(policy: str) -> OperatingPoint:
        return score(parse(policy, run.exits), test, costs)

    front = tuple(scored(each.policy) for each in kept)
    _record_front(ctx, kept, front)
    for name, each in named.items():
        _record_named(ctx, name, each, scored(each))
    policy = named.get(asked, asked)
    point = scored(policy)
    ctx.fact("policy_ran", policy)
    ctx.metric("adaptive_accuracy", point.accuracy, unit="%", source="computed")
    ctx.metric("mean_macs", point.macs, unit="MAC", source="computed")
    for number, share in enumerate(point.shares):
        ctx.metric(f"exit{number}_share", 100.0 * share, unit="%", source="computed")
    ctx.metric("macs_gain", costs.direct[-1] / point.macs, unit="1", source="computed")
    _record_against_base(ctx, run, parse(policy, run.exits))
    return Operation(policy, point, front)


def operate_row(ctx: RowContext, kind: str) -> Operation:
    """`operate` of the answers that `train_anytime` left, by the row's parameters `policy` and
    `lose`, with a threshold of its own for each exit (`knapsack`)."""
    return operate(
        ctx, read_logits(ctx.side_file(LOGITS_FILE)), asked=ctx.parameters["policy"], kind=kind,
        lose=ctx.parameters["lose"], method="knapsack",
    )  # fmt: skip


def _record_named(ctx: RowContext, name: str, policy: str, point: OperatingPoint) -> None:
    ctx.fact(f"{name}_policy", policy)
    ctx.metric(f"{name}_accuracy", point.accuracy, unit="%", source="computed")
    ctx.metric(f"{name}_macs", point.macs, unit="MAC", source="computed")
    for number, share in enumerate(point.shares):
        ctx.metric(f"{name}_exit{number}_share", 100.0 * share, unit="%", source="computed")


def _record_against_base(ctx: RowContext, run: RunLogits, policy: Policy) -> None:
    """Both answered the same images, so what makes one hard for both cancels in the difference."""
    if run.test.base_correct is None:
        return
    taken = simulate(policy, run.test.logits).numpy()
    adaptive = correct_of(run.test)[taken, np.arange(run.test.images)].astype(np.float64)
    plain = run.test.base_correct.astype(np.float64)
    drawn = draw_means([adaptive[np.newaxis], plain[np.newaxis]])
    found = interval_of(float((adaptive - plain).mean()), drawn[0] - drawn[1], -1.0, 1.0)
    for name, value in (("", found.value), ("_low", found.low), ("_high", found.high)):
        ctx.metric(f"adaptive_minus_base{name}", 100.0 * value, unit="points", source="computed")


def _record_front(
    ctx: RowContext, kept: List[OperatingPoint], front: Tuple[OperatingPoint, ...]
) -> None:
    index = "operating point"
    for name, values, unit in (
        ("front_validation_accuracy", [point.accuracy for point in kept], "%"),
        ("front_accuracy", [point.accuracy for point in front], "%"),
        ("front_macs", [point.macs for point in front], "MAC"),
    ):
        ctx.metric(name, values, unit=unit, source="computed", index=index)
    ctx.fact("front_policies", [point.policy for point in kept])
