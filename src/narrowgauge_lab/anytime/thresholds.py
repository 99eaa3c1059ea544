"""Thresholds of a policy, fitted on a validation split, and what they come to on a split.

Three ways: a `grid` of the values that the papers swept, of smaller entropies and of the threshold
that nobody meets, for exits that are sure and wrong; `geometric`, where the share of samples
that leave falls or grows by a constant factor from exit to exit (MSDNet's protocol, Huang et al.
2018, arXiv 1703.09844); and `knapsack`, the thresholds of the largest accuracy for the mean cost,
by Lagrange multipliers and an exact search along each exit in turn.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

import numpy as np
import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.policies import (
    POLICIES,
    Patience,
    Policy,
    Threshold,
    finite,
    parse,
    simulate,
)
from narrowgauge_scores.points import limits_for

if TYPE_CHECKING:
    from narrowgauge_scores.side_file import RunLogits

__all__ = [
    "METHODS",
    "LabelledLogits",
    "OperatingPoint",
    "ValidationLogits",
    "choose",
    "fit",
    "for_shares",
    "front",
    "score",
    "test_of",
    "validation_of",
]

METHODS = ("grid", "geometric", "knapsack")

#: BranchyNet's for nats (`branchynet/utils.py`, from 1e-4 on), DDNN's for shares of the largest
#: entropy; each goes on to where exits are that know their training images by heart, and are sure
#: of most others too, rightly or not.
_GRIDS: Dict[str, Tuple[float, ...]] = {
    "entropy": (
        1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 5e-4, 1e-3, 5e-3, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5,
        0.75, 1.0, 2.0, 3.0, 5.0, 10.0,
    ),
    "entropy-normalised": (1e-8, 1e-6, 1e-4, 0.01, 0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0),
    "max-probability": (
        0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.975, 0.99, 0.999, 0.9999, 0.99999, 0.999999,
    ),
    "margin": (0.1, 0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 0.999, 0.9999, 0.99999, 0.999999),
}  # fmt: skip
#: Every combination of thresholds for so many exits beside the last; one for all beyond.
_PRODUCT_EXITS = 2
#: MSDNet's 39 factors, p from 1/20 to 39/20.
_FACTORS = tuple(step / 20 for step in range(1, 40))
#: Prices of the whole cost in points of accuracy: from all that counts to nothing.
_PRICES = tuple(10.0 ** (step / 4 - 4.0) for step in range(21))
_ROUNDS = 8


@dataclasses.dataclass(frozen=True)
class LabelledLogits:
    """What the exits of a network said of a split. `logits` [exits, N, classes], `labels` int64
    [N], NumPy's or torch's. `macs` [exits, N]: cumulative, where they depend on the sample."""

    split: str
    logits: torch.Tensor
    labels: torch.Tensor
    macs: Optional[torch.Tensor] = None

    def __post_init__(self) -> None:
        """Raises BadValueError for shapes that do not match, and for logits that are not numbers:
        of a network that diverged."""
        logits = torch.as_tensor(np.asarray(self.logits))
        labels = torch.as_tensor(np.asarray(self.labels)).to(torch.int64)
        macs = None if self.macs is None else torch.as_tensor(np.asarray(self.macs)).double()
        if logits.dtype == torch.float16:
            logits = logits.float()
        object.__setattr__(self, "logits", logits)
        object.__setattr__(self, "labels", labels)
        object.__setattr__(self, "macs", macs)
        fits = logits.dim() == 3 and tuple(labels.shape) == (logits.shape[1],)
        if not fits or not labels.numel() or (macs is not None and macs.shape != logits.shape[:2]):
            raise BadValueError(
                f"logits and labels of the split {self.split} do not belong together",
                why=f"logits {tuple(logits.shape)}, labels {tuple(labels.shape)}",
                next_step="logits are [exits, samples, classes], of one sample at least",
            )
        if not bool(torch.isfinite(logits).all()):
            raise BadValueError(
                f"there are logits of the split {self.split} that are not finite",
                why="the network diverged, or half precision was too narrow",
                next_step="fit to the weights of an earlier epoch, or in float32",
            )

    @property
    def right(self) -> torch.Tensor:
        """bool [exits, N]: whether an exit's answer is the label."""
        return self.logits.argmax(dim=2) == self.labels

    def cumulative(self, costs: ExitCosts) -> torch.Tensor:
        """float64 [exits, N]: MACs up to each exit."""
        if self.macs is not None:
            return self.macs
        counted = torch.tensor(costs.cumulative, dtype=torch.float64)
        if counted.shape[0] != self.logits.shape[0]:
            raise BadValueError(
                f"costs of {counted.shape[0]} exits for logits of {self.logits.shape[0]}"
            )
        return counted.unsqueeze(1).expand(-1, self.labels.shape[0])


