"""The network of the original's CIFAR-10 script, which other experiments train too."""

from __future__ import annotations

from narrowgauge_lab.networks.cifar import DEPTHS, Block, ResNet

__all__ = ["DEPTHS", "Block", "ResNet"]
