"""The layer that chooses between dense and sparse itself, as a network would have it, and that very
layer told to be either."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, List, Tuple

import torch

from narrowgauge_contract.errors import NarrowgaugeError, NotApplicableError
from narrowgauge_lab.layers.sparse import SparseConv2d, calibrate, levels_for

from .ours import sparse_layer
from .problem import Peer, Problem
from .times import SELECTED, WAYS

__all__ = ["selected"]

#: Of samples, at each share of zeros that the layer is calibrated at.
_PAIRS = 3


def selected(problem: Problem, seconds: float) -> Tuple[Tuple[Peer, ...], Dict[str, str]]:
    """`SparseConv2d` calibrated for the problem's map, then the same layer by each way that it
    chooses among, and why one of these is not here; `seconds` for each level. Raises
    NotApplicableError where it cannot be calibrated."""
    x, layer = problem.x, sparse_layer(problem.shape, problem.weight, "auto")
    if x.is_cuda and x.dtype == torch.float16:
        # As a network at this precision has its maps; tensor cores want them so.
        x = x.contiguous(memory_format=torch.channels_last)
        layer = layer.to(memory_format=torch.channels_last)
    layer.eval()
    try:
        with torch.no_grad():
            levels = levels_for(x.device)
            (found,) = calibrate(layer, x, levels=levels, pairs=_PAIRS, limit_s=seconds)
            chosen, why = layer.choose(x)
    except NarrowgaugeError as error:
        raise NotApplicableError("the layer could not be calibrated", why=error.what) from error
    about: Dict[str, Any] = {"chosen": chosen, "why": why, **found.crossover.to_fact()}
    peers: List[Peer] = [Peer(SELECTED, lambda: layer(x), about)]
    missing: Dict[str, str] = {}
    for name, way in WAYS.items():
        told = _told(layer, way)
        peer = Peer(name, lambda told=told: told(x))
        try:
            with torch.no_grad():
                peer.call()
        except NarrowgaugeError as error:
            missing[name] = f"{error.what}: {error.why}" if error.why else error.what
            continue
        peers.append(peer)
    return tuple(peers), missing


def _told(layer: SparseConv2d, backend: str) -> SparseConv2d:
    """With that layer's weight and kernels."""
    told = copy.copy(layer)
    told.settings = dataclasses.replace(layer.settings, backend=backend)
    return told
