"""ResNet as torchvision names and builds it: arXiv 1512.03385, with the stride in the 3×3."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from typing import Optional, Tuple, Type, Union

import torch
from torch import nn

__all__ = ["BasicBlock", "Bottleneck", "EarlyBottleneck", "ResNet", "resnet50"]


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, bias=False)


def _shortcut(channels_in: int, channels_out: int, stride: int) -> Optional[nn.Sequential]:
    """What brings the input of a block to the shape of its output; None where it has it."""
    if stride == 1 and channels_in == channels_out:
        return None
    return nn.Sequential(_conv(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out))


class BasicBlock(nn.Module):
    """Two 3×3 convolutions around a shortcut; the first has the stride."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(channels_in, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(channels_in, channels, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.bn2(self.conv2(hidden))
        hidden += images if self.downsample is None else self.downsample(images)
        return self.relu(hidden)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut; the 3×3 one has the stride ("v1.5")."""

    expansion = 4
    #: Whether the first 1×1 has the stride instead.
    early_stride = False

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        first, second = (stride, 1) if self.early_stride else (1, stride)
        self.conv1 = _conv(channels_in, channels, 1, first)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, second)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels_out, 1)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(channels_in, channels_out, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        hidden += images if self.downsample is None else self.downsample(images)
        return self.relu(hidden)


class EarlyBottleneck(Bottleneck):
    """As in the paper and in Keras ("v1"): the first 1×1 leaves three positions of four out."""

    early_stride = True


Block = Union[Type[BasicBlock], Type[Bottleneck]]


class ResNet(nn.Module):
    """Takes [B, 3, H, W], gives logits [B, classes].

    `blocks` (3, 4, 6, 3) of bottlenecks, `width` 64 and 1000 classes make ResNet-50: 25,557,032
    parameters, and 4.09e9 multiply-accumulates for an image of 224×224. Names and shapes of
    parameters and buffers are torchvision's, so its weights load here.
    """

    def __init__(
        self,
        blocks: Tuple[int, int, int, int],
        width: int = 64,
        classes: int = 1000,
        block: Block = Bottleneck,
    ) -> None:
        super().__init__()
        self._block = block
        self._channels = width
        self.conv1 = _conv(3, width, 7, 2)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = self._stage(width, blocks[0], 1)
        self.layer2 = self._stage(2 * width, blocks[1], 2)
        self.layer3 = self._stage(4 * width, blocks[2], 2)
        self.layer4 = self._stage(8 * width, blocks[3], 2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(8 * width * self._block.expansion, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, channels: int, count: int, stride: int) -> nn.Sequential:
        blocks = []
        for position in range(count):
            step = stride if position == 0 else 1
            blocks.append(self._block(self._channels, channels, step))
            self._channels = channels * self._block.expansion
        return nn.Sequential(*blocks)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return self.fc(torch.flatten(self.avgpool(hidden), 1))


def resnet50(width: float = 1.0, classes: int = 1000) -> ResNet:
    """ResNet-50 with its channels, 64 in the first layer, times `width`: at least one there. Of
    images of 32×32 pixels one position reaches the last stage: 85,458,944 multiply-accumulates."""
    return ResNet((3, 4, 6, 3), max(1, round(64 * width)), classes)
