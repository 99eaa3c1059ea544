"""The members of an ensemble, and how the first m of them make one answer."""

# No `from __future__ import annotations`: torch 1.8's fx cannot trace a forward with annotations
# that are texts.

import math
from typing import List, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.compiling import PartByPart
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.networks.resnet import resnet50

__all__ = ["COMBINED", "IMAGENET_FORM", "Joined", "LeNet5", "combine", "make_member"]

#: torchvision's ResNet-50: of 32×32 pixels one position reaches the last stage.
IMAGENET_FORM = "resnet50-imagenet-form"

#: How each method's members make one answer.
COMBINED = {
    "voting": "probabilities",
    "bagging": "probabilities",
    "snapshot": "probabilities",
    "fusion": "mean",
    "boosting": "sum",
}


class LeNet5(nn.Module):
    """LeNet-5 for images of 3×32×32 as the published example of Ensemble-PyTorch has it: no
    dropout, ReLU, largest of 2×2 pixels. 651,720 multiply-accumulates at width 1."""

    def __init__(self, width: float = 1.0, classes: int = 10, channels: int = 3) -> None:
        """Raises BadValueError for a width that leaves a layer without channels."""
        super().__init__()
        first, second, third, fourth = sizes = [round(each * width) for each in (6, 16, 120, 84)]
        if min(sizes) < 1:
            raise BadValueError(f"width {width} leaves no channel", why="the first layer has 6")
        self.conv1 = nn.Conv2d(channels, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * 25, third)
        self.fc2 = nn.Linear(third, fourth)
        self.fc3 = nn.Linear(fourth, classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.relu(self.conv1(images)), 2)
        hidden = F.max_pool2d(F.relu(self.conv2(hidden)), 2).flatten(1)
        hidden = F.relu(self.fc2(F.relu(self.fc1(hidden))))
        return self.fc3(hidden)


def make_member(network: str, width: float, classes: int) -> nn.Module:
    """A member with random weights: lenet5, resnet18, resnet50 or IMAGENET_FORM."""
    if network == "lenet5":
        return LeNet5(width, classes)
    if network == IMAGENET_FORM:
        return resnet50(width, classes)
    return cifar_resnet(int(network[len("resnet") :]), width, classes)


def combine(answers: Sequence[torch.Tensor], how: str, shrinkage: float = 1.0) -> torch.Tensor:
    """What members say, each logits [B, classes], as logits of all of them, float32 [B, classes].

    `probabilities`: the logarithm of their mean probability (soft voting); `mean`: the mean of
    their logits; `sum`: their sum times `shrinkage`.
    """
    stacked = torch.stack([each.float() for each in answers])
    if how == "probabilities":
        return F.log_softmax(stacked, 2).logsumexp(0) - math.log(len(answers))
    return stacked.mean(0) if how == "mean" else shrinkage * stacked.sum(0)


class Joined(PartByPart):
    """Some members as one network, with the answer of `combine`."""

    def __init__(self, members: Sequence[nn.Module], how: str, shrinkage: float = 1.0) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.how, self.shrinkage = how, shrinkage

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        answers: List[torch.Tensor] = [self.ask(member, images) for member in self.members]
        return combine(answers, self.how, self.shrinkage)


#: A member's number from 0, and the member.
Numbered = Tuple[int, nn.Module]
