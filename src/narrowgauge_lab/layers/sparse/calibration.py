"""From which fraction of zeros on skipping them is faster: measured, where a layer runs."""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError
from narrowgauge_lab.layers.sparse import backends
from narrowgauge_lab.layers.sparse.modules import SparseConv2d
from narrowgauge_lab.layers.sparse.settings import Crossover, Key, Point, key_of
from narrowgauge_lab.measure import Comparison, TimingPlan, interleave, with_hidden_launches

__all__ = ["LEVELS", "Calibrated", "calibrate", "crossing", "levels_for", "map_with_zeros"]

#: Fractions of zeros that are measured beside that of the layer's own map.
LEVELS = (0.0, 0.3, 0.5, 0.7, 0.9, 0.99)
#: Where a layer chooses by its own map, and by no fraction.
_LEVELS_GPU = (0.5, 0.9)


@dataclasses.dataclass(frozen=True)
class Calibrated:
    """One layer and what was found for it; `shared_with`: the layer of the same problem that was
    measured in its place, or empty. `switch`: the crossover of the two kernels of a layer that is
    `switched`."""

    name: str
    crossover: Crossover
    shared_with: str = ""
    switch: Optional[Crossover] = None


@dataclasses.dataclass(frozen=True)
class _Work:
    """What is measured of every layer, and how."""

    levels: Tuple[float, ...]
    plan: TimingPlan
    pairs: int


#: The two that take turns.
_Sides = Tuple[Callable[[torch.Tensor], Any], Callable[[torch.Tensor], Any]]


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
    these fractions of zeros and on the layer's own map. Layers of one problem are measured once,
    but for their own maps on CUDA, by which they choose there. Of a layer whose backend is
    `switched`, its two kernels are measured likewise. Raises UsageError where the model runs no
    such layer, and for levels outside of 0 to 1.
    """
    if not levels or not all(0 <= level <= 1 for level in levels):
        raise UsageError(f"levels={tuple(levels)}: fractions of zeros lie between 0 and 1")
    maps = _maps(model, example)
    plan = TimingPlan(limit_s=limit_s, warm_up_limit_s=limit_s)
    work = _Work(tuple(sorted(set(levels))), plan, pairs)
    measured: Dict[Any, Calibrated] = {}
    found = []
    for name, module, x in maps:
        problem = _problem(module, x)
        if problem not in measured:
            measured[problem] = _calibrated(name, module, x, work)
        first = measured[problem]
        crossover, switch = first.crossover, first.switch
        if first.name != name:
            crossover = _own(crossover, _sides(module), module, x, work)
            switch = switch and _own(switch, _kernels(module), module, x, work)
        module.crossovers[key_of(x)] = crossover
        if switch is not None:
            module.switches[key_of(x)] = switch
        found.append(Calibrated(name, crossover, "" if first.name == name else first.name, switch))
    return tuple(found)


def levels_for(device: torch.device) -> Tuple[float, ...]:
    """The fractions that are worth measuring there: on CUDA a layer chooses by its own map."""
    return LEVELS if device.type == "cpu" else _LEVELS_GPU


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
    window = (module.weight.shape, module.stride, module.padding, module.bias is None)
    return (key, window, module.settings)


def _sides(module: SparseConv2d) -> _Sides:
    return lambda x: module.by("sparse", x), lambda x: module.by("dense", x)


def _kernels(module: SparseConv2d) -> _Sides:
    """The two of `switched`, both with the count: every map has more zeros than none, and hardly
    one has them all."""
    call, prepared = module.call(), module.prepared
    return (
        lambda x: backends.sparse(call, x, prepared, 0.0),
        lambda x: backends.sparse(call, x, prepared, 1.0),
    )


def _calibrated(name: str, module: SparseConv2d, x: torch.Tensor, work: _Work) -> Calibrated:
    crossover = _measured(_sides(module), module, x, work)
    switch = None
    if module.settings.backend == "switched":
        switch = _measured(_kernels(module), module, x, work)
    return Calibrated(name, crossover, "", switch)


def _measured(sides: _Sides, module: SparseConv2d, x: torch.Tensor, work: _Work) -> Crossover:
    own = backends.zero_fraction(x, module.settings.relu_input)
    points = tuple(
        _point(sides, level, map_with_zeros(x.shape, level, x), work) for level in work.levels
    )
    device, dtype, shape = key_of(x)[:3]
    return Crossover(
        zeros=crossing(points), own_zeros=own, shape=shape, device=device, dtype=dtype,
        points=points, own_point=_point(sides, own, x, work),
    )  # fmt: skip


def _own(
    crossover: Crossover, sides: _Sides, module: SparseConv2d, x: torch.Tensor, work: _Work
) -> Crossover:
    """Another layer's, with this one's map: measured where the choice is by that."""
    own = backends.zero_fraction(x, module.settings.relu_input)
    point = crossover.own_point if x.device.type == "cpu" else _point(sides, own, x, work)
    return dataclasses.replace(crossover, own_zeros=own, own_point=point)


def _point(sides: _Sides, zeros: float, x: torch.Tensor, work: _Work) -> Point:
    first, second = sides

    def take(plan: TimingPlan) -> Comparison:
        return interleave(lambda: first(x), lambda: second(x), x.device, plan, work.pairs)

    with torch.no_grad():
        timed = with_hidden_launches(take, x.device, work.plan)
    return Point(zeros, timed.first.seconds, timed.second.seconds)
