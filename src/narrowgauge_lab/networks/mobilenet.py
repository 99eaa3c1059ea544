"""MobileNetV2 as torchvision has it: arXiv 1801.04381."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from typing import List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["MOBILENET_V2", "MobileNetV2"]

#: Expansion, channels, repeats and first stride of each stage.
Stages = Tuple[Tuple[int, int, int, int], ...]

MOBILENET_V2: Stages = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv(
    channels_in: int, channels_out: int, kernel: int = 1, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    """Convolution, batch normalisation, ReLU6."""
    convolution = nn.Conv2d(
        channels_in,
        channels_out,
        kernel,
        stride=stride,
        padding=kernel // 2,
        groups=groups,
        bias=False,
    )
    return nn.Sequential(convolution, nn.BatchNorm2d(channels_out), nn.ReLU6(inplace=True))


class InvertedResidual(nn.Module):
    """Wide inside, narrow outside, depthwise in the middle, and no activation at the end."""

    def __init__(self, channels_in: int, channels_out: int, stride: int, expansion: int) -> None:
        super().__init__()
        hidden = channels_in * expansion
        layers: List[nn.Module] = [] if expansion == 1 else [_conv(channels_in, hidden)]
        layers += [
            _conv(hidden, hidden, 3, stride, groups=hidden),
            nn.Conv2d(hidden, channels_out, 1, bias=False),
            nn.BatchNorm2d(channels_out),
        ]
        self.conv = nn.Sequential(*layers)
        self._adds = stride == 1 and channels_in == channels_out

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images + self.conv(images) if self._adds else self.conv(images)


class MobileNetV2(nn.Module):
    """Takes [B, 3, H, W], gives logits [B, classes]. As published 3,504,872 parameters."""

    def __init__(
        self,
        stages: Stages = MOBILENET_V2,
        stem: int = 32,
        last: int = 1280,
        classes: int = 1000,
    ) -> None:
        super().__init__()
        layers: List[nn.Module] = [_conv(3, stem, 3, 2)]
        channels = stem
        for expansion, width, repeats, first in stages:
            for position in range(repeats):
                stride = first if position == 0 else 1
                layers.append(InvertedResidual(channels, width, stride, expansion))
                channels = width
        layers.append(_conv(channels, last))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(last, classes))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.adaptive_avg_pool2d(self.features(images), (1, 1))
        return self.classifier(torch.flatten(hidden, 1))
