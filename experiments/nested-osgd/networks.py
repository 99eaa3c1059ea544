"""The networks of `nested-osgd`, and what their rows are called."""

from __future__ import annotations

from typing import Any, Mapping, Tuple

from narrowgauge_lab.anytime.logits_file import About
from narrowgauge_lab.anytime.network import AnytimeNetwork
from narrowgauge_lab.anytime.systems.branchynet import branchy_net
from narrowgauge_lab.anytime.systems.iresnext import iresnext
from narrowgauge_lab.anytime.systems.nested import NestedNet, channels_of

__all__ = ["make"]


def make(parameters: Mapping[str, Any], classes: int) -> Tuple[AnytimeNetwork, About]:
    """The network that `parameters` ask for, with random weights, and what a reader of its answers
    has to know. Raises BadValueError for sizes that it cannot have."""
    name, width, blocks = parameters["network"], parameters["width"], parameters["blocks"]
    words = ["" if width == 1 else f"twin of width {width:g}", parameters["optimizer"]]
    net: AnytimeNetwork
    if name == "nested":
        nested = NestedNet(classes, parameters["exits"], blocks, channels_of(width))
        words = [f"{nested.layers(0)} to {nested.layers(nested.exits - 1)} layers", *words]
        net = nested
        family = "nested"
    elif name.startswith("b-"):
        net, family = branchy_net(name, width, classes=classes), "branchynet"
    else:
        form = "incremental" if name == "iresnext-incremental" else "shared"
        net, family = iresnext(form, blocks, width, classes), "iresnext"
        words = [f"{blocks} blocks per stage", *words]
    words = words if name == family else [name, *words]
    variant = ", ".join(filter(None, words))
    return net, About(family, variant)
