"""The one network of all studies: dense layers, and where asked a convolution before them."""

from __future__ import annotations

import math
from typing import List, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State

from .studies import Settings

__all__ = ["ACTIVATIONS", "FILTERS", "KERNEL", "POOL", "Network"]

#: The book's one convolutional layer, and the pooling after it.
FILTERS, KERNEL, POOL = 20, 5, 2

ACTIVATIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}


class Network(AnytimeNetwork):
    """Logits [B, classes] of images [B, 1, size, size]: what goes into the output's sigmoid or
    softmax. It has one exit. `weights` and `biases` go by layers, the output last."""

    exits = 1

    def __init__(self, settings: Settings, classes: int, size: int = 28) -> None:
        super().__init__()
        self.classes = classes
        self.activation = settings.activation
        self.convolution = settings.convolution
        self.dropout = settings.dropout
        shapes: List[Tuple[int, ...]] = []
        inputs = size * size
        if self.convolution:
            shapes.append((FILTERS, 1, KERNEL, KERNEL))
            inputs = FILTERS * ((size - KERNEL + 1) // POOL) ** 2
        for neurons in (*settings.hidden, classes):
            shapes.append((neurons, inputs))
            inputs = neurons
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.biases = nn.ParameterList([nn.Parameter(torch.randn(shape[0])) for shape in shapes])
        with torch.no_grad():
            if settings.start == "scaled":
                for each in self.weights:
                    each.div_(math.sqrt(each[0].numel()))
            if settings.output_bias:
                self.biases[-1].fill_(settings.output_bias)

    @property
    def layers(self) -> int:
        return len(self.weights)

    def masks(self, images: torch.Tensor) -> List[torch.Tensor]:
        """For each hidden dense layer [B, neurons] what its neurons are multiplied by: 0, or what
        makes up for those. None are left out where nothing trains."""
        if not (self.training and self.dropout):
            return []
        kept = 1 - self.dropout
        hidden = list(self.biases)[int(self.convolution) : -1]
        shapes = [(len(images), len(each)) for each in hidden]
        drawn = [torch.rand(shape, device=images.device) for shape in shapes]
        return [(each < kept).to(images.dtype) / kept for each in drawn]

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        self.require_exit(exit)
        (found,) = state
        if found.dim() == 4:
            found = self._before_output(found)
        if not head:
            return Answer(found.new_zeros(len(found), 0), (found,))
        return Answer(F.linear(found, self.weights[-1], self.biases[-1]), (found,))

    def _before_output(self, images: torch.Tensor) -> torch.Tensor:
        """What goes into the output layer: [B, neurons]."""
        active = ACTIVATIONS[self.activation]
        found, layer = images, 0
        if self.convolution:
            # Pooling and these activations may change places; this order is less work.
            found = active(F.max_pool2d(F.conv2d(found, self.weights[0], self.biases[0]), POOL))
            layer = 1
        found = found.flatten(1)
        masks = self.masks(images)
        for place, number in enumerate(range(layer, self.layers - 1)):
            found = active(F.linear(found, self.weights[number], self.biases[number]))
            found = found * masks[place] if masks else found
        return found
