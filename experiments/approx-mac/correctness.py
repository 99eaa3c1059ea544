"""Whether a kernel, and what is measured beside it, computes what it should: before it is timed."""

from __future__ import annotations

from typing import List, Sequence, Tuple

import torch

from narrowgauge_lab.context import RowContext

from .peers import Peer
from .subject import Subject

__all__ = ["OURS", "THEIRS", "check", "distance"]

#: The largest error of float32 results, as a share of the largest one that was looked at; what is
#: exact in codes has none. Winograd's algorithm, which libraries may take, rounds more.
OURS, THEIRS = 1e-5, 1e-4


def check(ctx: RowContext, subject: Subject, peers: Sequence[Peer]) -> Tuple[bool, float]:
    """Whether all of it is right, and the kernel's own error; what is wrong makes the row INVALID.

    Looked at is a sample of the results, by the policy's own definition: of codes by its table,
    whichever kernel forms the products.
    """
    operands = subject.operands
    error = distance(operands.sample.of(subject.call()), subject.wanted)
    limit = 0.0 if subject.codes else OURS
    wrong: List[str] = [] if error <= limit else [_said("the kernel", error, limit)]
    for peer in peers:
        # torch's float32 of codes rounds; what works on codes does not.
        found = peer.sampled(peer.call())
        limit = THEIRS if found.is_floating_point() else 0.0
        off = distance(found, peer.wanted)
        if not off <= limit:
            wrong.append(_said(peer.name, off, limit))
    for each in wrong:
        ctx.invalid(f"{operands.shape.name}: {each}")
    return not wrong, error


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference over the largest wanted magnitude; NaN where either has one."""
    difference = float((found.double() - wanted.double()).abs().max())
    largest = float(wanted.double().abs().max())
    return difference / largest if largest else difference


def _said(name: str, error: float, limit: float) -> str:
    return f"{name} is off by {error:.2g} of the largest result; {limit:g} is what it may be"
