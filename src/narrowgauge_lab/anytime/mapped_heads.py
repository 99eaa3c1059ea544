"""What the exits of this project's networks answer from, for maps of what they see.

Read from the states between stages, which are tensors, or by running a head's layers one by one: no
module gets a hook.
"""

from __future__ import annotations

import functools
from typing import Callable, List, Sequence

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.adaptive import require_eval
from narrowgauge_lab.anytime.class_maps import Head
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.systems.branchynet import BranchyNet
from narrowgauge_lab.anytime.systems.nested import NestedNet
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet
from narrowgauge_lab.networks.cifar_resnet import CifarResNet

__all__ = ["heads_of", "plain_head"]


def heads_of(net: AnytimeNetwork, images: torch.Tensor) -> List[Head]:
    """The head of each exit, first exit first, with what it reads of `images` [B, C, H, W].

    Raises BadValueError for a network that this does not know, and for one in training mode, whose
    answers to one image would depend on the others.
    """
    require_eval(net)
    with torch.no_grad():
        if isinstance(net, NestedNet):
            return _nested(net, images)
        if isinstance(net, BranchyNet):
            return _branches(net, images)
        if isinstance(net, AdaptiveResNet):
            return [Head(net.maps(images), lambda maps: net.answer(maps.mean((2, 3))))]
    raise BadValueError(
        f"where {type(net).__name__} answers from is not known here",
        next_step="a nested network, a BranchyNet, or an adaptive ResNet",
    )


def plain_head(net: CifarResNet, images: torch.Tensor) -> Head:
    """The one of a network without early exits, whose answer is linear in means. Gradients go
    through it where they are wanted."""
    return Head(net.features(images), _linear_in_means(net.linear), net.linear.weight)


def _linear_in_means(linear: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda maps: linear(maps.mean((2, 3)))


def _nested(net: NestedNet, images: torch.Tensor) -> List[Head]:
    found, state = [], net.begin(images)
    for number, head in enumerate(net.heads):
        state = net.advance(number, state, head=False).state
        features = F.relu(head.norm(state[-1]))  # the stage's last layer comes last
        found.append(Head(features, _linear_in_means(head.linear), head.linear.weight))
    return found


def _branches(net: BranchyNet, images: torch.Tensor) -> List[Head]:
    """Heads of a BranchyNet flatten their maps, each position with weights of its own."""
    found, hidden = [], images
    for number, (segment, head) in enumerate(zip(net.segments, net.heads)):
        last = number == net.exits - 1
        layers = [*segment, head] if last else [*head]
        if not last:
            hidden = segment(hidden)
        flattens = [isinstance(layer, nn.Flatten) for layer in layers].index(True)
        features = _through(layers[:flattens], hidden)
        found.append(Head(features, functools.partial(_through, layers[flattens:])))
    return found


def _through(layers: Sequence[nn.Module], hidden: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        hidden = layer(hidden)
    return hidden
