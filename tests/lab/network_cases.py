"""Small networks for the tests of our GPU engine."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from narrowgauge_lab.networks import scale_activations

__all__ = ["Everything", "TinyResNet", "everything", "images", "tiny"]


class Bottleneck(nn.Module):
    """1×1, 3×3, 1×1, and what came in added to it."""

    def __init__(self, inputs: int, middle: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, middle, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(middle)
        self.conv2 = nn.Conv2d(middle, middle, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(middle)
        self.conv3 = nn.Conv2d(middle, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: Optional[nn.Module] = None
        if stride > 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += identity
        return self.relu(y)


class TinyResNet(nn.Module):
    """Three blocks; channels that are no multiples of 64, so that padding is exercised."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(16)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        self.layers = nn.Sequential(
            Bottleneck(16, 16, 64, 1), Bottleneck(64, 32, 72, 2), Bottleneck(72, 32, 72, 1)
        )
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(72, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.fc(torch.flatten(self.avgpool(self.layers(x)), 1))


def tiny(seed: int = 0) -> nn.Module:
    """A tiny network in eval mode whose batch norms are not trivial."""
    torch.manual_seed(seed)
    model = TinyResNet()
    model.train()
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.weight.uniform_(0.5, 1.5)
                module.bias.normal_(0, 0.2)
        for step in range(5):
            model(images(8, seed=step))
    return model.eval()


class Everything(nn.Module):
    """Every kind of step, and values that are put together twice. `torch_step`: with an operator
    that no kernel of ours has."""

    def __init__(self, height: int, width: int, *, torch_step: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False)
        self.norm0 = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(3, 2, 1, ceil_mode=True)
        self.wide = nn.Conv2d(16, 96, 1)
        # 96 channels are less than two blocks of 64, and a multiple of smaller blocks.
        self.narrow = nn.Conv2d(96, 40, 3, padding=1)
        self.shortcut = nn.Conv2d(16, 40, 1)
        self.deep = nn.Conv2d(40, 40, 3, padding=1, groups=40, bias=False)
        self.norm1 = nn.BatchNorm2d(40)
        self.relu6 = nn.ReLU6(inplace=True)
        self.norm2 = nn.BatchNorm2d(40)
        self.squeeze = nn.Conv2d(40, 12, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(12)
        self.grow = nn.Conv2d(12, 8, 3, padding=1)
        self.norm4 = nn.BatchNorm2d(88)
        self.mix = nn.Conv2d(88, 24, 3, padding=1)
        self.same = nn.MaxPool2d(3, 1, 1)
        self.norm5 = nn.BatchNorm2d(48)
        self.average = nn.AvgPool2d(2, 2)
        self.between = nn.Sigmoid() if torch_step else nn.Identity()
        # After the stem, the pooling, which rounds up, and the average, which does not.
        pixels = [((size + 1) // 2 // 2 + 1) // 2 for size in (height, width)]
        self.hidden = nn.Linear(48 * pixels[0] * pixels[1], 20)
        self.last = nn.Linear(20, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(torch.relu(self.norm0(self.stem(x))))
        x = torch.relu(self.narrow(torch.relu(self.wide(x))) + self.shortcut(x))
        x = self.relu6(self.norm1(self.deep(x)))
        y = self.norm3(self.squeeze(torch.relu(self.norm2(x))))
        x = torch.cat([x, self.grow(torch.relu(y)), x], 1)
        x = self.mix(torch.relu(self.norm4(x)))
        x = torch.cat([x, self.same(x)], 1)
        x = self.between(self.average(torch.relu(self.norm5(x))))
        return self.last(torch.relu(self.hidden(torch.flatten(x, 1))))


def everything(height: int, width: int, *, torch_step: bool = False) -> nn.Module:
    """For images of this size, with activations of order one."""
    torch.manual_seed(0)
    model = Everything(height, width, torch_step=torch_step).eval()
    return scale_activations(model, images(16, seed=7, height=height, width=width))


def images(batch: int, seed: int = 0, height: int = 37, width: int = 33) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, 3, height, width, generator=generator)
