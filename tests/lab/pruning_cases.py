"""Small networks that pruning meets, with weights and statistics that let nothing cancel."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace such forwards.

from typing import Tuple

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["Branching", "Plain", "assert_close", "randomised"]


def assert_close(given: torch.Tensor, wanted: torch.Tensor, tolerance: float = 1e-10) -> None:
    """Equal shapes, and no entry further than the tolerance, absolute or relative. NaN fails."""
    assert given.shape == wanted.shape
    assert bool(((given - wanted).abs() <= tolerance * (1 + wanted.abs())).all())


def randomised(model: nn.Module, seed: int = 1) -> nn.Module:
    """`model` in float64, in eval mode, its parameters and running statistics drawn anew."""
    chance = torch.Generator().manual_seed(seed)
    model = model.double().eval()
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if tensor.is_floating_point():
                drawn = torch.randn(tensor.shape, generator=chance, dtype=torch.float64)
                if name.endswith("running_var"):
                    tensor.copy_(drawn.abs() + 0.5)
                elif tensor.dim() > 1:
                    tensor.copy_(drawn * (2.0 / tensor[0].numel()) ** 0.5)
                else:
                    tensor.copy_(drawn * 0.3 + (1.0 if name.endswith("weight") else 0.0))
    return model


class Plain(nn.Module):
    """Convolutions with biases and no normalisation, and maps that are flattened; of
    images of 16×16."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.second = nn.Conv2d(4, 6, 3, padding=1)
        self.linear = nn.Linear(6 * 64, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = self.pool(F.relu(self.first(images)))
        return self.linear(torch.flatten(F.relu(self.second(hidden)), 1))


class Branching(nn.Module):
    """One layer whose outputs can be taken out, `free`, and ten that cannot, each for a reason of
    its own."""

    def __init__(self) -> None:
        super().__init__()
        self.free = nn.Conv2d(3, 4, 1)
        self.before_groups = nn.Conv2d(4, 4, 1)
        self.grouped = nn.Conv2d(4, 4, 1, groups=2)
        self.joined = nn.Conv2d(4, 2, 1)
        self.beside = nn.Conv2d(4, 2, 1)
        self.shifted = nn.Conv2d(4, 4, 1)
        self.twice = nn.Conv2d(4, 4, 1)
        self.plain = nn.Conv2d(4, 4, 1)
        self.norm = nn.BatchNorm2d(4, affine=False)
        self.hooked = nn.Conv2d(4, 4, 1)
        self.hooked.register_forward_hook(lambda module, given, output: output * 2)
        self.last = nn.Conv2d(4, 4, 1)
        self.linear = nn.Linear(4, 2)
        self.unused = nn.Conv2d(2, 2, 1)

    def forward(self, images: torch.Tensor) -> Tuple[torch.Tensor, torch.Tensor]:
        hidden = self.grouped(self.before_groups(self.free(images)))
        hidden = torch.cat([self.joined(hidden), self.beside(hidden)], 1)
        hidden = self.twice(F.relu(self.twice(self.shifted(hidden) + 1.0)))
        hidden = self.hooked(self.norm(self.plain(hidden)))
        hidden = self.last(hidden)
        return hidden, self.linear(hidden.mean((2, 3)))
