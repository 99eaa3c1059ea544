"""The networks of `quantisation`, how each is trained in float, and one way to ask all of them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Dict, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.networks.resnet import resnet50
from narrowgauge_lab.optim import SGD, Adam, OptimizerMaker
from narrowgauge_lab.schedule import Cosine, Schedule, Step

__all__ = ["NETS", "Net", "asked", "last_of", "make"]


@dataclasses.dataclass(frozen=True)
class Net:
    """`image`: channels, height, width. `build`: by the factor on all channels. `rate`: the
    learning rate in float where none is given; `adam`: by Adam at that rate throughout, as the
    programs of the MNIST networks, or by SGD whose rate falls along a cosine, as pytorch-cifar."""

    image: Tuple[int, int, int]
    build: Callable[[float], nn.Module]
    rate: float
    adam: bool

    def optimizer(self, rate: float) -> OptimizerMaker:
        if self.adam:
            return functools.partial(Adam, rate=rate)
        return functools.partial(SGD, rate=rate, momentum=0.9, weight_decay=5e-4)

    @property
    def qat_rate(self) -> float:
        """Adam's, where training with rounding begins. Without batch normalisation nothing scales
        a large step back: of a folded ResNet a tenth of the usual one."""
        return 1e-3 if self.adam else 1e-4

    def schedule(self, rate: float, epochs: int) -> Schedule:
        return Step(rate, 1.0) if self.adam else Cosine(rate, max(epochs, 1))


def _qkeras_mnist(width: float) -> nn.Module:
    """conv 12@3×3 ReLU, pool 2, linear 10: the network of the notes' example of quantisation."""
    channels = max(1, round(12 * width))
    return nn.Sequential(
        nn.Conv2d(1, channels, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(channels * 13 * 13, 10),
    )  # fmt: skip


def _cifar_form(depth: int) -> Net:
    return Net((3, 32, 32), lambda width: cifar_resnet(depth, width), 0.1, adam=False)


#: By the names that parameters have.
NETS: Dict[str, Net] = {
    "qkeras-mnist": Net((1, 28, 28), _qkeras_mnist, 0.001, adam=True),
    "b-lenet": Net((1, 28, 28), lambda width: branchy_net("b-lenet", width), 0.001, adam=True),
    "resnet18": _cifar_form(18),
    "resnet50": _cifar_form(50),
    "resnet101": _cifar_form(101),
    "resnet50-imagenet-form": Net((3, 32, 32), resnet50, 0.1, adam=False),
}


def make(name: str, width: float, found: Tuple[int, ...], data: str) -> Net:
    """The network `name` for images of the shape `found`. Raises BadValueError where it takes
    others, or where `width` is not within 0 to 4."""
    net = NETS[name]
    if not 0.0 < width <= 4.0:
        raise BadValueError(f"width {width:g} is not within 0 to 4", next_step="1 is as published")
    if found != net.image:
        raise BadValueError(
            f"{name} does not take the images of {data}",
            why=f"they are {'×'.join(map(str, found))}, it takes {'×'.join(map(str, net.image))}",
            next_step="qkeras-mnist and b-lenet go with mnist and fashion-mnist, ResNets go with "
            "cifar10",
        )
    return net


class _Whole(AnytimeNetwork):
    """Whatever gives logits, as a network of one exit."""

    def __init__(self, forward: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.exits = 1
        self.forwarded = forward  # a module thereby becomes a part, and follows eval()

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        del exit, head
        return Answer(self.forwarded(state[0]), ())


def asked(forward: Callable[[torch.Tensor], Any]) -> AnytimeNetwork:
    """What answers with logits, or a network with exits, as the latter."""
    return forward if isinstance(forward, AnytimeNetwork) else _Whole(forward)


def last_of(forward: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """What a network with exits answers at the last one; of others what they answer."""
    if not isinstance(forward, AnytimeNetwork):
        return forward
    net = forward
    return lambda images: net.forward_until(net.exits - 1, images)
