"""What the exits of a network cost, in multiply-accumulates of one image."""

from __future__ import annotations

import dataclasses
from typing import List, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.network import AnytimeNetwork, State
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.measure.cost import count

__all__ = ["ExitCosts", "exit_costs"]


@dataclasses.dataclass(frozen=True)
class ExitCosts:
    """MACs of one image, one figure per exit.

    `cumulative`: up to an exit with all heads before it, which is what an adaptive pass pays.
    `direct`: of `forward_until`, without those heads and whatever else it can leave out.
    `trunk`: of each stage without its head; `heads`: of each head alone.
    """

    cumulative: Tuple[int, ...]
    direct: Tuple[int, ...]
    trunk: Tuple[int, ...]
    heads: Tuple[int, ...]

    @property
    def stages(self) -> Tuple[int, ...]:
        """Of each stage with its head: what `cumulative` is the running sum of."""
        return tuple(trunk + head for trunk, head in zip(self.trunk, self.heads))

    @property
    def heads_share(self) -> float:
        """MACs of all heads but the last, which a network of one exit has too, over those of the
        network without them. 0 where nothing is counted."""
        added = sum(self.heads[:-1])
        rest = self.cumulative[-1] - added
        return added / rest if rest else 0.0


def exit_costs(net: AnytimeNetwork, example: torch.Tensor) -> ExitCosts:
    """Count by running the stages once on `example` [B, C, H, W], B at least 1, in eval mode.

    The counts are those of shapes: work that depends on the sample counts in full here, and what it
    really came to is in the answers' `macs`. Raises BadValueError for an empty example and what
    `measure.cost.count` raises for operators without a formula.
    """
    images = int(example.shape[0])
    if images < 1:
        raise BadValueError("the cost of no image cannot be counted", next_step="give one or more")
    net, example = net.counted(example)
    trunk: List[int] = []
    whole: List[int] = []
    with in_eval_mode(net), torch.no_grad():
        state = net.begin(example)
        for number in range(net.exits):
            trunk.append(_stage(net, number, state, False, images))
            whole.append(_stage(net, number, state, True, images))
            state = net.advance(number, state).state
        direct = [_until(net, number, example, images) for number in range(net.exits)]
    running = [sum(whole[: number + 1]) for number in range(net.exits)]
    heads = tuple(both - bare for both, bare in zip(whole, trunk))
    return ExitCosts(tuple(running), tuple(direct), tuple(trunk), heads)


def _stage(net: AnytimeNetwork, number: int, state: State, head: bool, images: int) -> int:
    # A tuple of one: `count` takes a tuple for several arguments.
    return count(lambda given: net.advance(number, given, head), (state,)).macs // images


def _until(net: AnytimeNetwork, number: int, example: torch.Tensor, images: int) -> int:
    return count(lambda given: net.forward_until(number, given), example).macs // images
