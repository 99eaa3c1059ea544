"""What thinking costs in training: the cross entropy with a price on the ponder cost."""

from __future__ import annotations

from typing import Optional

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.objective import Losses, Objective
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet

__all__ = ["PonderLoss"]


class PonderLoss(Objective):
    """Cross entropy + τ · Σ over blocks of the mean ρ (Figurnov et al. 2017, equation 8).

    τ rises from 0 in the first epoch to its value after `warm_up` epochs, so that units have learnt
    something before leaving them out pays: with the full price from the start they may stay dead.
    """

    exits = 1
    extra = "ponder_loss"

    def __init__(self, tau: float, warm_up: int, device: torch.device) -> None:
        """Raises BadValueError for a price or a warm-up that is negative or not a number."""
        if not (0 <= tau < float("inf") and warm_up >= 0):
            raise BadValueError(
                f"a price of thinking of {tau}, reached after {warm_up} epochs",
                next_step="both are 0 or more; the published price is 0.005 to 0.02",
            )
        self.tau, self.warm_up = tau, warm_up
        #: On the device, where a captured step reads it.
        self._now = torch.zeros((), device=device)
        self.begin_epoch(0)

    def begin_epoch(self, epoch: int, model: Optional[nn.Module] = None) -> None:
        """The price of that epoch, counted from 0; the model does not matter."""
        del model
        self._now.fill_(self.price(epoch))

    def price(self, epoch: int) -> float:
        """τ in an epoch, counted from 0."""
        return self.tau * (min(1.0, epoch / self.warm_up) if self.warm_up else 1.0)

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        assert isinstance(model, AdaptiveResNet)
        thought = model.think(images, account=False)
        logits = thought.logits.float()
        task = F.cross_entropy(logits, labels)
        return Losses((task,), logits, self._now * thought.ponder_cost())
