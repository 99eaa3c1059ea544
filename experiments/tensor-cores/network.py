"""ResNet-50 as torchvision names and builds it, and the linear layer of the training benches."""

from __future__ import annotations

import dataclasses
from typing import Dict, Optional, Tuple

import torch
from torch import nn

#: Channels of a bottleneck's output per channel inside it.
_EXPANSION = 4


@dataclasses.dataclass(frozen=True)
class Inference:
    """An image network: `width` channels in the first stage, square images of `size` pixels."""

    width: int
    size: int
    classes: int
    blocks: Tuple[int, int, int, int] = (3, 4, 6, 3)

    def build(self) -> ResNet:
        """The network with random weights, in eval mode on the CPU.

        The same torch seed gives the same weights, whatever device it goes to afterwards.
        """
        return ResNet(self.blocks, self.width, self.classes).eval()


@dataclasses.dataclass(frozen=True)
class Training:
    """A training bench: one linear layer, plain SGD, mean squared error, one fixed batch.

    `iterations` are those that its published seconds are for.
    """

    features_in: int
    features_out: int
    iterations: int
    rate: float = 1e-3


#: The values of the parameter `workload`.
INFERENCE: Dict[str, Inference] = {
    "resnet50": Inference(width=64, size=224, classes=1000),
    "resnet50-tiny": Inference(width=8, size=32, classes=10, blocks=(1, 1, 1, 1)),
}
TRAINING: Dict[str, Training] = {
    "linear-8192": Training(8192, 2048, iterations=100),
    "linear-16384": Training(16384, 4096, iterations=500),
    "linear-tiny": Training(64, 32, iterations=5),
}


def _conv(channels_in: int, channels_out: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    padding = kernel // 2
    return nn.Conv2d(channels_in, channels_out, kernel, stride=stride, padding=padding, bias=False)


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut; the 3×3 one has the stride ("v1.5")."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * _EXPANSION
        self.conv1 = _conv(channels_in, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels_out, 1)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: Optional[nn.Sequential] = None
        if stride != 1 or channels_in != channels_out:
            self.downsample = nn.Sequential(
                _conv(channels_in, channels_out, 1, stride), nn.BatchNorm2d(channels_out)
            )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        shortcut = images if self.downsample is None else self.downsample(images)
        hidden = self.relu(self.bn1(self.conv1(images)))
        hidden = self.relu(self.bn2(self.conv2(hidden)))
        hidden = self.bn3(self.conv3(hidden))
        hidden += shortcut
        return self.relu(hidden)


class ResNet(nn.Module):
    """Takes [B, 3, H, W], gives logits [B, classes].

    `blocks` (3, 4, 6, 3), `width` 64 and 1000 classes make ResNet-50: 25,557,032 parameters, and
    4.09e9 multiply-accumulates for an image of 224×224. Names and shapes of parameters and buffers
    are torchvision's, so its weights load here.
    """

    def __init__(self, blocks: Tuple[int, int, int, int], width: int, classes: int) -> None:
        super().__init__()
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
        self.fc = nn.Linear(8 * width * _EXPANSION, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def _stage(self, channels: int, count: int, stride: int) -> nn.Sequential:
        blocks = []
        for position in range(count):
            first = position == 0
            blocks.append(Bottleneck(self._channels, channels, stride if first else 1))
            self._channels = channels * _EXPANSION
        return nn.Sequential(*blocks)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        hidden = self.layer4(self.layer3(self.layer2(self.layer1(hidden))))
        return self.fc(torch.flatten(self.avgpool(hidden), 1))
