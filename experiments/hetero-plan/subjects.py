"""The networks whose steps are planned, and the layers of theirs that a plan can place."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.placement_costs import PlacedLayer, Shape
from narrowgauge_lab.layers.hetero.convert import problem_of
from narrowgauge_lab.networks.cifar import ResNet
from narrowgauge_lab.networks.mnist import Net

__all__ = ["Subject", "layers_of", "subject"]

_CLASSES = 10


class Small(nn.Module):
    """Three convolutions and a linear layer: takes float32 [B, 3, 32, 32], gives logits [B, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.conv2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(32)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(32)
        self.linear = nn.Linear(32, _CLASSES)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.bn1(self.conv1(images)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        hidden = F.relu(self.bn3(self.conv3(hidden)))
        return self.linear(hidden.mean((2, 3)))


@dataclasses.dataclass(frozen=True)
class Subject:
    """A network in training mode, on the CPU, and one batch of random images."""

    name: str
    model: nn.Module
    images: torch.Tensor
    labels: torch.Tensor


def subject(name: str, batch: int, seed: int) -> Subject:
    """The same weights and images for the same seed; torch's generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if name == "mnist":
            model: nn.Module = Net(_CLASSES)
            images = torch.randn(batch, 1, 28, 28)
        else:
            model = Small() if name == "small" else ResNet(20, _CLASSES)
            images = torch.randn(batch, 3, 32, 32)
        labels = torch.randint(0, _CLASSES, (batch,))
    return Subject(name, model.train(), images, labels)


def layers_of(what: Subject) -> Tuple[Tuple[PlacedLayer, ...], Tuple[Shape, ...]]:
    """The layers that a plan can place, in the order in which they run, and their distinct shapes.

    Every layer but those that see the images themselves has an input gradient.
    """
    seen: List[Tuple[str, Shape, bool]] = []
    hooks = []
    for name, module in what.model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)) and not isinstance(problem_of(module), str):
            hooks.append(module.register_forward_hook(_Look(name, seen)))
    try:
        state = {key: value.clone() for key, value in what.model.state_dict().items()}
        what.model(what.images)
        what.model.load_state_dict(state)  # running statistics too
    finally:
        for hook in hooks:
            hook.remove()
    shapes: Dict[Shape, int] = {}
    layers = []
    for name, shape, wanted in seen:
        layers.append(PlacedLayer(name, shapes.setdefault(shape, len(shapes)), wanted))
    return tuple(layers), tuple(shapes)


class _Look:
    """A hook that keeps what a layer computes."""

    def __init__(self, name: str, seen: List[Tuple[str, Shape, bool]]) -> None:
        self._name, self._seen = name, seen

    def __call__(self, module: Any, inputs: Any, output: torch.Tensor) -> None:
        problem = problem_of(module)
        assert not isinstance(problem, str)
        (x,) = inputs
        shape = Shape(
            kind=problem.kind,
            input=tuple(x.shape),
            weight=tuple(module.weight.shape),
            output=tuple(output.shape),
            stride=problem.stride,
            padding=problem.padding,
            dilation=problem.dilation,
            groups=problem.groups,
            bias=module.bias is not None,
        )
        self._seen.append((self._name, shape, x.requires_grad))
