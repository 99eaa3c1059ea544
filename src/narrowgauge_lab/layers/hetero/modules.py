"""Drop-in layers whose products run where a plan says."""

from __future__ import annotations

from typing import Optional

import torch
from torch import nn

from narrowgauge_lab.layers.hetero.function import run
from narrowgauge_lab.layers.hetero.runner import Runner

__all__ = ["HeteroConv2d", "HeteroLinear"]


class HeteroConv2d(nn.Conv2d):
    """nn.Conv2d with its constructor, parameters and state dict. `runner` places its passes;
    without one (as constructed) it is torch's own."""

    runner: Optional[Runner] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.runner is None:
            return super().forward(x)
        if x.dim() == 3:
            # torch 1.11 took images without a batch.
            return run(self.runner, x.unsqueeze(0), self.weight, self.bias).squeeze(0)
        return run(self.runner, x, self.weight, self.bias)


class HeteroLinear(nn.Linear):
    """nn.Linear, in the same way; the input may have any number of dimensions."""

    runner: Optional[Runner] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.runner is None:
            return super().forward(x)
        if x.dim() == 2:
            return run(self.runner, x, self.weight, self.bias)
        rows = run(self.runner, x.reshape(-1, x.shape[-1]), self.weight, self.bias)
        return rows.reshape(*x.shape[:-1], rows.shape[-1])
