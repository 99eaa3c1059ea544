"""Answers, thresholds and the operators' own decisions, for tests of the kernels of a decision."""

from __future__ import annotations

import math
from typing import List, Tuple

import torch

from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.fused import Fused, Launch, Order, Outcome
from narrowgauge_lab.anytime.network import Answer
from narrowgauge_lab.anytime.policies import Threshold, parse

__all__ = [
    "COSTS", "KINDS", "decided", "exact_cases", "gapped", "logits_like", "outcome_of", "packed",
    "same", "spoilt",
]  # fmt: skip

KINDS = ("entropy", "entropy-normalised", "max-probability", "margin")
#: Of three exits.
COSTS = ExitCosts((7, 2**33 + 8, 2**34), (7, 2**33, 2**34), (5, 2**33, 2**33 - 8), (2, 1, 0))


def logits_like(batch: int, classes: int, seed: int = 0, scale: float = 3.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, classes, generator=generator) * scale


def gapped(kind: str, logits: torch.Tensor) -> Threshold:
    """A policy whose threshold is in the widest gap about the middle of these samples' measures;
    beside the only one's."""
    rule = parse(f"{kind}:0")
    assert isinstance(rule, Threshold)
    measured = rule.measure(logits).double().cpu().sort()[0]
    count = measured.shape[0]
    if count == 1:
        return rule.with_thresholds([float(measured[0]) + 0.01] * 2)
    gaps = measured[1:] - measured[:-1]
    first, beyond = (count - 1) // 4, max((count - 1) // 4 + 1, 3 * (count - 1) // 4)
    place = first + int(gaps[first:beyond].argmax())
    return rule.with_thresholds([float(measured[place : place + 2].mean())] * 2)


def spoilt(logits: torch.Tensor) -> torch.Tensor:
    """Every third sample with a NaN or an infinity somewhere: the first, the last class, all."""
    given = logits.clone()
    values = (math.nan, math.inf, -math.inf)
    for turn, sample in enumerate(range(0, len(given), 3)):
        value = values[turn % 3]
        places: List[slice] = [slice(0, 1), slice(-1, None), slice(None)]
        given[sample, places[turn // 3 % 3]] = value
    return given


def exact_cases() -> List[Tuple[str, List[List[float]], List[bool]]]:
    """Policies with a threshold that is met exactly or just missed, whatever is summed first:
    their logits, and who leaves."""
    above = float(torch.nextafter(torch.tensor(0.5), torch.tensor(1.0)))
    return [
        ("max-probability:0.5", [[3.0, 3.0], [3.0, 2.9]], [True, True]),
        (f"max-probability:{above!r}", [[3.0, 3.0]], [False]),
        ("max-probability:0.1", [[0.25] * 10], [True]),
        ("max-probability:1", [[200.0, 0.0], [3.0, 0.0]], [True, False]),
        ("max-probability:inf", [[200.0, 0.0]], [False]),
        ("max-probability:1e300", [[200.0, 0.0]], [False]),
        ("max-probability:0", [[1.0, 2.0]], [True]),
        ("margin:0", [[5.0, 5.0, 1.0], [1.0, 5.0, 5.0]], [True, True]),
        ("margin:1e-30", [[5.0, 5.0, 1.0], [5.0, 1.0, 5.0]], [False, False]),
        ("margin:1", [[200.0, 0.0], [-5.0, 300.0], [3.0, 0.0]], [True, True, False]),
        ("margin:1", [[4.0]], [True]),
        ("entropy:0", [[200.0, 0.0], [1.0, 1.0]], [False, False]),
        ("entropy:1e-30", [[200.0, 0.0], [3.0, 0.0]], [True, False]),
        ("entropy:inf", [[1.0, 1.0], [-7.0, 2.0]], [True, True]),
        ("entropy:1e-46", [[200.0, 0.0]], [False]),  # 0 in float32
        ("entropy-normalised:1e-30", [[200.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [True, False]),
        ("entropy-normalised:1.01", [[1.0] * 7], [True]),
        ("entropy:1e-30", [[4.0]], [True]),
    ]


def outcome_of(rows: int, classes: int, device: torch.device) -> Outcome:
    """Of samples that have left something else before."""
    return Outcome(
        torch.full((rows, classes), -1.0, device=device),
        torch.full((rows,), -1, dtype=torch.int64, device=device),
        torch.full((rows,), 0.5, dtype=torch.float64, device=device),
    )


def decided(policy: Threshold, launch: Launch, logits: torch.Tensor) -> torch.Tensor:
    """bool [B]: who leaves at the second of three exits, everybody having come there, by the
    kernel; its flag has to fit."""
    device, (batch, classes) = logits.device, logits.shape
    undecided = torch.ones(batch, dtype=torch.bool, device=device)
    flag = torch.zeros((), dtype=torch.bool, device=device)
    fused = Fused(policy.for_exits(3), COSTS, launch, device)
    outcome = outcome_of(batch, classes, device)
    fused.decide(1, Answer(logits, ()), outcome, undecided, flag)
    assert bool(flag) == bool(undecided.any())
    assert outcome.exits.tolist() == [1] * batch
    assert outcome.macs.tolist() == [0.5 + COSTS.stages[1]] * batch
    assert same(outcome.logits, logits)
    return ~undecided


def packed(
    policy: Threshold, launch: Launch, logits: torch.Tensor, rest: List[int], batch: int
) -> Tuple[Outcome, Order]:
    """What the other kernel leaves behind the second of three exits, of rows that are the samples
    `rest` of a batch."""
    device, classes = logits.device, logits.shape[1]

    def places(rows: int) -> torch.Tensor:
        return torch.full((rows,), -7, dtype=torch.int64, device=device)

    outcome = outcome_of(batch + 1, classes, device)
    order = Order(
        torch.tensor(rest, dtype=torch.int64, device=device), places(batch + 1), places(len(rest)),
        torch.tensor(-7, device=device),
    )  # fmt: skip
    fused = Fused(policy.for_exits(3), COSTS, launch, device)
    fused.pack(1, Answer(logits, ()), outcome, order)
    return outcome, order


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit, NaN too."""
    return bool(torch.equal(one.nan_to_num(nan=9e9), other.nan_to_num(nan=9e9)))
