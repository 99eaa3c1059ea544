"""Networks whose published sizes the cost must give."""

from __future__ import annotations

import functools
from typing import List, Tuple

import torch
from torch import nn

from narrowgauge_lab.measure.cost import Cost, count


def lenet() -> nn.Module:
    """The LeNet-like network of the manual-layers system: 18,224 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 4, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(4, 10, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(160, 100), nn.ReLU(), nn.Linear(100, 10),
    )  # fmt: skip


class _Bottleneck(nn.Module):
    def __init__(self, inside: int, channels: int, stride: int) -> None:
        super().__init__()
        wide = 4 * channels
        self.body = nn.Sequential(
            *_normed(inside, channels, 1, 1), nn.ReLU(),
            *_normed(channels, channels, 3, stride), nn.ReLU(), *_normed(channels, wide, 1, 1),
        )  # fmt: skip
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != wide:
            self.shortcut = nn.Sequential(*_normed(inside, wide, 1, stride))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def _normed(inside: int, outside: int, kernel: int, stride: int) -> List[nn.Module]:
    conv = nn.Conv2d(inside, outside, kernel, stride, kernel // 2, bias=False)
    return [conv, nn.BatchNorm2d(outside)]


def resnet50() -> nn.Module:
    """The usual ResNet-50 ("v1.5"): 25,557,032 parameters, 4.089 GMAC at 224×224."""
    stages: Tuple[Tuple[int, int, int], ...] = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))
    modules = [*_normed(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    inside = 64
    for channels, blocks, stride in stages:
        for position in range(blocks):
            modules.append(_Bottleneck(inside, channels, stride if position == 0 else 1))
            inside = 4 * channels
    modules += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    return nn.Sequential(*modules)


@functools.lru_cache(maxsize=None)
def resnet50_cost(side: int, batch: int = 1) -> Cost:
    """Counted once for all who ask: counting runs the network."""
    return count(resnet50(), torch.zeros(batch, 3, side, side))
