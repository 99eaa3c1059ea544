"""The networks that are trained here, and the made-up batch that they are trained on."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict

import torch
from torch import nn

from narrowgauge_lab.networks import network
from narrowgauge_lab.networks.cifar import ResNet

__all__ = ["NETWORKS", "Kind", "Subject", "subject"]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A network for square images of `size` pixels in three channels."""

    construct: Callable[[], nn.Module]
    size: int
    classes: int


def _image_network(name: str) -> Kind:
    known = network(name)
    return Kind(known.construct, known.size, known.classes)


NETWORKS: Dict[str, Kind] = {
    "resnet50": _image_network("resnet50"),
    "resnet20": Kind(lambda: ResNet(20, 10), 32, 10),
    "resnet50-tiny": _image_network("resnet50-tiny"),
}


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network in training mode and one batch of noise with random labels, all on the CPU."""

    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor


def subject(name: str, batch: int, seed: int, part: int = 0) -> Subject:
    """The same weights for the same seed; each `part` has images of its own."""
    kind = NETWORKS[name]
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        model = kind.construct().train()
        torch.default_generator.manual_seed(seed + 1 + part)
        images = torch.randn(batch, 3, kind.size, kind.size)
        labels = torch.randint(0, kind.classes, (batch,))
    return Subject(model, images, labels)
