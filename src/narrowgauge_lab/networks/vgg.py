"""VGG with and without batch normalisation, as torchvision has it: arXiv 1409.1556."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from typing import List, Tuple

import torch
from torch import nn

__all__ = ["VGG"]

#: Side of the feature maps that the classifier is made for.
_SIDE = 7
#: Channels of the five stages per channel of the first; each ends in a pool.
_WIDENING = (1, 2, 4, 8, 8)


class VGG(nn.Module):
    """Takes [B, 3, H, W] of at least 32×32, gives logits [B, classes].

    `stages` are the 3×3 convolutions before each pool. (2, 2, 3, 3, 3), `width` 64, `hidden` 4096
    and 1000 classes make VGG-16: 138,357,544 parameters.
    """

    def __init__(
        self,
        stages: Tuple[int, int, int, int, int],
        *,
        norm: bool,
        classes: int = 1000,
        width: int = 64,
        hidden: int = 4096,
    ) -> None:
        super().__init__()
        layers: List[nn.Module] = []
        channels = 3
        for count, widening in zip(stages, _WIDENING):
            for _ in range(count):
                layers.append(nn.Conv2d(channels, widening * width, 3, padding=1))
                channels = widening * width
                if norm:
                    layers.append(nn.BatchNorm2d(channels))
                layers.append(nn.ReLU(inplace=True))
            layers.append(nn.MaxPool2d(2, stride=2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((_SIDE, _SIDE))
        self.classifier = nn.Sequential(
            nn.Linear(channels * _SIDE * _SIDE, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, classes),
        )
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
                nn.init.zeros_(module.bias)
            elif isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.01)
                nn.init.zeros_(module.bias)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
