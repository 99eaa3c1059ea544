"""The network of the original's manual layers, and its files of weights."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.networks.state_files import load_state_file

__all__ = ["ManualNet", "load_pth"]


class ManualNet(nn.Module):
    """conv(1→4, 5×5) ReLU pool2, conv(4→10, 5×5) ReLU pool2, linear 160→100 ReLU, linear 100→10.

    18,224 parameters under the original's names. Takes float32 [B, 1, 28, 28] (of pixels in [0, 1],
    less 0.5, over 0.5), gives logits [B, 10].
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(1, 4, 5)
        self.conv_2 = nn.Conv2d(4, 10, 5)
        self.fc_1 = nn.Linear(10 * 4 * 4, 100)
        self.fc_2 = nn.Linear(100, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # ReLU after pooling gives what ReLU before it gives, on a quarter of the elements.
        hidden = F.relu(F.max_pool2d(self.conv_1(images), 2))
        hidden = F.relu(F.max_pool2d(self.conv_2(hidden), 2))
        hidden = F.relu(self.fc_1(hidden.flatten(1)))
        return self.fc_2(hidden)


def load_pth(model: nn.Module, path: Path) -> None:
    """Put the weights of a .pth file of the original's into `model`: a state dict by torch.save,
    float32 under the names that `ManualNet` has. Layers that compute otherwise under these names
    take them too.

    Raises DataUnavailableError where there is no such file, DataCorruptError where it holds
    something else; then the model is as it was.
    """
    load_state_file(model, path)
