"""Tiles to begin with: the published ones, the ones that fit, and an estimate to order them by.

Published: `scnnOps.h` of the artefact of the PACT 2022 paper (see `shapes`), for its V100 and
RTX 2080 Ti, rows x columns x channels, batch 1.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Dict, Iterator, List, Set, Tuple

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.geometry import Geometry, derive
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

__all__ = ["NETWORKS", "PUBLISHED", "candidates", "default_tile", "estimate", "network_shapes"]

_Key = Tuple[int, int, int, int]

#: channels, height, width, filters -> V100, 2080 Ti by layers, 2080 Ti end to end.
PUBLISHED: Dict[_Key, Tuple[Tuple[int, int, int], ...]] = {
    (128, 56, 56, 32): ((4, 5, 8), (7, 7, 8), (7, 7, 8)),
    (128, 28, 28, 32): ((4, 7, 2), (7, 7, 2), (7, 7, 2)),
    (128, 14, 14, 32): ((2, 7, 4), (2, 7, 2), (3, 7, 4)),
    (128, 7, 7, 32): ((3, 7, 2), (2, 4, 2), (2, 7, 4)),
    (64, 56, 56, 64): ((2, 7, 16), (7, 7, 8), (4, 7, 8)),
    (128, 28, 28, 128): ((2, 7, 16), (7, 7, 8), (4, 7, 8)),
    (256, 14, 14, 256): ((2, 7, 8), (6, 7, 8), (2, 7, 16)),
    (512, 7, 7, 512): ((2, 7, 4), (7, 7, 8), (2, 7, 16)),
    (64, 224, 224, 64): ((2, 7, 16), (3, 7, 16)),
    (128, 112, 112, 128): ((2, 7, 16), (3, 7, 16)),
    (256, 56, 56, 256): ((2, 7, 16), (3, 7, 16)),
    (256, 28, 28, 512): ((2, 7, 16), (4, 4, 16)),
    (512, 28, 28, 512): ((2, 7, 16), (4, 7, 4)),
    (512, 14, 14, 512): ((2, 7, 16), (3, 7, 8)),
}

_DENSENET: Tuple[_Key, ...] = (
    (128, 56, 56, 32), (128, 28, 28, 32), (128, 14, 14, 32), (128, 7, 7, 32),
)  # fmt: skip
_RESNET: Tuple[_Key, ...] = (
    (64, 56, 56, 64), (128, 28, 28, 128), (256, 14, 14, 256), (512, 7, 7, 512),
)  # fmt: skip
_VGG: Tuple[_Key, ...] = (
    (64, 224, 224, 64), (64, 112, 112, 128), (128, 112, 112, 128), (128, 56, 56, 256),
    (256, 56, 56, 256), (256, 28, 28, 512), (512, 28, 28, 512), (512, 14, 14, 512),
)  # fmt: skip
#: The 3x3 convolutions behind a ReLU that differ, of 224x224 images. The ResNets' are those with
#: the stride on the 1x1, as Keras has them.
NETWORKS: Dict[str, Tuple[_Key, ...]] = {
    "densenet121": _DENSENET, "densenet169": _DENSENET, "densenet201": _DENSENET,
    "resnet50": _RESNET, "resnet101": _RESNET, "resnet152": _RESNET,
    "vgg16": _VGG, "vgg19": _VGG,
}  # fmt: skip

_ROWS, _COLUMNS = (1, 2, 3, 4, 6, 7, 8), (4, 5, 7, 8, 14)
_CHANNELS, _GROUPS, _FILTERS = (2, 4, 8, 16, 32, 64), (1, 2, 4, 8), (32, 64, 128)
_WIDES = (1, 2, 4)
_TC_ROWS, _TC_COLUMNS, _TC_CHANNELS = (2, 4, 8), (4, 8, 16), (32, 64, 128, 256, 512)
_TC_GROUPS, _TC_FILTERS = (1, 2), (16, 32, 64, 128)
_TD_ROWS, _TD_COLUMNS, _TD_CHANNELS = (1, 2, 4, 7, 8), (7, 8, 14, 16), (16, 32, 64, 128)
_TD_GROUPS, _TD_FILTERS = (1, 2, 4, 8), (16, 32, 64, 128)
#: Rows of larger tiles on tensor cores, at least as wide: a block reads its weights for more of the
#: outputs, and there are blocks enough only with several images.
_TC_TALL, _TD_TALL = 16, 14
#: Of the estimate: what an H200 has (multiprocessors, clock in GHz, bytes a second from the
#: second-level cache), the share that is kept, and rough costs in cycles. It orders, no more.
_SMS, _GHZ, _L2 = 132, 1.75, 5.0e12
_KEPT, _START, _ENTRY_LATENCY, _ENTRY_WORK, _JUMP_WORK = 0.35, 1500.0, 36.0, 12.0, 3.0
_LAUNCH_MICROSECONDS, _CLUSTER_MICROSECONDS = 1.0, 0.7


def network_shapes(name: str, batch: int) -> Tuple[Shape, ...]:
    """The shapes of a network that `NETWORKS` has. Raises SparseArgumentError for another."""
    if name not in NETWORKS:
        raise SparseArgumentError(
            f"no network '{name}'", next_step="one of " + ", ".join(sorted(NETWORKS))
        )
    return tuple(Shape(batch, c, h, w, n) for c, h, w, n in NETWORKS[name])


def candidates(shape: Shape, variant: Variant, arch: str, most: int = 32) -> List[Tile]:
    """Tiles that fit: the published ones first, then others, the best by `estimate` first.

    Raises SparseArgumentError, with the limit that the last one broke, where none fits.
    """
    first: List[Tuple[float, Tile]] = []
    others: List[Tuple[float, Tile]] = []
    refused = None
    published = set(PUBLISHED.get((shape.channels, shape.height, shape.width, shape.filters), ()))
    if variant.on_cores or (shape.kernel, shape.stride) != (3, 1):
        published = set()
    for tile in _all(shape, variant, published):
        try:
            cost = estimate(shape, tile, variant, derive(shape, tile, variant, arch))
        except SparseArgumentError as error:
            refused = error
            continue
        is_published = (tile.rows, tile.columns, tile.channels) in published and tile.groups == 1
        (first if is_published and tile.filters == 0 else others).append((cost, tile))
    if not first and not others:
        raise refused or SparseArgumentError(f"{shape.text()} cannot be tiled")
    found = [tile for _, tile in sorted(first, key=lambda pair: pair[0])]
    found += [tile for _, tile in sorted(others, key=lambda pair: pair[0])]
    return found[:most]


def default_tile(shape: Shape, variant: Variant, arch: str) -> Tile:
    """The tile that fits and that the estimate likes best. Raises as `candidates`."""
    every = candidates(shape, variant, arch, most=1 << 16)
    return min(
        every, key=lambda tile: estimate(shape, tile, variant, derive(shape, tile, variant, arch))
    )


def estimate(shape: Shape, tile: Tile, variant: Variant, made: Geometry) -> float:
    """Microseconds, roughly, on an H200 at batch-1 sizes: to order tiles before they are timed.

    The slower of issuing and of waiting for each list's entries one by one, in waves of blocks;
    plus weights, which each block reads, plus partial sums. Without lists nothing waits.
    """
    taps = shape.kernel**2
    registers = (tile.rows * tile.columns + 2 * taps) * tile.wide + 40
    resident = max(1, min(65536 // (made.threads * registers), 2048 // made.threads,
                          232448 // (made.shared_bytes + 1024)))  # fmt: skip
    blocks = made.cells * made.slices
    waves = -(-blocks // (_SMS * resident))
    own = made.slice_channels / (1 if variant.on_cores else tile.groups)
    if variant.dense_on_cores:
        cycles = _dense_cycles(tile, made, taps, min(resident, -(-blocks // _SMS)))
    elif variant.on_cores:
        steps = own * taps / 16 * 0.7 * tile.groups
        warps = made.threads / 32 * min(resident, -(-blocks // _SMS))
        products = made.block_filters / 16
        cycles = max(steps * (30 + 8 * products), steps * (8 + 4 * products) * warps / 4)
        cycles += made.slice_channels / 32 * (600 + taps * made.block_filters * 32 / made.threads)
    else:
        warps = made.threads / 32 * min(resident, -(-blocks // _SMS))
        if not variant.has_lists:
            cycles = own * _window_work(tile, variant, made, taps) * max(warps / 4, 1.0)
        else:
            cycles = own * _list_cycles(shape, tile, made, taps, warps)
    size = 2 if variant.precision == "fp16" else 4
    read = blocks * made.slice_channels * taps * made.block_filters * size
    partial = 0.0
    if made.slices > 1:
        written = made.cells * made.cell_floats * made.slices * 4
        # One block reads the partial sums of its cell; a launch of its own, all blocks together.
        alone = made.cell_floats * made.slices * 4 / 1.0e5
        if variant.accumulation == "atomic":
            alone = made.cell_floats * 4 / 1.0e5
        launched = tile.finish == "launch" and variant.accumulation == "deterministic"
        partial = written / 2.5e6 + (_LAUNCH_MICROSECONDS * 2 if launched else alone)
        if tile.finish == "cluster":
            partial = _CLUSTER_MICROSECONDS
    return waves * (_START + cycles) / (_GHZ * 1e3) + read / _L2 * 1e6 + partial


def _dense_cycles(tile: Tile, made: Geometry, taps: int, resident: int) -> float:
    """Of the dense kernel on tensor cores: products, and what comes into shared memory."""
    warps = made.threads // 32
    eights = -(-tile.rows * tile.columns // 8)
    products = made.block_filters / 16 * -(-eights // (warps // tile.groups))
    steps = taps * made.slice_channels / 16 / tile.groups
    loaded = made.shared_bytes * resident / 40  # bytes a cycle into one multiprocessor
    return max(steps * (40 + 8 * products), steps * 8 * products * warps * resident / 4) + loaded


def _list_cycles(shape: Shape, tile: Tile, made: Geometry, taps: int, warps: float) -> float:
    """Of one channel's list."""
    places = made.window_rows * made.window_columns
    entries = places * _KEPT / shape.stride**2
    products = taps * tile.rows * tile.columns * tile.wide
    work = _ENTRY_WORK + products * shape.stride**2 / places
    return max(entries * (_ENTRY_LATENCY + work / 2), entries * work * warps / 4)


