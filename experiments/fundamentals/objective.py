"""The cost that a study trains by, and what is looked at after each epoch."""

from __future__ import annotations

from typing import Dict, List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.anytime.feeds import Splits
from narrowgauge_lab.anytime.objective import Losses, Objective
from narrowgauge_lab.augment import Feed
from narrowgauge_lab.evalmode import in_eval_mode

from . import by_hand
from .network import Network
from .studies import Settings

__all__ = ["Cost"]

#: As in the book's chapter 5: over so many training images.
_GRADIENT_IMAGES = 1_000
_BATCH = 1_000


class Cost(Objective):
    """One of the three costs and its penalty, differentiated by autograd or written out."""

    exits = 1

    def __init__(self, settings: Settings, layers: int, splits: Splits) -> None:
        self.settings = settings
        self.layers = layers
        self.splits = splits
        self.extra = "penalty" if settings.l1 or settings.l2 else ""

    def losses(self, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> Losses:
        assert isinstance(model, Network)
        cost, outputs = self._cost(model, images, labels)
        return Losses((cost,), outputs, self._penalty(model) if self.extra else None)

    def _cost(
        self, net: Network, images: torch.Tensor, labels: torch.Tensor
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        if self.settings.gradients == "written-out":
            return by_hand.cost_and_outputs(net, self.settings.cost, images, labels)
        (outputs,) = net(images)
        return cost_of(self.settings.cost, outputs, labels), outputs

    def _penalty(self, net: Network) -> torch.Tensor:
        l1, l2 = self.settings.l1, self.settings.l2
        if self.settings.gradients == "written-out":
            return by_hand.penalty(net, l1, l2)
        found = torch.zeros((), device=net.biases[0].device)
        for each in net.weights:
            found = found + (l1 * each.abs().sum() if l1 else l2 / 2 * each.pow(2).sum())
            found = found + (l2 / 2 * each.pow(2).sum() if l1 and l2 else 0.0)
        return found

    def metrics(self) -> Dict[str, Tuple[str, str]]:
        found = super().metrics()
        unit = "1" if self.settings.cost == "quadratic" else "nat"
        found["exit0_train_loss"] = (unit, "computed")
        found["validation_cost"] = (unit, "computed")
        found["validation_accuracy"] = ("%", "computed")
        for number in range(1, self.layers + 1):
            found[f"layer{number}_bias_gradient"] = ("1", "computed")
            found[f"layer{number}_weight_gradient"] = ("1", "computed")
        return found

    def after_epoch(self, model: nn.Module) -> Dict[str, float]:
        """Cost and accuracy on the validation images, and the norms of each layer's gradient."""
        assert isinstance(model, Network)
        found = self._validated(model, self.splits.validation)
        by_weights, by_biases = self.gradient_norms(model)
        for number in range(self.layers):
            found[f"layer{number + 1}_bias_gradient"] = by_biases[number]
            found[f"layer{number + 1}_weight_gradient"] = by_weights[number]
        return found

    def _validated(self, net: Network, feed: Feed) -> Dict[str, float]:
        device = feed.labels.device
        cost = torch.zeros((), dtype=torch.float64, device=device)
        right = torch.zeros((), dtype=torch.int64, device=device)
        with in_eval_mode(net), torch.no_grad():
            for indices in torch.arange(len(feed), device=device).split(_BATCH):
                images, labels = feed.batch(indices)
                (outputs,) = net(images)
                cost += cost_of(self.settings.cost, outputs, labels).double() * len(labels)
                right += (outputs.argmax(1) == labels).sum()
        count = len(feed)
        return {
            "validation_cost": float(cost) / count,
            "validation_accuracy": 100.0 * int(right) / count,
        }

    def gradient_norms(self, net: Network) -> Tuple[List[float], List[float]]:
        """Of each layer, the norm of the gradient of the cost without its penalty, by the weights
        and by the biases, over the first training images and with all neurons there. That by the
        biases is what the book calls a layer's speed of learning."""
        feed = self.splits.training
        first = torch.arange(min(_GRADIENT_IMAGES, len(feed)), device=feed.labels.device)
        with in_eval_mode(net):
            cost, _ = self._cost(net, *feed.batch(first))
            found = torch.autograd.grad(cost, [*net.weights, *net.biases])
        norms = torch.stack([each.norm() for each in found]).tolist()
        return norms[: net.layers], norms[net.layers :]


def cost_of(name: str, outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cost over images, by autograd's own operations where there are such."""
    if name == "log-likelihood":
        return F.cross_entropy(outputs, labels)
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    wanted = (labels[:, None] == classes).to(outputs.dtype)
    if name == "quadratic":
        return (torch.sigmoid(outputs) - wanted).pow(2).sum(1).mean() / 2
    each = F.binary_cross_entropy_with_logits(outputs, wanted, reduction="none")
    return each.sum(1).mean()
