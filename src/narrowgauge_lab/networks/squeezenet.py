"""SqueezeNet 1.0 and 1.1 as torchvision has them: arXiv 1602.07360."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from typing import Tuple, Union

import torch
from torch import nn

__all__ = ["SQUEEZENET_1_0", "SQUEEZENET_1_1", "SqueezeNet"]

#: Squeezed and expanded channels of a fire module (each of its two halves expands to as many), or
#: "pool".
Plan = Tuple[Union[Tuple[int, int], str], ...]

SQUEEZENET_1_0: Plan = (
    "pool", (16, 64), (16, 64), (32, 128),
    "pool", (32, 128), (48, 192), (48, 192), (64, 256),
    "pool", (64, 256),
)  # fmt: skip
SQUEEZENET_1_1: Plan = (
    "pool", (16, 64), (16, 64),
    "pool", (32, 128), (32, 128),
    "pool", (48, 192), (48, 192), (64, 256), (64, 256),
)  # fmt: skip


class Fire(nn.Module):
    """A 1×1 convolution, then a 1×1 and a 3×3 one of it side by side: 2 × `expand` channels."""

    def __init__(self, channels_in: int, squeeze: int, expand: int) -> None:
        super().__init__()
        self.squeeze = nn.Conv2d(channels_in, squeeze, 1)
        self.squeeze_activation = nn.ReLU(inplace=True)
        self.expand1x1 = nn.Conv2d(squeeze, expand, 1)
        self.expand1x1_activation = nn.ReLU(inplace=True)
        self.expand3x3 = nn.Conv2d(squeeze, expand, 3, padding=1)
        self.expand3x3_activation = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        squeezed = self.squeeze_activation(self.squeeze(images))
        narrow = self.expand1x1_activation(self.expand1x1(squeezed))
        wide = self.expand3x3_activation(self.expand3x3(squeezed))
        return torch.cat([narrow, wide], 1)


class SqueezeNet(nn.Module):
    """Takes [B, 3, H, W] of at least 31×31, gives logits [B, classes]; pools round upwards.

    1.0 (a stem of 96 channels, 7×7) has 1,248,424 parameters, 1.1 (64, 3×3) 1,235,496.
    """

    def __init__(self, plan: Plan, stem: int, kernel: int, classes: int = 1000) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, stem, kernel, stride=2), nn.ReLU(inplace=True)]
        channels = stem
        for step in plan:
            if isinstance(step, str):
                layers.append(nn.MaxPool2d(3, stride=2, ceil_mode=True))
            else:
                layers.append(Fire(channels, *step))
                channels = 2 * step[1]
        self.features = nn.Sequential(*layers)
        final = nn.Conv2d(channels, classes, 1)
        self.classifier = nn.Sequential(
            nn.Dropout(), final, nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d((1, 1))
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                if module is final:
                    nn.init.normal_(module.weight, std=0.01)
                else:
                    nn.init.kaiming_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.flatten(self.classifier(self.features(images)), 1)
