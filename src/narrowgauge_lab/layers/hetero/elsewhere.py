"""Everything but the products, where that is a CPU: by the kernels' operators, if a plan says so.

What lies between the layers is most of a step whose products are elsewhere, and batch
normalisation is most of that: torch's makes several passes over the threads, with sums in float64.
Networks that ask for what follows it too (`networks.rectified`) have it in the same pass.
"""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.placement import PlacementPlan
from narrowgauge_kernels.batch_norm import batch_norm
from narrowgauge_kernels.library import has_kernels

__all__ = ["HostBatchNorm2d", "elsewhere_by", "normalised_by_kernels", "place_elsewhere"]


class HostBatchNorm2d(nn.BatchNorm2d):
    """nn.BatchNorm2d with its constructor, parameters, buffers and state dict, which also adds and
    rectifies what it has normalised; hooks see what comes of it. What trains on a CPU, in float32
    and in order of memory, goes by the kernels, and everything else by torch. Gradients of
    gradients are refused there."""

    #: See `networks.rectified`.
    rectifies = True
    #: Whether the last call in training went by the kernels.
    by_kernels = False

    def forward(
        self, x: torch.Tensor, residual: Optional[torch.Tensor] = None, rectify: bool = False
    ) -> torch.Tensor:
        goes = self._goes_by_kernels(x, residual)
        if self.training and goes is not self.by_kernels:
            self.by_kernels = goes
        if not goes:
            y = super().forward(x)
            y = y if residual is None else y + residual
            return F.relu(y) if rectify else y
        y, mean, variance = batch_norm(x, self.weight, self.bias, self.eps, residual, rectify)
        if self.track_running_stats and self.running_mean is not None:
            self._follow(mean, variance, x.numel() // x.shape[1])
        return y

    def _goes_by_kernels(self, x: torch.Tensor, residual: Optional[torch.Tensor]) -> bool:
        others = (self.weight, self.running_mean, residual)
        return (
            self.training
            and x.dim() == 4
            and x.device.type == "cpu"
            and all(each is None or each.dtype == torch.float32 for each in (x, *others))
            and (residual is None or residual.shape == x.shape)  # torch also repeats smaller ones
            and x.is_contiguous()
            and x.shape[1] == self.num_features  # torch says what is wrong with another number
            and x.numel() > x.shape[1]  # and with a single value
        )

    def _follow(self, mean: torch.Tensor, variance: torch.Tensor, count: int) -> None:
        """The running averages, as torch has them: of the variance by count - 1."""
        share = self.momentum
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if share is None:
                share = 1.0 / float(self.num_batches_tracked)
        share = 0.0 if share is None else share
        assert self.running_mean is not None
        assert self.running_var is not None
        self.running_mean.lerp_(mean, share)
        self.running_var.mul_(1.0 - share).add_(variance, alpha=share * count / (count - 1))


def elsewhere_by(plan: PlacementPlan) -> str:
    """Whose operators run where everything else lives, by this plan and here: the kernels' where
    the plan says so and they are built, else torch's."""
    return "kernels" if plan.elsewhere_by == "kernels" and has_kernels("cpu") else "torch"


def place_elsewhere(model: nn.Module, by: str) -> None:
    """Have batch normalisation go by `by`, in place: each stays the same object and changes its
    class; subclasses of others are left alone."""
    kind = HostBatchNorm2d if by == "kernels" else nn.BatchNorm2d
    for module in model.modules():
        if type(module) in (nn.BatchNorm2d, HostBatchNorm2d):
            module.__class__ = kind


def normalised_by_kernels(model: nn.Module) -> int:
    """How many batch normalisations went by the kernels when they last trained."""
    return sum(isinstance(each, HostBatchNorm2d) and each.by_kernels for each in model.modules())
