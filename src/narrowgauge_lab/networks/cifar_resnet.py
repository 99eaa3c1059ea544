"""ResNet-18 to 101 in the form for small images, as `kuangliu/pytorch-cifar` builds them: blocks
and stages of He et al. 2015 (arXiv 1512.03385, table 1) behind a stem of one 3×3 convolution."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

from typing import Dict, Tuple, Type, Union

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = ["DEPTHS", "BasicBlock", "Bottleneck", "CifarResNet", "cifar_resnet"]

_CHANNELS = (64, 128, 256, 512)
_STRIDES = (1, 2, 2, 2)


def _shortcut(channels_in: int, channels_out: int, stride: int) -> nn.Sequential:
    """What brings the input of a block to the shape of its output; empty where it has it."""
    if stride == 1 and channels_in == channels_out:
        return nn.Sequential()
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, 1, stride=stride, bias=False),
        nn.BatchNorm2d(channels_out),
    )


class BasicBlock(nn.Module):
    """relu(residual(x) + shortcut(x)): two 3×3 convolutions, of which the first has the stride."""

    expansion = 1

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = _shortcut(channels_in, channels, stride)

    def residual(self, images: torch.Tensor) -> torch.Tensor:
        """What is added to the shortcut [B, channels, H / stride, W / stride]."""
        return self.bn2(self.conv2(F.relu(self.bn1(self.conv1(images)))))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(images) + self.shortcut(images))


class Bottleneck(nn.Module):
    """relu(residual(x) + shortcut(x)): 1×1, 3×3 and 1×1 convolutions; the 3×3 has the stride."""

    expansion = 4

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        channels_out = channels * self.expansion
        self.conv1 = nn.Conv2d(channels_in, channels, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, channels_out, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels_out)
        self.shortcut = _shortcut(channels_in, channels_out, stride)

    def residual(self, images: torch.Tensor) -> torch.Tensor:
        """What is added to the shortcut [B, 4 · channels, H / stride, W / stride]."""
        hidden = F.relu(self.bn1(self.conv1(images)))
        hidden = F.relu(self.bn2(self.conv2(hidden)))
        return self.bn3(self.conv3(hidden))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.residual(images) + self.shortcut(images))


Block = Union[Type[BasicBlock], Type[Bottleneck]]

_FORMS: Dict[int, Tuple[Block, Tuple[int, int, int, int]]] = {
    18: (BasicBlock, (2, 2, 2, 2)),
    34: (BasicBlock, (3, 4, 6, 3)),
    50: (Bottleneck, (3, 4, 6, 3)),
    101: (Bottleneck, (3, 4, 23, 3)),
}
#: The depths that `cifar_resnet` builds.
DEPTHS: Tuple[int, ...] = tuple(_FORMS)


class CifarResNet(nn.Module):
    """Takes float32 [B, channels, H, W], gives logits [B, classes]; `cifar_resnet` makes one.

    The maps of the last stage are averaged whole, so any H and W do; they are H/8 × W/8.
    `conv1`, `bn1`, `layer1` to `layer4` (each a Sequential of blocks) and `linear` are its parts.
    """

    def __init__(
        self,
        block: Block,
        counts: Tuple[int, int, int, int],
        stages: Tuple[int, int, int, int],
        classes: int,
        channels: int,
    ) -> None:
        """`counts`: blocks of each stage; `stages`: channels of each stage, before expansion."""
        super().__init__()
        self.conv1 = nn.Conv2d(channels, stages[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(stages[0])
        made = []
        channels_in = stages[0]
        for count, width, stride in zip(counts, stages, _STRIDES):
            blocks = []
            for position in range(count):
                blocks.append(block(channels_in, width, stride if position == 0 else 1))
                channels_in = width * block.expansion
            made.append(nn.Sequential(*blocks))
        self.layer1, self.layer2, self.layer3, self.layer4 = made
        self.linear = nn.Linear(channels_in, classes)

    def features(self, images: torch.Tensor) -> torch.Tensor:
        """The maps before pooling [B, linear.in_features, H / 8, W / 8]."""
        hidden = F.relu(self.bn1(self.conv1(images)))
        return self.layer4(self.layer3(self.layer2(self.layer1(hidden))))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.linear(self.features(images).mean((2, 3)))


def cifar_resnet(
    depth: int, width: float = 1.0, classes: int = 10, channels: int = 3
) -> CifarResNet:
    """The network of one of DEPTHS with torch's random weights, in training mode. `width` scales
    the channels of every stage (0.25: 16 to 128); `channels` are the images'.

    For 32×32 images at width 1 and 10 classes: 11.17 M parameters and 555.4 MMAC (18), 21.28 M and
    1159.4 (34), 23.52 M and 1297.8 (50), 42.51 M and 2510.0 (101).
    Raises BadValueError for another depth and for a width that leaves a stage without channels.
    """
    if depth not in _FORMS:
        raise BadValueError(
            f"depth {depth}",
            why="this form of ResNet is built in the depths of the original's table",
            next_step=f"one of {', '.join(map(str, DEPTHS))}",
        )
    # Not a comparison of the product with infinity: NaN has to fail too.
    if not 1 / _CHANNELS[0] <= width <= 16:
        raise BadValueError(
            f"width {width}",
            why=f"stages of {_CHANNELS[0]} to {_CHANNELS[-1]} channels are multiplied by it",
            next_step=f"a number from 1/{_CHANNELS[0]} to 16, such as 0.25",
        )
    block, counts = _FORMS[depth]
    first, second, third, fourth = (round(each * width) for each in _CHANNELS)
    return CifarResNet(block, counts, (first, second, third, fourth), classes, channels)
