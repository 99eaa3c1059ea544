"""Adaptive computation time: when to stop thinking, and what it costs.

A. Graves 2016 (arXiv 1603.08983), equations 5 to 13, as M. Figurnov et al. 2017 (arXiv 1612.02297)
apply them to the units of a residual block. Unit l leaves a state x_l and a halting score h_l in
[0, 1]; the last unit halts whatever is left. With ε = 0.01:

    N = the first l with h_1 + … + h_l ≥ 1 − ε
    R = 1 − Σ_{l<N} h_l
    p_l = h_l for l < N, R for l = N, 0 after
    output = Σ p_l x_l,   ponder cost ρ = N + R

N counts and has no gradient; the gradient of ρ is R's. One halting per sample is ACT, one per
position is SACT: the shapes are all that differs, so both use what is here.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Sequence

import torch

from narrowgauge_contract.errors import BadValueError

__all__ = ["EPSILON", "Halted", "Halter", "halting"]

#: How little may be left for halting to count as whole; so that one unit can be enough.
EPSILON = 0.01


@dataclasses.dataclass(frozen=True)
class Halted:
    """How one block halted; all tensors have the shape of a score but `distribution`.

    `distribution` p [L, …]: its sum over units is 1. `steps` N: units that ran, float, from 1 to L,
    without a gradient. `remainder` R in (ε, 1]: with a gradient.
    """

    distribution: torch.Tensor
    steps: torch.Tensor
    remainder: torch.Tensor

    @property
    def ponder(self) -> torch.Tensor:
        """ρ = N + R, at least N."""
        return self.steps + self.remainder


class Halter:
    """Halting unit by unit. `running` (bool) says who computes the coming unit, `left` how much of
    the distribution they have left: 1 − Σ h so far. Who has halted keeps its R in `left`.

    Reads no value on the host: it can run under the capture of a CUDA graph.
    """

    def __init__(self, like: torch.Tensor, epsilon: float = EPSILON) -> None:
        """`like`: a tensor of a score's shape and device."""
        self._epsilon = epsilon
        self.left = torch.ones_like(like, dtype=torch.float32)
        self.running = torch.ones_like(like, dtype=torch.bool)
        self.steps = torch.zeros_like(self.left)

    def take(self, score: Optional[torch.Tensor]) -> torch.Tensor:
        """Halt by the scores of the unit that just ran (None: the last unit). p of that unit, 0
        where it did not run. Scores of who did not run do not matter."""
        self.steps = self.steps + self.running.float()
        if score is None:
            weight = torch.where(self.running, self.left, torch.zeros_like(self.left))
            self.running = torch.zeros_like(self.running)
            return weight
        score = score.float()
        after = self.left - score
        goes_on = self.running & (after.detach() > self._epsilon)
        halts = self.running & ~goes_on
        weight = torch.where(goes_on, score, torch.zeros_like(score))
        weight = torch.where(halts, self.left, weight)
        self.left = torch.where(goes_on, after, self.left)
        self.running = goes_on
        return weight

    @property
    def remainder(self) -> torch.Tensor:
        """R of who has halted."""
        return self.left


def halting(scores: Sequence[torch.Tensor], epsilon: float = EPSILON) -> Halted:
    """How a block of L units halts whose first L − 1 have these scores, all of one shape, in
    [0, 1]. Raises BadValueError for a block of less than two units or scores of several shapes."""
    if not scores or any(each.shape != scores[0].shape for each in scores):
        raise BadValueError(
            "scores of one shape are needed, for each unit but the last",
            why=f"there are: {', '.join(str(tuple(each.shape)) for each in scores) or 'none'}",
        )
    halter = Halter(scores[0], epsilon)
    parts = [halter.take(score) for score in scores]
    parts.append(halter.take(None))
    return Halted(torch.stack(parts), halter.steps, halter.remainder)
