"""Image networks by torchvision's names, without torchvision: same keys, shapes and operators.

torchvision has to match its torch to the patch level, and none does in most of the images here.
"""

from narrowgauge_lab.networks.registry import (
    EARLY_STRIDE,
    NETWORKS,
    NOTES,
    TINY,
    Network,
    build,
    network,
)
from narrowgauge_lab.networks.scaling import scale_activations

__all__ = [
    "EARLY_STRIDE",
    "NETWORKS",
    "NOTES",
    "TINY",
    "Network",
    "build",
    "network",
    "scale_activations",
]
