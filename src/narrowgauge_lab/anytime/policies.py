"""When a sample may leave a network with several exits: confidence rules, and their replay.

A policy sees logits and nothing else, so the same rule runs on a device inside a network's pass and
offline on logits that were stored. Nothing here reads a tensor's value on the host: `leaves` may be
captured in a CUDA graph. Logits that are not finite are never confident: such a sample goes on.
"""

from __future__ import annotations

import abc
import math
from typing import Dict, List, Optional, Sequence, Type, Union

import numpy as np
import torch

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.anytime.network import State, select

__all__ = [
    "POLICIES", "Entropy", "Margin", "MaxProbability", "Memory", "Patience", "Policy", "Threshold",
    "finite", "parse", "simulate",
]  # fmt: skip

#: Logits of all exits as side files hold them, [exits, N, classes].
Stored = Union[np.ndarray, torch.Tensor, Sequence[torch.Tensor]]


class Memory:
    """What a policy keeps of each sample from exit to exit; one for each pass of a batch."""

    def __init__(self) -> None:
        self.parts: State = ()

    def select(self, samples: torch.Tensor) -> None:
        """Keep only these samples: int64 indices [n] into the batch."""
        self.parts = select(self.parts, samples)


class Policy(abc.ABC):
    """A rule that says at each exit but the last which samples leave there."""

    @abc.abstractmethod
    def leaves(self, exit: int, logits: torch.Tensor, memory: Memory) -> torch.Tensor:
        """bool [B]: which samples leave at `exit`, by its logits [B, classes].

        Exits come in order, with one memory. Not asked of the last exit, which always answers.
        """

    @abc.abstractmethod
    def for_exits(self, exits: int) -> Policy:
        """The policy of a network with so many exits. BadValueError where it does not fit."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """What `parse` reads."""


class Threshold(Policy):
    """A policy that holds a measure of the logits against a threshold for each exit but the last;
    one alone serves all of them. Subclasses give `kind`, `below` and `measure`."""

    #: What `parse` calls it.
    kind: str
    #: Whether samples leave below the threshold, not at and above it.
    below: bool

    def __init__(self, thresholds: Sequence[float]) -> None:
        """Raises BadValueError for none, NaN and negative thresholds; any that nobody or everybody
        meets, infinity too, is good."""
        self.thresholds = tuple(float(each) for each in thresholds)
        wrong = [each for each in self.thresholds if math.isnan(each) or each < 0]
        if wrong or not self.thresholds:
            named = ", ".join(str(each) for each in wrong) if wrong else "none"
            raise BadValueError(
                f"{self.kind} cannot work with the thresholds given: {named}",
                why="a threshold is a number from 0 on",
            )

    @abc.abstractmethod
    def measure(self, logits: torch.Tensor) -> torch.Tensor:
        """[B] of logits [B, classes], in float32 at least. Says nothing where logits are not
        finite: `leaves` lets nobody go by these."""

    def leaves(self, exit: int, logits: torch.Tensor, memory: Memory) -> torch.Tensor:
        """See Policy."""
        del memory  # each exit stands alone
        measured = self.measure(logits)
        limit = self.thresholds[0] if len(self.thresholds) == 1 else self.thresholds[exit]
        sure = measured < limit if self.below else measured >= limit
        # The softmax of -inf is 0 and sure of it: NaN alone would not be enough to look for.
        return sure & finite(logits)

    def for_exits(self, exits: int) -> Threshold:
        """See Policy."""
        wanted = max(exits - 1, 1)
        if len(self.thresholds) not in (1, wanted):
            raise BadValueError(
                f"{len(self.thresholds)} thresholds for a network of {exits} exits",
                why="all exits but the last have one, or one serves them all",
                next_step=f"give 1 or {wanted}",
            )
        return self.with_thresholds(self.thresholds * (wanted // len(self.thresholds)))

    def with_thresholds(self, thresholds: Sequence[float]) -> Threshold:
        """The same rule with others."""
        return type(self)(thresholds)

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(repr(each) for each in self.thresholds)}"


class Entropy(Threshold):
    """Leaves below a threshold of the softmax's entropy: BranchyNet, in nats; DDNN, `normalised` by
    the logarithm of the number of classes to [0, 1]."""

    below = True

    def __init__(self, thresholds: Sequence[float], normalised: bool = False) -> None:
        self.normalised = normalised
        self.kind = "entropy-normalised" if normalised else "entropy"
        super().__init__(thresholds)

    def measure(self, logits: torch.Tensor) -> torch.Tensor:
        """See Threshold."""
        logs = torch.log_softmax(_wide(logits), dim=1)
        probabilities = logs.exp()
        # 0 ln 0 is 0; elsewhere NaN stays NaN.
        terms = torch.where(probabilities == 0, torch.zeros_like(logs), probabilities * logs)
        entropy = -terms.sum(dim=1)
        return entropy / math.log(max(logits.shape[1], 2)) if self.normalised else entropy

    def with_thresholds(self, thresholds: Sequence[float]) -> Entropy:
        """See Threshold."""
        return Entropy(thresholds, self.normalised)


class MaxProbability(Threshold):
    """Leaves where the largest softmax probability reaches the threshold."""

    kind = "max-probability"
    below = False

    def measure(self, logits: torch.Tensor) -> torch.Tensor:
        """See Threshold."""
        return torch.softmax(_wide(logits), dim=1).max(dim=1)[0]


class Margin(Threshold):
    """Leaves where the two largest softmax probabilities are apart by the threshold."""

    kind = "margin"
    below = False

    def measure(self, logits: torch.Tensor) -> torch.Tensor:
        """See Threshold."""
        probabilities = torch.softmax(_wide(logits), dim=1)
        if logits.shape[1] < 2:
            return probabilities[:, 0]
        largest = probabilities.topk(2, dim=1)[0]
        return largest[:, 0] - largest[:, 1]


class Patience(Policy):
    """Leaves where so many exits in a row have agreed with the exit before them (Zhou et al. 2020,
    arXiv 2006.04152)."""

    kind = "patience"

    def __init__(self, count: int) -> None:
        """Raises BadValueError for a count below 1: nothing would have to agree."""
        if count < 1:
            raise BadValueError(f"patience of {count}", why="at least one exit has to agree")
        self.count = count

    def leaves(self, exit: int, logits: torch.Tensor, memory: Memory) -> torch.Tensor:
        """See Policy."""
        answers = logits.argmax(dim=1)
        # No class: agrees with nothing, itself included.
        numbers = finite(logits)
        answers = torch.where(numbers, answers, torch.full_like(answers, -1))
        if exit == 0 or not memory.parts:
            streak = torch.zeros_like(answers)
        else:
            before, streak = memory.parts
            agree = (answers == before) & numbers
            streak = torch.where(agree, streak + 1, torch.zeros_like(streak))
        memory.parts = (answers, streak)
        return streak >= self.count

    def for_exits(self, exits: int) -> Patience:
        """See Policy; a count that no exit but the last can reach is good: nobody leaves early."""
        del exits
        return self

    def __str__(self) -> str:
        return f"{self.kind}:{self.count}"


#: What `parse` knows, and what comes behind the colon.
POLICIES: Dict[str, str] = {
    "entropy": "nats",
    "entropy-normalised": "share of the largest entropy",
    "max-probability": "probability",
    "margin": "probability",
    "patience": "exits",
}
_OF_PROBABILITIES: Dict[str, Type[Threshold]] = {
    "max-probability": MaxProbability,
    "margin": Margin,
}


def parse(text: str, exits: Optional[int] = None) -> Policy:
    """The policy of a parameter such as `entropy:0.5`, `entropy:0.01,0.05` (one for each exit but
    the last), `entropy-normalised:0.8`, `max-probability:0.9`, `margin:0.5` or `patience:2`; with
    `exits`, made to fit a network of so many.

    Raises UnknownNameError for another name, BadValueError for values that it cannot have.
    """
    name, _, values = text.strip().partition(":")
    if name not in POLICIES:
        raise UnknownNameError("policy", name, POLICIES)
    policy = Patience(_count(text, values)) if name == "patience" else _threshold(name, values)
    return policy if exits is None else policy.for_exits(exits)


def simulate(policy: Policy, logits: Stored) -> torch.Tensor:
    """At which exit each sample leaves, int64 [N] on the CPU, by stored logits
    [exits, N, classes] (NumPy's or torch's, of any float type).

    What `adaptive` does with these logits. Raises BadValueError for logits of another shape and
    for a policy that does not fit them.
    """
    exits = _stored(logits)
    count, samples = exits.shape[0], exits.shape[1]
    fitted = policy.for_exits(count)
    taken = torch.full((samples,), count - 1, dtype=torch.int64)
    undecided = torch.ones(samples, dtype=torch.bool)
    memory = Memory()
    for number in range(count - 1):
        leaves = fitted.leaves(number, exits[number], memory)
        taken[undecided & leaves] = number
        undecided &= ~leaves
    return taken


def finite(logits: torch.Tensor) -> torch.Tensor:
    """bool [B]: whose logits [B, classes] are all numbers. Others are never confident."""
    return torch.isfinite(logits).all(dim=1)


def _wide(logits: torch.Tensor) -> torch.Tensor:
    """Half precisions widened: an entropy in bfloat16 has two digits."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def _stored(logits: Stored) -> torch.Tensor:
    if isinstance(logits, (list, tuple)):
        logits = torch.stack(list(logits))
    exits = torch.as_tensor(logits).detach().cpu()
    if exits.dim() != 3 or not exits.shape[0] or not exits.shape[2]:
        raise BadValueError(
            f"logits of shape {tuple(exits.shape)}", why="they are [exits, samples, classes]"
        )
    return _wide(exits)


def _count(text: str, values: str) -> int:
    try:
        return int(values)
    except ValueError as error:
        raise BadValueError(
            f"policy '{text}' has no whole number of exits", next_step="patience:2, for example"
        ) from error


def _threshold(name: str, values: str) -> Threshold:
    thresholds: List[float] = []
    for each in values.split(","):
        try:
            thresholds.append(float(each))
        except ValueError as error:
            raise BadValueError(
                f"'{each}' is no threshold of the policy {name}",
                why="a threshold is a number from 0 on",
                next_step=f"{name}:0.5, for example, or one for each exit but the last: 0.5,0.3",
            ) from error
    if name in _OF_PROBABILITIES:
        return _OF_PROBABILITIES[name](thresholds)
    return Entropy(thresholds, normalised=name == "entropy-normalised")
