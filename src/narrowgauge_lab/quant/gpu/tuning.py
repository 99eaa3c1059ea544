"""Settling each product's tile by measuring the candidates, where they will run."""

from __future__ import annotations

import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Dict, Iterator, List, Sequence, Tuple

import torch

from narrowgauge_lab.quant.gpu.launches import ConvLaunch
from narrowgauge_lab.quant.gpu.tiles import Tile, candidates

__all__ = ["tune"]

_LAUNCHES = 4
_REPLAYS = 5
_COMPILERS = 16


def tune(products: Sequence[ConvLaunch], settled: Dict[Tuple[Any, ...], Tile]) -> None:
    """Give every product its fastest tile. Equal products share one measurement in `settled`.

    Everything must have run once, so that the buffers hold what they will hold. A tile that the
    device has not the shared memory or registers for is left out.
    """
    fresh = {p.key: p for p in products if p.key not in settled}
    usable = _compile(list(fresh.values()))
    for key, product in fresh.items():
        timed = [(_seconds(product, tile), place, tile) for place, tile in enumerate(usable[key])]
        settled[key] = min(timed)[2]
    for product in products:
        product.tile = settled[product.key]


def _compile(products: Sequence[ConvLaunch]) -> Dict[Tuple[Any, ...], List[Tile]]:
    """Start each candidate once; those that start. Compilers run side by side where triton can."""
    usable: Dict[Tuple[Any, ...], List[Tile]] = {}
    with ThreadPoolExecutor(_COMPILERS) as pool:
        list(pool.map(lambda pair: _starts(*pair), _pairs(products)))
    for product, tile in _pairs(products):
        if _starts(product, tile):
            usable.setdefault(product.key, []).append(tile)
    return usable


def _pairs(products: Sequence[ConvLaunch]) -> Iterator[Tuple[ConvLaunch, Tile]]:
    for product in products:
        for tile in candidates(product.shape):
            yield product, tile


def _starts(product: ConvLaunch, tile: Tile) -> bool:
    from triton.runtime.errors import OutOfResources

    try:
        product.start(tile)
    except OutOfResources:
        return False
    return True


def _seconds(product: ConvLaunch, tile: Tile) -> float:
    """The median over replays of a graph of a few launches: no launch latency in it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(_LAUNCHES):
            product.start(tile)
    graph.replay()
    times = []
    for _ in range(_REPLAYS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return statistics.median(times)
