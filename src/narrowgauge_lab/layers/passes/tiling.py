"""Blockings of the 8-bit products, and which of them runs: by measuring them on the device."""

from __future__ import annotations

import dataclasses
import statistics
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Callable, Dict, List, Sequence, Tuple

import torch

from narrowgauge_lab import torch_compat

__all__ = [
    "BLOCK_K",
    "FULL",
    "TILES",
    "Tile",
    "depth_block",
    "fastest",
    "parts",
    "settled",
    "settled_tiles",
    "tiles",
]

#: Elements that a program sums over at a time: 128 bytes, a row of shared memory. It is the same
#: for all tiles, so that fp8 sums come out the same by whichever tile.
BLOCK_K = 128
#: Programs that use a large GPU well enough for a tile to be worth a try.
FULL = 66
#: What one processor of an H200 multiplies in 8 bits and what its memory moves, about, in FLOP/s
#: and B/s; only in how many parts a sum is divided depends on them.
_MULTIPLIED, _MOVED, _PROCESSORS = 6e12, 3e12, 132
#: A sum in more parts takes longer to put together than it gains.
_MOST_PARTS = 16
_LOOKS, _LAUNCHES = 5, 3


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's share of the result, and the resources that it takes."""

    m: int
    n: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.m}x{self.n} by {self.warps} warps in {self.stages} stages"


#: The first that suits is taken where nothing may be measured.
TILES = (
    Tile(128, 128, 8, 4), Tile(128, 256, 8, 3), Tile(128, 128, 4, 4), Tile(256, 128, 8, 3),
    Tile(64, 256, 8, 3), Tile(128, 64, 4, 4), Tile(64, 128, 4, 4), Tile(64, 64, 4, 4),
    Tile(64, 32, 4, 4), Tile(32, 64, 4, 4), Tile(32, 32, 4, 4),
)  # fmt: skip
_OFFERED = 7

_chosen: Dict[Tuple[object, ...], Tile] = {}
_lock = threading.Lock()


def depth_block(channels: int) -> int:
    """Elements summed over at a time where there are `channels` of them in a row."""
    return min(BLOCK_K, max(32, _power(channels)))


def tiles(rows: int, columns: int, *, divided: bool = False) -> Tuple[Tile, ...]:
    """Those that do not waste most of their work on a result of that size, large ones first as far
    as they fill the device; never none. `divided`: the sum is, so a few large ones fill it too."""
    tallest, widest = max(32, _power(rows)), max(32, _power(columns))
    # From 64 rows on Hopper's wide instructions are used, which sum fp8 otherwise than the others:
    # the two are never offered for one problem.
    fitting = [
        each for each in TILES
        if each.m <= tallest and each.n <= widest and (each.m >= 64 or tallest < 64)
    ]  # fmt: skip
    filling = [each for each in fitting if divided or _programs(each, rows, columns) >= FULL]
    if filling:
        return tuple(filling[:_OFFERED])
    return tuple(sorted(fitting, key=lambda each: -_programs(each, rows, columns))[:3])


def parts(tile: Tile, rows: int, columns: int, groups: int, blocks: int, least: int) -> int:
    """In how many parts, `least` or more, to sum `blocks` of BLOCK_K for a result of that size a
    group: rounds of programs that leave processors idle, against sums to be put together."""
    programs = _programs(tile, rows, columns) * groups
    whole = 2.0 * tile.m * tile.n * BLOCK_K * blocks / _MULTIPLIED

    def seconds(count: int) -> float:
        rounds = -(-programs * count // _PROCESSORS)
        together = 8.0 * rows * columns * groups * count / _MOVED
        return rounds / count * whole + together

    return min(range(least, max(least, min(_MOST_PARTS, blocks)) + 1), key=seconds)


def _programs(tile: Tile, rows: int, columns: int) -> int:
    return -(-rows // tile.m) * -(-columns // tile.n)


def settled(
    key: Tuple[object, ...],
    offered: Sequence[Tile],
    start: Callable[[Tile], None],
    device: torch.device,
    unfit: type,
) -> Tile:
    """The tile that runs a problem, measured when it is first met; `start` queues the work.

    Not while a CUDA graph is being captured, where the first is taken and nothing is kept. `unfit`:
    what is raised by a tile that the device lacks resources for.
    """
    known = _chosen.get(key)
    if known is not None:
        return known
    if device.type != "cuda" or len(offered) == 1 or torch_compat.capturing():
        return offered[0]
    with _lock:
        if key not in _chosen:
            _chosen[key] = fastest(offered, start, unfit)
        return _chosen[key]


def settled_tiles() -> Dict[Tuple[object, ...], Tile]:
    """What has been chosen in this process, by problem."""
    return dict(_chosen)


def fastest(offered: Sequence[Tile], start: Callable[[Tile], None], unfit: type) -> Tile:
    """By measuring them in turns, on the current stream, which has to be free to wait for."""
    times: Dict[Tile, List[float]] = {tile: [] for tile in _compiled(offered, start, unfit)}
    if not times:
        raise RuntimeError(f"none of {[str(each) for each in offered]} fits this device")
    for _ in range(_LOOKS):  # in turns, so that a drift of the clock is nobody's
        for tile, taken in times.items():
            taken.append(_milliseconds(start, tile))
    return min(times, key=lambda tile: statistics.median(times[tile]))


def _compiled(
    offered: Sequence[Tile], start: Callable[[Tile], None], unfit: type
) -> Sequence[Tile]:
    """Those that the device has the resources for, run once; compilers run side by side."""
    stream = torch.cuda.current_stream()

    def fits(tile: Tile) -> bool:
        # A thread has a device and a stream of its own.
        with torch.cuda.stream(stream):
            try:
                start(tile)
            except unfit:  # type: ignore[misc]
                return False
        return True

    with ThreadPoolExecutor(len(offered)) as pool:
        usable = list(pool.map(fits, offered))
    return [tile for tile, fitting in zip(offered, usable) if fitting]


def _milliseconds(start: Callable[[Tile], None], tile: Tile) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(_LAUNCHES):
        start(tile)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end))


def _power(size: int) -> int:
    """`size` rounded up to a power of two."""
    return 1 << (max(size, 1) - 1).bit_length()
