"""FGSM and PGD: untargeted, within a box of ±epsilon around each pixel.

Goodfellow et al. 2015 (arXiv 1412.6572) and Madry et al. 2018 (arXiv 1706.06083). Images are
float32 [B, C, H, W] of pixels in [0, 1], before any normalisation, and stay there: a network that
wants its pixels normalised does that itself (`networks.Normalised`).
"""

from __future__ import annotations

import dataclasses
from typing import Callable, Optional

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = ["Attack", "Gradient", "adversarial", "loss_gradient", "losses"]

#: The gradient of each image's loss by the image; of images and their labels.
Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
#: Steps of PGD together are so many times as long as epsilon: from anywhere in the box, an image
#: can come to any other place in it (Madry et al.).
_REACH = 2.5


@dataclasses.dataclass(frozen=True)
class Attack:
    """`epsilon`: what a pixel may change by, of 1. FGSM takes one step as long as that; PGD `steps`
    shorter ones, from a random place in the box where `random_start` says so.

    Raises BadValueError for what is no attack.
    """

    kind: str
    epsilon: float
    steps: int = 1
    random_start: bool = False

    def __post_init__(self) -> None:
        if self.kind not in ("fgsm", "pgd"):
            raise BadValueError(f"'{self.kind}' is neither fgsm nor pgd")
        if not 0 <= self.epsilon <= 1:
            raise BadValueError(f"epsilon {self.epsilon} is not between 0 and 1, as pixels are")
        if self.steps < 1 or (self.kind == "fgsm" and (self.steps > 1 or self.random_start)):
            raise BadValueError(
                f"{self.kind} of {self.steps} steps",
                why="FGSM is one step from the image; PGD takes one or more",
            )

    @property
    def step_size(self) -> float:
        return min(self.epsilon, _REACH * self.epsilon / self.steps)


def adversarial(
    attack: Attack,
    images: torch.Tensor,
    labels: torch.Tensor,
    gradient: Gradient,
    judge: nn.Module,
    generator: Optional[torch.Generator] = None,
) -> torch.Tensor:
    """Of each image the iterate at which the loss of `judge`, the network that is attacked, is
    largest; `gradient` need not be its own. The image that PGD starts from is none of them.

    `generator`, on the CPU, draws the random start. A gradient of 0 moves nothing.
    """
    low = (images - attack.epsilon).clamp_(0.0, 1.0)
    high = (images + attack.epsilon).clamp_(0.0, 1.0)
    now = images
    if attack.random_start:
        share = torch.rand(images.shape, generator=generator).to(images.device)
        now = low + share * (high - low)
    best = now
    worst = torch.full((len(images),), -float("inf"), dtype=torch.float64, device=images.device)
    for _ in range(attack.steps):
        step = attack.step_size * gradient(now, labels).sign()
        now = torch.min(torch.max(now + step, low), high)
        if attack.steps == 1:
            return now
        with torch.no_grad():
            loss = losses(judge(now), labels)
        better = loss > worst
        worst = torch.where(better, loss, worst)
        best = torch.where(better.reshape(-1, 1, 1, 1), now, best)
    return best


def loss_gradient(model: nn.Module) -> Gradient:
    """The gradient of the cross entropy by the image, through the backward pass of `model`'s own
    layers; `model` is in eval mode. Raises BadValueError where it is not finite: its signs would
    say nothing."""

    def gradient(images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wanted = images.detach().clone().requires_grad_()
        # The sum: no image's gradient depends on how many others there are.
        (found,) = torch.autograd.grad(losses(model(wanted), labels).sum(), wanted)
        if not bool(torch.isfinite(found).all()):
            raise BadValueError(
                f"the gradient of this {type(model).__name__} by its images is not finite",
                next_step="another policy, or another gradient of it",
            )
        return found

    return gradient


def losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Cross entropy of each image, in float64: that of approximate products may have large logits,
    and a loss of exactly 0 has no gradient."""
    return F.cross_entropy(logits.double(), labels, reduction="none")
