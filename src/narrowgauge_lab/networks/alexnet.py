"""AlexNet as torchvision has it: "One weird trick", arXiv 1404.5997."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

import torch
from torch import nn

__all__ = ["AlexNet"]

#: Side of the feature maps that the classifier is made for; 224×224 gives it without pooling.
_SIDE = 6


class AlexNet(nn.Module):
    """Takes [B, 3, H, W] of at least 63×63, gives logits [B, classes].

    `width` 64, `hidden` 4096 and 1000 classes are the published network of 61,100,840 parameters.
    """

    def __init__(self, classes: int = 1000, width: int = 64, hidden: int = 4096) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, width, 11, stride=4, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(width, 3 * width, 5, padding=2),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
            nn.Conv2d(3 * width, 6 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(6 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(4 * width, 4 * width, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((_SIDE, _SIDE))
        self.classifier = nn.Sequential(
            nn.Dropout(),
            nn.Linear(4 * width * _SIDE * _SIDE, hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(),
            nn.Linear(hidden, hidden),
            nn.ReLU(inplace=True),
            nn.Linear(hidden, classes),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(images)), 1))
