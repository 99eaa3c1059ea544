"""ResNet for 32×32 images: He et al. 2015 (arXiv 1512.03385), section 4.2, option A."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.networks.rectified import rectified

__all__ = ["DEPTHS", "Block", "ResNet"]

#: The depths 6n + 2 that the paper trains on CIFAR-10 (1202 left out).
DEPTHS = (20, 32, 44, 56, 110)


def _conv(channels_in: int, channels_out: int, stride: int) -> nn.Conv2d:
    return nn.Conv2d(channels_in, channels_out, 3, stride=stride, padding=1, bias=False)


class Block(nn.Module):
    """Two 3×3 convolutions with batch normalisation, and a shortcut without parameters (option A).

    Where the map shrinks, the shortcut takes every second pixel and pads the new channels with
    zeros, half before and half after the old ones.
    """

    def __init__(self, channels_in: int, channels_out: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = (channels_out - channels_in) // 2
        self.conv1 = _conv(channels_in, channels_out, stride)
        self.bn1 = nn.BatchNorm2d(channels_out)
        self.conv2 = _conv(channels_out, channels_out, 1)
        self.bn2 = nn.BatchNorm2d(channels_out)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shortcut = images
        if self.stride != 1:
            shortcut = images[:, :, :: self.stride, :: self.stride]
            shortcut = F.pad(shortcut, (0, 0, 0, 0, self.extra, self.extra))
        hidden = rectified(self.bn1, self.conv1(images))
        return rectified(self.bn2, self.conv2(hidden), shortcut)


class ResNet(nn.Module):
    """Takes float32 [B, 3, 32, 32], gives logits [B, classes]. Depth 6n + 2: n blocks per stage.

    Weights of convolutions and of the linear layer start from Kaiming's normal distribution.
    """

    def __init__(self, depth: int, classes: int = 10) -> None:
        super().__init__()
        count, rest = divmod(depth - 2, 6)
        if rest or count < 1:
            raise ValueError(f"depth {depth} is not 6n + 2")
        self.conv1 = _conv(3, 16, 1)
        self.bn1 = nn.BatchNorm2d(16)
        blocks = []
        channels_in = 16
        for channels, stride in ((16, 1), (32, 2), (64, 2)):
            for position in range(count):
                blocks.append(Block(channels_in, channels, stride if position == 0 else 1))
                channels_in = channels
        self.blocks = nn.Sequential(*blocks)
        self.linear = nn.Linear(64, classes)
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = rectified(self.bn1, self.conv1(images))
        hidden = self.blocks(hidden)
        return self.linear(hidden.mean((2, 3)))
