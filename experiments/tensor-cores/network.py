"""What the rows run: ResNet-50, and the linear layer of the training benches."""

from __future__ import annotations

import dataclasses
from typing import Dict

from torch import nn

from narrowgauge_lab.networks import network


@dataclasses.dataclass(frozen=True)
class Inference:
    """An image network of `narrowgauge_lab.networks`, by its name."""

    name: str

    @property
    def size(self) -> int:
        """Pixels along either side of its images."""
        return network(self.name).size

    def build(self) -> nn.Module:
        """The network with random weights, in eval mode on the CPU.

        The same torch seed gives the same weights, whatever device it goes to afterwards.
        """
        return network(self.name).build()


@dataclasses.dataclass(frozen=True)
class Training:
    """A training bench: one linear layer, plain SGD, mean squared error, one fixed batch.

    `iterations` are those that its published seconds are for.
    """

    features_in: int
    features_out: int
    iterations: int
    rate: float = 1e-3


#: The values of the parameter `workload`.
INFERENCE: Dict[str, Inference] = {name: Inference(name) for name in ("resnet50", "resnet50-tiny")}
TRAINING: Dict[str, Training] = {
    "linear-8192": Training(8192, 2048, iterations=100),
    "linear-16384": Training(16384, 4096, iterations=500),
    "linear-tiny": Training(64, 32, iterations=5),
}
