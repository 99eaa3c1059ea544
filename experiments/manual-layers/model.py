"""The networks: the original's, and that of Defensive Approximation, whose scores are published."""

from __future__ import annotations

import dataclasses
from typing import Callable, Dict, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.networks.manual_mnist import ManualNet

__all__ = ["NETWORKS", "DefensiveNet", "Network"]


class DefensiveNet(nn.Module):
    """conv(1→32, 3×3) ReLU pool2, conv(32→64, 3×3) ReLU pool2, linear 3136→200 ReLU, linear 200→10.

    Windows are padded by 1. 648,226 parameters under the names of AG-X09/Defensive-Approximation.
    Takes float32 [B, 1, 28, 28] of pixels in [0, 1], gives logits [B, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 32, 3, padding=1)
        self.conv2 = nn.Conv2d(32, 64, 3, padding=1)
        self.linear1 = nn.Linear(7 * 7 * 64, 200)
        self.linear2 = nn.Linear(200, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # ReLU after pooling gives what ReLU before it gives, on a quarter of the elements.
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.linear1(hidden.flatten(1)))
        return self.linear2(hidden)


@dataclasses.dataclass(frozen=True)
class Published:
    """Scores of the first test image by the weights of that sha256, as printed, to four digits
    behind the point: exact, and by Ax-FPM."""

    sha256: str
    exact: Tuple[float, ...]
    axfpm: Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Network:
    """`mean` and `std`: what its pixels, in [0, 1], are normalised by."""

    make: Callable[[], nn.Module]
    mean: float
    std: float
    published: Tuple[Published, ...] = ()


#: DA_tutorial_MNIST.ipynb and trained_lenet5.pt of AG-X09/Defensive-Approximation, 59fca82.
_TUTORIAL = Published(
    "551a11267982991fb0c9f74e9094de19e54b51455eff9bd1c19c77a69d85156a",
    (-4.9248, -1.6787, 1.7533, 2.3358, -7.6406, -3.2882, -22.0243, 14.6021, -1.9173, 2.2584),
    (-20.9173, -12.7048, 8.2331, 14.1789, -24.7654, -24.1655, -88.4965, 55.26, -2.4204, 12.6122),
)

NETWORKS: Dict[str, Network] = {
    "original": Network(ManualNet, 0.5, 0.5),
    "defensive": Network(DefensiveNet, 0.0, 1.0, (_TUTORIAL,)),
}
