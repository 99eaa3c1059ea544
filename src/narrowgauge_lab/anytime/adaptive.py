"""A pass in which each sample leaves at the first exit that is sure of it."""

from __future__ import annotations

import dataclasses
from typing import Optional

import torch

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, select
from narrowgauge_lab.anytime.policies import Memory, Policy

__all__ = [
    "Adaptive",
    "adaptive",
    "masked",
    "of_nobody",
    "require_capturable",
    "require_eval",
    "stage_macs",
]


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Of each sample: the `logits` [B, classes] it left with, the exit, int64 [B], and the
    MACs up to there with all heads on the way, float64 [B]."""

    logits: torch.Tensor
    exits: torch.Tensor
    macs: torch.Tensor


def adaptive(
    net: AnytimeNetwork, images: torch.Tensor, policy: Policy, costs: Optional[ExitCosts] = None
) -> Adaptive:
    """Run `images` [B, C, H, W] stage by stage; samples that leave are selected away, and what
    follows is computed for the rest alone. B may be 0 or 1. No gradients.

    The host learns at each exit how many go on: on a GPU it waits for that; `device_exit` does not.
    Without `costs` they are counted first, which takes several passes of one image. Raises
    BadValueError for a policy that does not fit and for a network in training mode.
    """
    require_eval(net)
    fitted = policy.for_exits(net.exits)
    if not images.shape[0]:
        return of_nobody(net, images)
    counted = costs if costs is not None else exit_costs(net, images[:1])
    with torch.no_grad():
        return _pass(net, images, fitted, counted)


def _pass(net: AnytimeNetwork, images: torch.Tensor, policy: Policy, costs: ExitCosts) -> Adaptive:
    batch, device = images.shape[0], images.device
    exits = torch.zeros(batch, dtype=torch.int64, device=device)
    macs = torch.zeros(batch, dtype=torch.float64, device=device)
    rest = torch.arange(batch, device=device)
    state, memory = net.begin(images), Memory()
    logits = torch.empty(0)
    for number in range(net.exits):
        answer = net.advance(number, state)
        if number == 0:
            logits = torch.empty_like(answer.logits)
        # Of those who go on this is overwritten; so the host need not know who leaves.
        logits.index_copy_(0, rest, answer.logits)
        exits.index_fill_(0, rest, number)
        macs.index_add_(0, rest, stage_macs(costs, number, answer))
        if number == net.exits - 1:
            break
        leaves = policy.leaves(number, answer.logits, memory)
        onward = leaves.logical_not().nonzero().flatten()
        if not onward.shape[0]:
            break
        state = answer.state
        if onward.shape[0] < rest.shape[0]:
            state, rest = select(state, onward), rest[onward]
            memory.select(onward)
    return Adaptive(logits, exits, macs)


def masked(
    net: AnytimeNetwork, images: torch.Tensor, policy: Policy, costs: Optional[ExitCosts] = None
) -> Adaptive:
    """The same answers with everything computed for everybody, and then picked: the baseline that
    saves no time. `macs` are those that `adaptive` would have needed."""
    require_eval(net)
    fitted = policy.for_exits(net.exits)
    if not images.shape[0]:
        return of_nobody(net, images)
    counted = costs if costs is not None else exit_costs(net, images[:1])
    batch = images.shape[0]
    exits = torch.zeros(batch, dtype=torch.int64, device=images.device)
    macs = torch.zeros(batch, dtype=torch.float64, device=images.device)
    undecided = torch.ones(batch, dtype=torch.bool, device=images.device)
    logits = torch.empty(0)
    with torch.no_grad():
        state, memory = net.begin(images), Memory()
        for number in range(net.exits):
            answer = net.advance(number, state)
            state = answer.state
            old = answer.logits if number == 0 else logits
            logits = torch.where(undecided.unsqueeze(1), answer.logits, old)
            exits = torch.where(undecided, torch.full_like(exits, number), exits)
            macs += stage_macs(costs=counted, number=number, answer=answer) * undecided
            if number < net.exits - 1:
                undecided = undecided & ~fitted.leaves(number, answer.logits, memory)
    return Adaptive(logits, exits, macs)


def stage_macs(costs: ExitCosts, number: int, answer: Answer) -> torch.Tensor:
    """MACs of one stage with its head, float64 [B]: the answer's own where it has them."""
    if answer.macs is not None:
        return answer.macs.to(torch.float64)
    return torch.full(
        (answer.logits.shape[0],), float(costs.stages[number]),
        dtype=torch.float64, device=answer.logits.device,
    )  # fmt: skip


def require_eval(net: AnytimeNetwork) -> None:
    """Raises BadValueError for a network in training mode."""
    if net.training:
        raise BadValueError(
            "a network in training mode cannot let samples leave",
            why="batch statistics would be those of whoever stayed",
            next_step="net.eval() first",
        )


def require_capturable(net: AnytimeNetwork, images: torch.Tensor) -> None:
    """That stages of the network can be captured for such images. Raises what `require_eval`
    raises, BadValueError for a batch of none, NotApplicableError where there are no CUDA graphs."""
    require_eval(net)
    if not images.shape[0]:
        raise BadValueError(
            "stages cannot be captured for no image",
            why=f"images {tuple(images.shape)}",
            next_step="capture them for a batch of one or more",
        )
    if not torch_compat.graphs_available(images.device):
        raise NotApplicableError(
            "stages cannot be captured here",
            why=f"no CUDA graphs on {images.device} with this torch",
            next_step="a GPU, and torch 1.10 or later",
        )


def of_nobody(net: AnytimeNetwork, images: torch.Tensor) -> Adaptive:
    """The answer for no images [0, …]: layers that reshape with -1 cannot take them."""
    device = images.device
    return Adaptive(
        torch.zeros((0, net.classes), dtype=images.dtype, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.zeros(0, dtype=torch.float64, device=device),
    )
