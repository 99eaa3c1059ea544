"""The one interface of networks that answer more than once.

A network is cut into stages: stage k takes the state that the stages before have left and gives a
better answer, logits at exit k. Between two stages all there is is the state, tensors whose first
dimension is the batch; so whoever drives a network may stop, go on with some of the samples, or
look at a clock, without knowing the network. Training, `adaptive` and `deadline` are such drivers.
"""

from __future__ import annotations

import abc
import dataclasses
from typing import List, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = ["Answer", "AnytimeNetwork", "State", "added", "laid_out", "rectified", "select"]

#: What a stage leaves for the next: tensors with the batch in their first dimension.
State = Tuple[torch.Tensor, ...]


@dataclasses.dataclass(frozen=True)
class Answer:
    """What a stage gives. `logits` [B, classes]; `macs`: float64 [B] where the work of this stage
    depends on the sample (spatially adaptive depth), else None and the count of the shapes holds.
    """

    logits: torch.Tensor
    state: State
    macs: Optional[torch.Tensor] = None


class AnytimeNetwork(nn.Module, abc.ABC):
    """A network with `exits` answers, each of which costs what is done up to it.

    Subclasses give `begin` and `advance`, set `exits` and `classes`, and may override
    `forward_until` where an answer can be had without the heads (or slices) before it, as by
    default, and `counted`.
    """

    #: How many answers there are, at least 1.
    exits: int
    #: How many classes logits have.
    classes: int

    def begin(self, images: torch.Tensor) -> State:
        """The state before the first stage, of images [B, C, H, W]. Does no counted work."""
        return (images,)

    @abc.abstractmethod
    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        """Stage `exit` (from 0) on the state that stage `exit` - 1 left. Without `head` its
        classifier is left out and the logits are empty [B, 0]: only the state goes on."""

    def forward(self, images: torch.Tensor) -> List[torch.Tensor]:
        """The logits of all exits, each [B, classes], first exit first."""
        state, answers = self.begin(images), []
        for number in range(self.exits):
            answer = self.advance(number, state)
            answers.append(answer.logits)
            state = answer.state
        return answers

    def forward_until(self, exit: int, images: torch.Tensor) -> torch.Tensor:
        """The logits [B, classes] of one exit, without the heads before it.

        Raises BadValueError for an exit that there is not.
        """
        self.require_exit(exit)
        state = self.begin(images)
        for number in range(exit):
            state = self.advance(number, state, head=False).state
        return self.advance(exit, state).logits

    def counted(self, example: torch.Tensor) -> Tuple[AnytimeNetwork, torch.Tensor]:
        """What costs are counted of, with images [B, C, H, W]: itself, unless its form on their
        device does more than its answers need."""
        return self, example

    def require_exit(self, exit: int) -> None:
        """Raises BadValueError for an exit that there is not."""
        if not 0 <= exit < self.exits:
            raise BadValueError(
                f"there is no exit {exit}",
                why=f"this network has {self.exits}, counted from 0",
                next_step=f"take one of 0 to {self.exits - 1}",
            )


def laid_out(images: torch.Tensor) -> torch.Tensor:
    """Channels last on a CPU, where oneDNN convolves narrow layers and torch pools them faster so
    (benchmarks/layers), and layers keep the layout that they are given; elsewhere as they are.

    Not for networks that `require_sound_channels_last` refuses.
    """
    if images.device.type != "cpu":
        return images
    if images.shape[1] == 1:
        # One channel is both layouts at once, and libraries go by the strides that it says.
        return images.clone(memory_format=torch.channels_last)
    return images.contiguous(memory_format=torch.channels_last)


def rectified(maps: torch.Tensor) -> torch.Tensor:
    """The ReLU of maps that nobody else reads: in place on a CPU, where the memory of other maps
    costs more than the operation (benchmarks/layers). A GPU's allocator keeps memory by itself."""
    return F.relu_(maps) if maps.device.type == "cpu" else F.relu(maps)


def added(maps: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """`others` + `maps`, which nobody else reads: likewise."""
    return maps.add_(others) if maps.device.type == "cpu" else others + maps


def select(state: State, samples: torch.Tensor) -> State:
    """The state of some samples: int64 indices [n] into the batch. This is the compaction: what
    does not go on is no longer computed, not masked."""
    return tuple(_rows(part, samples) for part in state)


def _rows(part: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
    """Some samples in the layout of all: on a CPU `index_select` alone would put channels first,
    element by element, and all later layers would keep them there."""
    last = part.dim() == 4 and part.is_contiguous(memory_format=torch.channels_last)
    if last and part.device.type == "cpu":
        return part.permute(0, 2, 3, 1).index_select(0, samples).permute(0, 3, 1, 2)
    return part.index_select(0, samples)
