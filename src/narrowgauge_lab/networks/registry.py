"""Which networks there are, by torchvision's names, and how one is made."""

from __future__ import annotations

import dataclasses
import functools
from typing import Callable, Dict, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.networks.alexnet import AlexNet
from narrowgauge_lab.networks.densenet import DenseNet
from narrowgauge_lab.networks.mobilenet import MobileNetV2
from narrowgauge_lab.networks.resnet import BasicBlock, Bottleneck, EarlyBottleneck, ResNet
from narrowgauge_lab.networks.squeezenet import SQUEEZENET_1_0, SQUEEZENET_1_1, SqueezeNet
from narrowgauge_lab.networks.vgg import VGG

__all__ = ["EARLY_STRIDE", "NETWORKS", "NOTES", "TINY", "Network", "build", "network"]


@dataclasses.dataclass(frozen=True)
class Network:
    """An image network: square images of `size` pixels in three channels, logits of `classes`.

    `construct` draws its random weights from torch's default generator, in the order in which
    torchvision draws them: the same seed gives the same weights as there.
    """

    name: str
    construct: Callable[[], nn.Module]
    size: int = 224
    classes: int = 1000

    def build(self) -> nn.Module:
        """The network with random weights, float32 on the CPU, in eval mode."""
        return self.construct().eval()


_RESNETS = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}
_DENSENETS = {
    "densenet121": ((6, 12, 24, 16), 32, 64),
    "densenet169": ((6, 12, 32, 32), 32, 64),
    "densenet201": ((6, 12, 48, 32), 32, 64),
    "densenet161": ((6, 12, 36, 24), 48, 96),
}
_VGGS = {
    "vgg11": (1, 1, 2, 2, 2),
    "vgg13": (2, 2, 2, 2, 2),
    "vgg16": (2, 2, 3, 3, 3),
    "vgg19": (2, 2, 4, 4, 4),
}


def _all() -> Dict[str, Network]:
    """In the order of the notes' table."""
    makers: Dict[str, Callable[[], nn.Module]] = {
        "alexnet": AlexNet,
        "squeezenet1_0": functools.partial(SqueezeNet, SQUEEZENET_1_0, 96, 7),
        "squeezenet1_1": functools.partial(SqueezeNet, SQUEEZENET_1_1, 64, 3),
    }
    for name, (block, blocks) in _RESNETS.items():
        makers[name] = functools.partial(ResNet, blocks, block=block)
    for name, (layers, growth, stem) in _DENSENETS.items():
        makers[name] = functools.partial(DenseNet, layers, growth, stem)
    for suffix, norm in (("", False), ("_bn", True)):
        for name, stages in _VGGS.items():
            makers[name + suffix] = functools.partial(VGG, stages, norm=norm)
    makers["mobilenet_v2"] = MobileNetV2
    return {name: Network(name, maker) for name, maker in makers.items()}


def _tiny() -> Dict[str, Network]:
    """One of each family, small enough for a CPU in a test; their pools do what the large ones'
    do. No channel count of `squeezenet-tiny` and `densenet-tiny` is a multiple of eight."""
    squeezing: Tuple[Tuple[int, int], ...] = ((3, 7), (5, 10))
    makers: Dict[str, Callable[[], nn.Module]] = {
        "alexnet-tiny": functools.partial(AlexNet, 10, 4, 24),
        "squeezenet-tiny": functools.partial(SqueezeNet, ("pool", *squeezing), 6, 3, 10),
        "resnet18-tiny": functools.partial(ResNet, (1, 1, 1, 1), 8, 10, BasicBlock),
        "resnet50-tiny": functools.partial(ResNet, (1, 1, 1, 1), 8, 10),
        "densenet-tiny": functools.partial(DenseNet, (2, 2), 5, 10, 10),
        "vgg-tiny": functools.partial(
            VGG, (1, 1, 1, 1, 1), norm=False, classes=10, width=4, hidden=24
        ),
        "vgg_bn-tiny": functools.partial(
            VGG, (1, 1, 1, 1, 1), norm=True, classes=10, width=4, hidden=24
        ),
        "mobilenet-tiny": functools.partial(
            MobileNetV2, ((1, 8, 1, 1), (6, 8, 2, 2), (6, 16, 1, 1)), 8, 32, 10
        ),
    }
    sizes = {"alexnet-tiny": 64}
    return {name: Network(name, maker, sizes.get(name, 32), 10) for name, maker in makers.items()}


#: torchvision's networks of the notes' table of 21, in its order.
NOTES: Tuple[str, ...] = tuple(_all())
#: Small ones for tests.
TINY: Tuple[str, ...] = tuple(_tiny())
#: With the stride on the first 1×1 convolution of a block, as in Keras and in the paper on sparse
#: convolution: all of their 3×3 ones have stride 1. Weights are obtainable for `resnet50-v1`.
EARLY_STRIDE: Tuple[str, ...] = ("resnet50-v1", "resnet101-v1", "resnet152-v1")


def _early() -> Dict[str, Network]:
    return {
        name: Network(
            name, functools.partial(ResNet, _RESNETS[name[: -len("-v1")]][1], block=EarlyBottleneck)
        )
        for name in EARLY_STRIDE
    }


#: Every network by name.
NETWORKS: Dict[str, Network] = {**_all(), **_early(), **_tiny()}


def network(name: str) -> Network:
    """The network of that name. Raises UnknownNameError with the nearest one."""
    if name not in NETWORKS:
        raise UnknownNameError("network", name, NETWORKS)
    return NETWORKS[name]


def build(name: str, seed: int = 0) -> nn.Module:
    """The network with the random weights of `seed`, float32 on the CPU, in eval mode.

    torch's default generator is left as it was. The weights are as torchvision draws them, and
    grow through the depth of a network: `scale_activations` makes them usable.
    """
    wanted = network(name)
    with torch.random.fork_rng(devices=[]):
        # Not torch.manual_seed: it would also seed the GPUs' generators, and nothing would undo it.
        torch.default_generator.manual_seed(seed)
        return wanted.build()
