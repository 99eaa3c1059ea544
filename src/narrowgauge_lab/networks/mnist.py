"""The network of the original's MNIST script: two convolutions and two linear layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Net"]


class Net(nn.Module):
    """conv(1→20, 5×5) ReLU pool2, conv(20→50, 5×5) ReLU pool2, linear 800→500 ReLU, linear 500→10.

    431,080 parameters. Takes float32 [B, 1, 28, 28], gives logits [B, 10]. The loss is the cross
    entropy of the logits, which is the original's log_softmax and nll_loss in one.
    """

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 20, 5)
        self.conv2 = nn.Conv2d(20, 50, 5)
        self.fc1 = nn.Linear(50 * 4 * 4, 500)
        self.fc2 = nn.Linear(500, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # ReLU after pooling gives what ReLU before it gives, on a quarter of the elements.
        hidden = F.relu(F.max_pool2d(self.conv1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv2(hidden), 2))
        hidden = F.relu(self.fc1(hidden.flatten(1)))
        return self.fc2(hidden)
