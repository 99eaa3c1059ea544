"""The network of the original's MNIST script, which other experiments train too."""

from __future__ import annotations

from narrowgauge_lab.networks.mnist import Net

__all__ = ["Net"]
