"""Small networks and data for the tests of quantised models."""

from __future__ import annotations

import torch
from torch import nn

#: What every processor computes exactly in int8; see quant/cpu.py.
EXACT_BITS = 7


def small_network():
    """Grouped, strided, dilated, with and without bias; a linear layer at the end. Names 0 to 8."""
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, stride=2, groups=4, bias=False),
        nn.ReLU(),
        nn.Conv2d(16, 8, 3, padding=(2, 1), dilation=(2, 1)),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(32, 10),
    ).eval()


def images(count=8, seed=0):
    return torch.randn(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed))
