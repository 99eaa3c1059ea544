"""DenseNet-BC as torchvision has it: arXiv 1608.06993."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from collections import OrderedDict
from typing import List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["DenseNet"]

#: Channels of the 1×1 convolution per channel that a layer adds.
_BOTTLENECK = 4


class _Layer(nn.Module):
    """Adds `growth` channels, made from everything before it in its block."""

    def __init__(self, channels_in: int, growth: int) -> None:
        super().__init__()
        middle = _BOTTLENECK * growth
        self.norm1 = nn.BatchNorm2d(channels_in)
        self.relu1 = nn.ReLU(inplace=True)
        self.conv1 = nn.Conv2d(channels_in, middle, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(middle)
        self.relu2 = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(middle, growth, 3, padding=1, bias=False)

    def forward(self, features: List[torch.Tensor]) -> torch.Tensor:
        # One tensor is concatenated too: as many kernels as the network that it is compared with.
        hidden = self.conv1(self.relu1(self.norm1(torch.cat(features, 1))))
        return self.conv2(self.relu2(self.norm2(hidden)))


class _Block(nn.ModuleDict):
    """`count` layers, the output of each beside all that came before."""

    def __init__(self, channels_in: int, growth: int, count: int) -> None:
        super().__init__()
        for position in range(count):
            layer = _Layer(channels_in + position * growth, growth)
            self.add_module(f"denselayer{position + 1}", layer)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = [images]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class _Transition(nn.Sequential):
    """Half the channels, half the side."""

    def __init__(self, channels_in: int) -> None:
        super().__init__()
        self.add_module("norm", nn.BatchNorm2d(channels_in))
        self.add_module("relu", nn.ReLU(inplace=True))
        self.add_module("conv", nn.Conv2d(channels_in, channels_in // 2, 1, bias=False))
        self.add_module("pool", nn.AvgPool2d(2, stride=2))


class DenseNet(nn.Module):
    """Takes [B, 3, H, W] of at least 29×29, gives logits [B, classes].

    `blocks` (6, 12, 24, 16), `growth` 32 and `stem` 64 make DenseNet-121: 7,978,856 parameters.
    """

    def __init__(
        self, blocks: Tuple[int, ...], growth: int = 32, stem: int = 64, classes: int = 1000
    ) -> None:
        super().__init__()
        layers = OrderedDict(
            conv0=nn.Conv2d(3, stem, 7, stride=2, padding=3, bias=False),
            norm0=nn.BatchNorm2d(stem),
            relu0=nn.ReLU(inplace=True),
            pool0=nn.MaxPool2d(3, stride=2, padding=1),
        )
        channels = stem
        for position, count in enumerate(blocks, start=1):
            layers[f"denseblock{position}"] = _Block(channels, growth, count)
            channels += count * growth
            if position < len(blocks):
                layers[f"transition{position}"] = _Transition(channels)
                channels //= 2
        layers["norm5"] = nn.BatchNorm2d(channels)
        self.features = nn.Sequential(layers)
        self.classifier = nn.Linear(channels, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)
        nn.init.zeros_(self.classifier.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.features(images), inplace=True)
        return self.classifier(torch.flatten(F.adaptive_avg_pool2d(hidden, (1, 1)), 1))
