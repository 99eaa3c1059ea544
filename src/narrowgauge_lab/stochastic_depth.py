"""Stochastic depth: residual branches that are left out at random in training (Huang, Sun, Liu,
Sedra and Weinberger 2016, arXiv 1603.09382).

Block l of L stays in a training batch with probability 1 − l/L · (1 − last), which falls linearly
from the first block to `last` at the last one; otherwise the batch takes its shortcut alone. In
eval mode every branch is there, multiplied by its probability.

A branch that is left out is computed all the same and multiplied by 0, so that a training step is
the same work each time and can be captured in a CUDA graph: training takes no less time here,
unlike the original's, and batch statistics of a branch are of all batches.
"""

from __future__ import annotations

from typing import Any, List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.networks.cifar_resnet import BasicBlock, Bottleneck

__all__ = ["RandomBlock", "add_stochastic_depth", "fold_stochastic_depth", "survival"]


def survival(blocks: int, last: float) -> Tuple[float, ...]:
    """The probabilities with which `blocks` blocks stay, first block first. Raises BadValueError
    for a `last` outside (0, 1]."""
    if not 0 < last <= 1:
        raise BadValueError(
            f"survival {last}",
            why="it is the probability with which the last block stays in a batch",
            next_step="a number above 0 and up to 1; 0.5 as published, and 1 is plain training",
        )
    return tuple(1 - (number / blocks) * (1 - last) for number in range(1, blocks + 1))


class RandomBlock(nn.Module):
    """A residual block whose branch stays with probability `stays` in a training batch: all of its
    images or none. Draws from torch's generator of the images' device."""

    def __init__(self, block: Any, stays: float) -> None:
        super().__init__()
        self.block: Any = block
        self.stays = stays

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        residual = self.block.residual(images)
        if self.training:
            gate = (torch.rand((), device=images.device) < self.stays).to(residual.dtype)
            residual = residual * gate
        else:
            residual = residual * self.stays
        return F.relu(residual + self.block.shortcut(images))


def add_stochastic_depth(net: nn.Module, last: float = 0.5) -> int:
    """Make each residual block of `net` a `RandomBlock`, in place and with the same weights; how
    many there are. `fold_stochastic_depth` takes them out again. Raises what `survival` raises."""
    places = _places(net, (BasicBlock, Bottleneck))
    for (stage, key), stays in zip(places, survival(max(1, len(places)), last)):
        block = stage._modules[key]
        assert block is not None
        stage._modules[key] = RandomBlock(block, stays).train(block.training)
    return len(places)


def fold_stochastic_depth(net: nn.Module) -> int:
    """Make each `RandomBlock` of `net` its block again, in place, with the probability in the scale
    and offset of the branch's last normalisation: in eval mode the network answers as before. How
    many there were."""
    places = _places(net, (RandomBlock,))
    for stage, key in places:
        random = stage._modules[key]
        assert isinstance(random, RandomBlock)
        block = random.block
        last = block.bn3 if isinstance(block, Bottleneck) else block.bn2
        with torch.no_grad():
            last.weight.mul_(random.stays)
            last.bias.mul_(random.stays)
        stage._modules[key] = block
    return len(places)


def _places(net: nn.Module, kinds: Tuple[type, ...]) -> List[Tuple[nn.Module, str]]:
    """Where modules of these kinds stand: their parent, and their name in it, in order."""
    return [
        (parent, key)
        for parent in list(net.modules())
        for key, child in parent._modules.items()
        if isinstance(child, kinds) and not isinstance(parent, RandomBlock)
    ]
