"""Whether what is measured computes the layer: held against float64 before it is timed."""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Sequence, Tuple

import torch
import torch.nn.functional as F

from narrowgauge_lab.context import RowContext

from .maps import Layer
from .ours import DTYPES, Ours
from .problem import Peer
from .times import SELECTED, WAYS

__all__ = ["LIMITS", "Checked", "check", "checked_images", "distance", "reference"]

#: The largest error, as a share of the largest result, by precision; a library may take Winograd's
#: algorithm, which rounds more.
LIMITS = {"fp32": 1e-5, "tf32": 2e-3, "fp16": 2e-3}
_THEIRS = 10.0
#: What a row is nothing without: a wrong one makes it INVALID; of the others it is left out.
_NEEDED = ("torch", SELECTED, *WAYS)


@dataclasses.dataclass(frozen=True)
class Checked:
    """`right`: whether ours and what a row needs are. `error`: ours; `errors`: the peers'.
    `peers`: those that are right; `dropped`: why the others are not."""

    right: bool
    error: float
    errors: Dict[str, float]
    peers: Tuple[Peer, ...]
    dropped: Dict[str, str]


def checked_images(batch: int) -> List[int]:
    """First, middle and last: what is computed in float64."""
    return sorted({0, batch // 2, batch - 1})


def reference(layer: Layer, precision: str) -> torch.Tensor:
    """Results of `checked_images` in float64 on the CPU, of the operands as the precision rounds
    them."""
    images = layer.x[checked_images(len(layer.x))]
    x, weight = (each.to(DTYPES[precision]).double() for each in (images, layer.weight))
    return F.conv2d(torch.relu(x), weight, None, layer.shape.stride, layer.shape.padding)


def check(
    ctx: RowContext, layer: Layer, precision: str, ours: Ours, peers: Sequence[Peer]
) -> Checked:
    """Ours and each peer. Where ours, torch's own or the layer that chooses is wrong, the row
    becomes INVALID; another peer is left out. A submanifold convolution is held to pixels that have
    a nonzero."""
    images = checked_images(len(layer.x))
    wanted = reference(layer, precision)
    error = distance(ours.call()[images], wanted)
    limit = LIMITS[precision]
    wrong = [] if error <= limit else [_said("ours", error, limit)]
    errors: Dict[str, float] = {}
    dropped: Dict[str, str] = {}
    active = (torch.relu(layer.x[images]) != 0).any(dim=1, keepdim=True)
    for peer in peers:
        found, due = peer.call()[images].cpu().double(), wanted
        if "only_at" in peer.about:
            found, due = found * active, wanted * active
        errors[peer.name] = distance(found, due)
        if not errors[peer.name] <= _THEIRS * limit:
            said = _said(peer.name, errors[peer.name], _THEIRS * limit)
            dropped[peer.name] = said
            wrong += [said] if peer.name in _NEEDED else []
    for each in wrong:
        ctx.invalid(f"{layer.shape.name}: {each}")
    kept = tuple(peer for peer in peers if peer.name not in dropped)
    return Checked(not wrong, error, errors, kept, dropped)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest wanted magnitude; NaN where either has one."""
    difference = float((found.cpu().double() - wanted).abs().max())
    largest = float(wanted.abs().max())
    return difference / largest if largest else difference


def _said(name: str, error: float, limit: float) -> str:
    return f"{name} is off by {error:.2g} of the largest result; {limit:g} is what it may be"