class ValidationLogits(LabelledLogits):
    """Those of a validation split, which thresholds may be fitted on; `validation_of` makes them of
    a run. What a split is called says nothing about where it comes from."""


def validation_of(run: RunLogits) -> ValidationLogits:
    """The validation split of a run. Raises BadValueError for a run without one."""
    if run.val is None:
        raise BadValueError(
            "there is no validation split to fit thresholds on",
            why="the run's logits are of its test split alone",
            next_step="set some of the training images aside when it is trained",
        )
    return ValidationLogits("validation", run.val.logits, run.val.labels, run.val.macs)


def test_of(run: RunLogits) -> LabelledLogits:
    """The test split of a run, which may be scored and not be fitted on."""
    return LabelledLogits("test", run.test.logits, run.test.labels, run.test.macs)


@dataclasses.dataclass(frozen=True)
class OperatingPoint:
    """A policy, as `parse` reads it, and what it came to: `accuracy` in percent, mean `macs` of a
    sample, and the share of samples that left at each exit."""

    policy: str
    split: str
    accuracy: float
    macs: float
    shares: Tuple[float, ...]


def score(policy: Policy, data: LabelledLogits, costs: ExitCosts) -> OperatingPoint:
    """What a policy comes to on a split: of a test split, once, with a policy fitted elsewhere."""
    taken = simulate(policy, data.logits)
    exits, samples = data.logits.shape[:2]
    every = torch.arange(samples)
    shares = torch.bincount(taken, minlength=exits).double() / samples
    return OperatingPoint(
        policy=str(policy),
        split=data.split,
        accuracy=100.0 * float(data.right[taken, every].double().mean()),
        macs=float(data.cumulative(costs)[taken, every].mean()),
        shares=tuple(float(share) for share in shares),
    )


def fit(
    data: LabelledLogits, costs: ExitCosts, kind: str = "entropy", method: str = "grid"
) -> List[OperatingPoint]:
    """The operating points of a kind of POLICIES that no other one found beats, cheapest first.

    Raises BadValueError for what is no ValidationLogits, since thresholds must not see the test
    split, and for a kind or method that there is not.
    """
    if not isinstance(data, ValidationLogits):
        raise BadValueError(
            f"thresholds cannot be fitted on the split {data.split}",
            why="what is fitted there says nothing about images that were not seen",
            next_step="fit on validation_of() a run, then score() its test_of() once",
        )
    if method not in METHODS or kind not in POLICIES:
        raise BadValueError(
            f"no thresholds of '{kind}' by '{method}'",
            next_step=f"one of {', '.join(POLICIES)} by one of {', '.join(METHODS)}",
        )
    exits = data.logits.shape[0]
    found: List[Policy]
    if kind == "patience":
        if method != "grid":
            raise BadValueError(
                f"patience has no thresholds to fit by {method}", next_step="method grid"
            )
        found = [Patience(count) for count in range(1, max(exits, 2))]
    else:
        rule = parse(f"{kind}:0")
        assert isinstance(rule, Threshold)
        ways = {"grid": _grid, "geometric": _geometric, "knapsack": _knapsack}
        found = ways[method](rule, data, costs)
    return front([score(policy, data, costs) for policy in found])


def front(points: Sequence[OperatingPoint]) -> List[OperatingPoint]:
    """Those that no other one of at most their cost reaches in accuracy, cheapest first."""
    kept: List[OperatingPoint] = []
    for point in sorted(points, key=lambda each: (each.macs, -each.accuracy)):
        if not kept or point.accuracy > kept[-1].accuracy:
            kept.append(point)
    return kept


def choose(points: Sequence[OperatingPoint], lose: float = 0.0) -> OperatingPoint:
    """The cheapest one that is at most `lose` points of accuracy below the best.

    Raises BadValueError where there is none to choose from.
    """
    if not points:
        raise BadValueError("there is no operating point to choose from")
    enough = max(point.accuracy for point in points) - lose
    return min((each for each in points if each.accuracy >= enough), key=lambda each: each.macs)


def _grid(rule: Threshold, data: LabelledLogits, costs: ExitCosts) -> List[Policy]:
    del costs
    exits = data.logits.shape[0]
    values = (*_GRIDS[rule.kind], _nobody(rule.below))
    if exits - 1 > _PRODUCT_EXITS:
        return [rule.with_thresholds([value]).for_exits(exits) for value in values]
    every = itertools.product(values, repeat=max(exits - 1, 1))
    return [rule.with_thresholds(each) for each in every]


def _nobody(below: bool) -> float:
    """The threshold that no sample meets."""
    return 0.0 if below else math.inf


