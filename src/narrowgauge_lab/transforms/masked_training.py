"""SGD that keeps pruned weights at zero, or pushes gammas there before anything is pruned."""

from __future__ import annotations

from typing import Mapping, Optional

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from narrowgauge_lab.optim import SGD

__all__ = ["PruningSGD"]


class PruningSGD(SGD):
    """SGD after whose every step what `masks` take out is zero, and in which the magnitudes of all
    gammas of batch normalisation are a part of the loss, times `gamma_l1` (Liu et al. 2017, arXiv
    1708.06519, equation 1).

    `masks`: by parameter name, bool in its shape, true where it stays; others are whole. Nothing
    asks the device for an answer, so that a step can be captured.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        masks: Optional[Mapping[str, torch.Tensor]] = None,
        gamma_l1: float = 0.0,
    ) -> None:
        super().__init__(model, rate, momentum, weight_decay)
        given = masks or {}
        named = {id(each): name for name, each in model.named_parameters()}
        gammas = {
            id(each.weight)
            for each in model.modules()
            if isinstance(each, _BatchNorm) and each.weight is not None
        }
        whole = [torch.ones_like(each) for each in self.parameters]
        stays = [
            given[named[id(each)]].to(one) if named[id(each)] in given else one
            for each, one in zip(self.parameters, whole)
        ]
        pushed = [
            one * gamma_l1 if id(each) in gammas else torch.zeros_like(each)
            for each, one in zip(self.parameters, whole)
        ]
        self._stays = self._flatten(stays) if given else None
        self._pushed = self._flatten([each.detach() for each in pushed]) if gamma_l1 else None

    def _update(self) -> None:
        if self._pushed is not None:
            self.gradient.add_(self._pushed * self.values.sign())
        super()._update()
        if self._stays is not None:
            self.values.mul_(self._stays)
