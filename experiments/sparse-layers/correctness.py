"""Whether what is measured computes the layer: held against float64 before it is timed."""

from __future__ import annotations

from typing import Dict, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_lab.context import RowContext

from .maps import Layer
from .ours import DTYPES, Ours
from .peers import Peer

__all__ = ["LIMITS", "check", "distance", "reference"]

#: The largest error, as a share of the largest result, by precision; a library may take Winograd's
#: algorithm, which rounds more.
LIMITS = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 2e-3}
_THEIRS = 10.0
#: Images that are computed in float64.
_IMAGES = 2


def reference(layer: Layer, precision: str) -> torch.Tensor:
    """The first images' results in float64 on the CPU, of the operands as the precision rounds
    them."""
    x, weight = (each.to(DTYPES[precision]).double() for each in (layer.x[:_IMAGES], layer.weight))
    return F.conv2d(torch.relu(x), weight, None, layer.shape.stride, layer.shape.padding)


def check(
    ctx: RowContext, layer: Layer, precision: str, ours: Ours, peers: Sequence[Peer]
) -> Tuple[bool, float, Dict[str, float]]:
    """Whether all of it is right, our error and those of the peers; what is wrong makes the row
    INVALID. A submanifold convolution is held to pixels that have a nonzero."""
    wanted = reference(layer, precision)
    error = distance(ours.call(), wanted)
    limit = LIMITS[precision]
    wrong = [] if error <= limit else [_said("ours", error, limit)]
    errors: Dict[str, float] = {}
    active = (torch.relu(layer.x[:_IMAGES]) != 0).any(dim=1, keepdim=True)
    for peer in peers:
        found, due = peer.call()[:_IMAGES].cpu().double(), wanted
        if "only_at" in peer.about:
            found, due = found * active, wanted * active
        errors[peer.name] = distance(found, due)
        if not errors[peer.name] <= _THEIRS * limit:
            wrong.append(_said(peer.name, errors[peer.name], _THEIRS * limit))
    for each in wrong:
        ctx.invalid(f"{layer.shape.name}: {each}")
    return not wrong, error, errors


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest wanted magnitude; NaN where either has one."""
    difference = float((found[: len(wanted)].cpu().double() - wanted).abs().max())
    largest = float(wanted.abs().max())
    return difference / largest if largest else difference


def _said(name: str, error: float, limit: float) -> str:
    return f"{name} is off by {error:.2g} of the largest result; {limit:g} is what it may be"
