"""The layer that chooses between dense and sparse itself, as a network would have it."""

from __future__ import annotations

from typing import Any, Dict

import torch
from torch import nn

from narrowgauge_contract.errors import NarrowgaugeError, NotApplicableError
from narrowgauge_lab.layers.sparse import calibrate

from .ours import sparse_layer
from .peers import Peer, Problem
from .times import SELECTED

__all__ = ["selected"]

#: Shares of zeros that the layer is calibrated at, and pairs of samples at each.
_LEVELS, _PAIRS = (0.0, 0.3, 0.5, 0.7, 0.9, 0.99), 3


def selected(problem: Problem, seconds: float) -> Peer:
    """`SparseConv2d` calibrated for the problem's map; `seconds` for each level. Raises
    NotApplicableError where it cannot be."""
    x, layer = problem.x, sparse_layer(problem.shape, problem.weight, "auto")
    model = nn.Sequential(layer).eval()
    try:
        with torch.no_grad():
            (found,) = calibrate(model, x, levels=_LEVELS, pairs=_PAIRS, limit_s=seconds)
            chosen, why = layer.choose(x)
    except NarrowgaugeError as error:
        raise NotApplicableError("the layer could not be calibrated", why=error.what) from error
    about: Dict[str, Any] = {"chosen": chosen, "why": why, **found.crossover.to_fact()}
    return Peer(SELECTED, lambda: model(x), about)
