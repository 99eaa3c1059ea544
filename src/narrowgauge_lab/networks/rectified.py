"""What follows most batch normalisations: an addition, and ReLU. Some do all of it at once."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["rectified"]


def rectified(
    norm: nn.Module, x: torch.Tensor, residual: Optional[torch.Tensor] = None
) -> torch.Tensor:
    """relu(norm(x) + residual), of any shape that these take. A module with a true attribute
    `rectifies` is called with what is to be added and done, and does it itself."""
    if getattr(norm, "rectifies", False):
        done: torch.Tensor = norm(x, residual, True)
        return done
    if residual is None:
        return F.relu(norm(x), inplace=True)
    return F.relu(norm(x) + residual)