def _window_work(tile: Tile, variant: Variant, made: Geometry, taps: int) -> float:
    """Instructions of one channel's window: products, loads of values and weights, and jumps, which
    compilers make over the products of several filters alone."""
    places = made.window_rows * made.window_columns
    products = taps * tile.rows * tile.columns * tile.wide
    loads = places / 4 + 2 * taps * tile.wide + 10
    if variant.path == "dense":
        return products + loads
    if tile.wide == 1:
        return products + places + loads
    return products * _KEPT + _JUMP_WORK * places + loads


def _all(shape: Shape, variant: Variant, published: Set[Tuple[int, int, int]]) -> Iterator[Tile]:
    for rows, columns, channels in sorted(published):
        yield Tile(rows, columns, channels)
    step = 16 if variant.on_cores else 32
    if variant.dense_on_cores:
        sizes = _TD_ROWS, _TD_COLUMNS, _TD_CHANNELS, _TD_FILTERS, _TD_GROUPS
    elif variant.on_cores:
        sizes = _TC_ROWS, _TC_COLUMNS, _TC_CHANNELS, _TC_FILTERS, _TC_GROUPS
    else:
        sizes = _ROWS, _COLUMNS, _CHANNELS, _FILTERS, _GROUPS
    tall = _TD_TALL if variant.dense_on_cores else _TC_TALL
    heights = (*sizes[0], tall) if variant.on_cores and shape.batch > 1 else sizes[0]
    down, across = _within(heights, shape.out_height), _within(sizes[1], shape.out_width)
    for rows, columns, channels, filters, groups in itertools.product(down, across, *sizes[2:]):
        if variant.on_cores and columns < rows == tall:
            continue
        if channels >= 2 * max(shape.channels, 32) or filters >= shape.filters + step:
            continue
        if not variant.on_cores and groups > channels:
            continue
        wides = _WIDES if not variant.on_cores else (1,)
        for wide in wides:
            if filters % (wide * 32) and wide > 1:
                continue
            tile = Tile(rows, columns, channels, filters, groups, wide=wide)
            yield tile
            if channels < shape.channels and variant.accumulation == "deterministic":
                yield dataclasses.replace(tile, finish="launch")
                yield dataclasses.replace(tile, finish="cluster")


def _within(sizes: Tuple[int, ...], outputs: int) -> Tuple[int, ...]:
    """Those that outputs fill by more than half, and the smallest in any case."""
    return tuple(size for size in sizes if size == min(sizes) or size < 2 * outputs)
