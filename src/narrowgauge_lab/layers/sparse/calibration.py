"""From which fraction of zeros on skipping them is faster: measured, where a layer runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.layers.sparse import backends
from narrowgauge_lab.layers.sparse.modules import SparseConv2d
from narrowgauge_lab.layers.sparse.settings import Crossover, Key, Point, key_of
from narrowgauge_lab.measure import TimingPlan, interleave

__all__ = ["LEVELS", "Calibrated", "calibrate", "crossing", "map_with_zeros"]

#: Fractions of zeros that are measured beside that of the layer's own map.
LEVELS = (0.0, 0.3, 0.5, 0.7, 0.9, 0.99)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """One layer and what was found for it; `shared_with`: the layer of the same problem that was
    measured in its place, or empty."""

    name: str
    crossover: Crossover
    shared_with: str = ""


def calibrate(
    model: nn.Module,
    example: Any,
    *,
    levels: Sequence[float] = LEVELS,
    pairs: int = 5,
    limit_s: float = 1.0,
) -> Tuple[Calibrated, ...]:
    """Measure the crossover of every SparseConv2d that `model(example)` runs and that has a sparse
    kernel, and give it to the layer.

    Sparse and dense take turns, `pairs` times or `limit_s` seconds at a level, on random maps with
    these fractions of zeros and on the layer's own map. Layers of one problem are measured once.
    Raises UsageError where the model runs no such layer, and for levels outside of 0 to 1.
    """
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise UsageError(f"levels={tuple(levels)}: fractions of zeros lie between 0 and 1")
    maps = _maps(model, example)
    plan = TimingPlan(limit_s=limit_s, warm_up_limit_s=limit_s)
    measured: Dict[Any, Tuple[str, Crossover]] = {}
    found = []
    for name, module, x in maps:
        problem = _problem(module, x)
        if problem not in measured:
            measured[problem] = (name, _measured(module, x, levels, plan, pairs))
        first, crossover = measured[problem]
        own = backends.zero_fraction(x, module.settings.relu_input)
        crossover = dataclasses.replace(crossover, own_zeros=own)
        module.crossovers[key_of(x)] = crossover
        found.append(Calibrated(name, crossover, "" if first == name else first))
    return tuple(found)


def crossing(points: Sequence[Point]) -> float:
    """The fraction of zeros above which sparse is faster at every measured level.

    Between two levels log(dense / sparse), of medians, is taken to be linear. 0 where sparse is
    faster at all levels, infinity where it is slower at the last one.
    """
    ordered = sorted(points, key=lambda point: point.zeros)
    gains = [
        math.log(statistics.median(point.dense_s) / statistics.median(point.sparse_s))
        for point in ordered
    ]
    if gains[-1] < 0:
        return math.inf
    for index in range(len(gains) - 1, 0, -1):
        if gains[index - 1] < 0:
            low, high = ordered[index - 1].zeros, ordered[index].zeros
            share = -gains[index - 1] / (gains[index] - gains[index - 1])
            return low + share * (high - low)
    return 0.0


def map_with_zeros(shape: Sequence[int], zeros: float, like: torch.Tensor) -> torch.Tensor:
    """A map of `shape` with the device, dtype and strides' order of `like`: nonnegative, and
    exactly round(zeros · elements) of them zeros, at random places that depend on nothing else."""
    generator = torch.Generator().manual_seed(0)
    count = math.prod(shape) if hasattr(math, "prod") else int(torch.Size(shape).numel())
    flat = torch.rand(count, generator=generator) + 0.1
    flat[torch.randperm(count, generator=generator)[: round(zeros * count)]] = 0.0
    return torch.empty_like(like).copy_(flat.reshape(tuple(shape)))


def _maps(model: nn.Module, example: Any) -> List[Tuple[str, SparseConv2d, torch.Tensor]]:
    """The map of every layer that could skip zeros, of its first call."""
    layers = [(n, m) for n, m in model.named_modules() if isinstance(m, SparseConv2d)]
    kept: Dict[int, torch.Tensor] = {}

    def keep(module: Any, inputs: Tuple[Any, ...]) -> None:
        if not backends.lacking(module.call(), inputs[0], module.prepared):
            kept.setdefault(id(module), inputs[0].detach().clone())

    hooks = [module.register_forward_pre_hook(keep) for _, module in layers]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    if not kept:
        raise UsageError(
            "there is nothing to calibrate",
            why="the model ran no SparseConv2d with a sparse kernel for its device and dtype",
            next_step="convert the model first, and build the kernels for its device",
        )
    return [(name, module, kept[id(module)]) for name, module in layers if id(module) in kept]


def _problem(module: SparseConv2d, x: torch.Tensor) -> Tuple[Any, ...]:
    """What decides how long a layer takes."""
    key: Key = key_of(x)
    last = x.is_contiguous(memory_format=torch.channels_last)
    window = (module.weight.shape, module.stride, module.padding, module.bias is None)
    held = (module.settings.relu_input, module.settings.relu_output)
    return (key, last, window, held)


def _measured(
    module: SparseConv2d, x: torch.Tensor, levels: Sequence[float], plan: TimingPlan, pairs: int
) -> Crossover:
    own = backends.zero_fraction(x, module.settings.relu_input)
    synthetic = [(level, map_with_zeros(x.shape, level, x)) for level in sorted(set(levels))]
    points = tuple(_point(module, level, made, plan, pairs) for level, made in synthetic)
    device, dtype, shape = key_of(x)
    return Crossover(
        zeros=crossing(points), own_zeros=own, shape=shape, device=device, dtype=dtype,
        points=points, own_point=_point(module, own, x, plan, pairs),
    )  # fmt: skip


def _point(
    module: SparseConv2d, zeros: float, x: torch.Tensor, plan: TimingPlan, pairs: int
) -> Point:
    plan = dataclasses.replace(plan, hide_launches=x.is_cuda)
    with torch.no_grad():
        timed = interleave(
            lambda: module.by("sparse", x), lambda: module.by("dense", x), x.device, plan, pairs
        )
    return Point(zeros, timed.first.seconds, timed.second.seconds)
