"""What the tests of adaptive depth share: a network whose halting is lively, and its images."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet

__all__ = ["images_of", "lively"]


def images_of(batch: int, size: int = 16) -> torch.Tensor:
    """Smooth noise, so that masks come in patches."""
    generator = torch.Generator().manual_seed(batch + size)
    noise = torch.randn(batch, 3, size + 4, size + 4, generator=generator)
    return F.avg_pool2d(noise, 5, stride=1) * 5 if batch else noise[:, :, 4:, 4:]


def lively(
    kind: str = "sact", width: int = 8, units: int = 3, bias: float = -0.7
) -> AdaptiveResNet:
    """In eval mode, its running statistics those of such images, and halting early and late."""
    torch.manual_seed(1)
    net = AdaptiveResNet(kind, units, width)
    net.train()
    with torch.no_grad():
        for _ in range(8):
            net.think(images_of(6))
    for block in net.blocks:
        for head in block.heads:
            last = head.all_conv if head.near_conv is None else head.near_conv
            torch.nn.init.constant_(last.bias, bias)
    return net.eval()