def _geometric(rule: Threshold, data: LabelledLogits, costs: ExitCosts) -> List[Policy]:
    del costs
    exits = data.logits.shape[0]
    found: List[Policy] = []
    for factor in _FACTORS:
        weights = np.array([factor**number for number in range(1, exits + 1)])
        found.append(for_shares(rule, data.logits, (weights / weights.sum()).tolist()))
    return found


def for_shares(rule: Threshold, logits: torch.Tensor, shares: Sequence[float]) -> Threshold:
    """The rule with thresholds by which these shares of all samples leave at each exit, of logits
    [exits, N, classes]; the last exit's follows from the others. See points.limits_for, by which
    runs are scored too: they are rounded down, and equally sure samples leave together."""
    if logits.shape[0] < 2:
        return rule.with_thresholds([0.0])
    rows = [rule.measure(each).detach().cpu().numpy() for each in logits[:-1]]
    measured = np.stack(rows)
    unsure = measured if rule.below else -measured
    unsure[~torch.stack([finite(each) for each in logits[:-1]]).cpu().numpy()] = np.inf
    limits = limits_for(unsure, shares).astype(measured.dtype)
    return rule.with_thresholds([_at_limit(limit, rule.below) for limit in limits])


def _at_limit(limit: np.floating, below: bool) -> float:
    """The threshold that those who are at most this unsure meet, and nobody else: in the type that
    a policy measures in, as `below` is strict and the limit is not."""
    if np.isneginf(limit):
        return _nobody(below)
    if np.isposinf(limit):
        return math.inf if below else 0.0
    # An entropy that is 0 may be a rounding below it, which no threshold is.
    return max(0.0, float(np.nextafter(limit, limit.dtype.type(np.inf)) if below else -limit))


def _knapsack(rule: Threshold, data: LabelledLogits, costs: ExitCosts) -> List[Policy]:
    """For each price of a MAC, thresholds of the largest mean accuracy less price; from those where
    nobody leaves, one exit's is moved to its best place at a time, until none moves."""
    measured = _measured(rule, data)
    right = data.right.double().numpy()
    spent = data.cumulative(costs).numpy()
    whole = float(spent[-1].mean()) or 1.0
    found: List[Policy] = []
    for price in _PRICES:
        worth = right - price * spent / whole
        thresholds = [_nobody(rule.below)] * (worth.shape[0] - 1)
        for _ in range(_ROUNDS):
            before = list(thresholds)
            for number in range(len(thresholds)):
                thresholds[number] = _best(measured, worth, thresholds, number, rule.below)
            if thresholds == before:
                break
        found.append(rule.with_thresholds(thresholds or [0.0]))
    return found


def _best(
    measured: np.ndarray, worth: np.ndarray, thresholds: Sequence[float], number: int, below: bool
) -> float:
    """The best threshold of one exit, exactly, with the others as they are: of those who come here,
    in order of confidence, the first so many leave whose gain over going on is largest."""
    samples = worth.shape[1]
    here = np.ones(samples, dtype=bool)
    for earlier in range(number):
        here &= ~_leave(measured[earlier], thresholds[earlier], below)
    onward = worth[-1].copy()
    for later in range(worth.shape[0] - 2, number, -1):
        leaves = _leave(measured[later], thresholds[later], below)
        onward[leaves] = worth[later][leaves]
    gains = (worth[number] - onward)[here]
    values = measured[number][here]
    order = np.argsort(values if below else -values, kind="stable")
    total = np.concatenate([[0.0], np.cumsum(gains[order])])
    # Samples that are equally sure leave together: a place between them is none.
    ordered = values[order]
    possible = np.ones(len(total), dtype=bool)
    possible[1:-1] = ordered[1:] != ordered[:-1]
    return _of_first(values, int(np.argmax(np.where(possible, total, -np.inf))), below)


def _of_first(values: np.ndarray, count: int, below: bool) -> float:
    """A threshold by which the `count` most confident leave, and whoever is as sure as the last."""
    ordered = np.sort(values) if below else -np.sort(-values)
    if count <= 0:
        return _nobody(below)
    if not below:
        return float(ordered[min(count, len(ordered)) - 1]) if len(ordered) else math.inf
    # Strictly below: the next value that differs.
    rest = ordered[ordered > ordered[min(count, len(ordered)) - 1]] if len(ordered) else ordered
    return float(rest[0]) if len(rest) else math.inf


def _leave(values: np.ndarray, threshold: float, below: bool) -> np.ndarray:
    leaves: np.ndarray = values < threshold if below else values >= threshold
    return leaves


def _measured(rule: Threshold, data: LabelledLogits) -> np.ndarray:
    """[exits - 1, N], in the logits' own type, which is what the policy will compare."""
    exits = data.logits.shape[0]
    rows = [rule.measure(data.logits[number]).numpy() for number in range(exits - 1)]
    return np.stack(rows) if rows else np.zeros((0, data.logits.shape[1]), dtype=np.float32)
