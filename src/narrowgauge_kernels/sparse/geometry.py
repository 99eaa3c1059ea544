"""Sizes that follow from a shape, a tile and a variant, and the limits they must keep."""

from __future__ import annotations

import dataclasses
from typing import Dict

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.shapes import ELEMENT, TENSOR_CORE, Shape, Tile, Variant

__all__ = ["CHUNK", "Geometry", "capability", "derive"]

#: Channels whose weights and values a tensor-core block holds at a time: a mask's bits.
CHUNK = 32
#: A tensor-core product's filters and pixels.
_M, _PIXEL_ROWS, _PIXEL_COLUMNS = 16, 2, 4
#: Floats behind a row of sums by filters, which spread banks.
_PAD = 4
#: Warps of a block of the dense kernel on tensor cores, if its tile has outputs for all.
_DENSE_WARPS = 8
#: Blocks of a cluster that every device of 9.0 and later can have, and the capability's major.
_MOST_CLUSTERED, _CLUSTERS_SINCE = 8, 9
_WARP = 32
#: Shared memory of one block in bytes, opted in, by compute capability (CUDA C++ Programming
#: Guide, "Technical Specifications per Compute Capability"); 48 KiB, which all have, for others.
_SHARED_BYTES = {
    (7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912,
    (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (12, 0): 101376,
}  # fmt: skip
_SHARED_ANYWHERE = 49152
_MOST_THREADS = 1024
_REGISTERS = 65536
#: One byte holds a place of the window in the published format; a switch of more cases is as slow
#: as the branch it replaces.
_MOST_PLACES = 256
#: Of a thread's 255 registers, those for addresses and loops.
_OTHER_REGISTERS = 32
#: Room in which the sums of a block's groups are added, in rounds; more where shared memory is
#: large: each round waits twice for all.
_ROUND_BYTES, _LARGE_ROUND_BYTES, _LARGE_SHARED = 16384, 65536, 160000
_ENTRY_BYTES = 8
#: Shared memory that kernels declare themselves: the last block's flag.
_STATIC_BYTES = 64


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What generated code has as constants, and what a launch allocates.

    A window is the part of the map that a tile's outputs see; a hull is the window and what the
    tile owns of the map, so that the hulls of all tiles count each element once. A cell is one
    tile, one image and one block's filters; `slices` blocks work on it. `window_stride` is how far
    apart the windows of two channels lie where all their values are kept: they are read four at a
    time. `sums_at`: where in shared memory a block leaves its sums for the others of its cluster.
    """

    tiles_down: int
    tiles_across: int
    window_rows: int
    window_columns: int
    hull_top: int
    hull_rows: int
    hull_columns: int
    block_filters: int
    filter_blocks: int
    slices: int
    slice_channels: int
    window_stride: int
    threads: int
    round_places: int
    shared_bytes: int
    value_bytes: int
    sums_at: int
    cells: int
    cell_floats: int
    workspace_floats: int

    @property
    def tiles(self) -> int:
        """Of one image."""
        return self.tiles_down * self.tiles_across


def capability(arch: str) -> Dict[str, int]:
    """The numbers of a capability such as `9.0a`. Raises SparseArgumentError."""
    digits = arch.rstrip("af").partition(".")
    if not (digits[0].isdigit() and digits[2].isdigit()):
        raise SparseArgumentError(f"'{arch}' is not a compute capability", next_step="such as 8.0")
    return {"major": int(digits[0]), "minor": int(digits[2])}


def derive(shape: Shape, tile: Tile, variant: Variant, arch: str) -> Geometry:
    """The geometry, if it keeps every limit. Raises SparseArgumentError naming the one it breaks.

    arch is a compute capability such as `9.0`.
    """
    reach = (tile.rows - 1) * shape.stride + shape.kernel
    across = (tile.columns - 1) * shape.stride + shape.kernel
    if variant.granularity != TENSOR_CORE:
        room = _ROUND_BYTES if _shared_bytes(arch) < _LARGE_SHARED else _LARGE_ROUND_BYTES
        geometry = _by_element(shape, tile, variant, reach, across, room)
    elif variant.path == "dense":
        geometry = _tensor_dense(shape, tile, variant, reach, across)
    else:
        geometry = _tensor_core(shape, tile, variant, reach, across)
    _check(shape, tile, variant, geometry, arch)
    return geometry


def _shared_bytes(arch: str) -> int:
    found = capability(arch)
    return _SHARED_BYTES.get((found["major"], found["minor"]), _SHARED_ANYWHERE)


def _by_element(
    shape: Shape, tile: Tile, variant: Variant, reach: int, across: int, room: int
) -> Geometry:
    filters = tile.filters or min(128, _up(shape.filters, _WARP))
    if filters % (_WARP * tile.wide):
        many = _WARP * tile.wide
        raise _untiled(shape, tile, f"a block's {filters} filters are not a multiple of {many}")
    channels = min(tile.channels, shape.channels)
    places = tile.rows * tile.columns
    lists = channels * reach * across * _ENTRY_BYTES + 4 * channels
    windows = channels * _up(reach * across, 4) * 4
    held = {"window": windows, "dense": windows, "switched": max(lists, windows)}
    kept = held.get(variant.path, lists)
    per_place = tile.groups * filters * 4
    round_places = min(places, max(1, max(room, kept) // per_place))
    rounds = round_places * per_place if tile.groups > 1 else 0
    return _assembled(
        shape, tile, variant, reach, across, filters, tile.groups * filters // tile.wide,
        min(tile.channels, shape.channels), max(kept, rounds), round_places=round_places,
        sums_at=rounds,
    )  # fmt: skip


def _tensor_core(shape: Shape, tile: Tile, variant: Variant, reach: int, across: int) -> Geometry:
    if tile.rows % _PIXEL_ROWS or tile.columns % _PIXEL_COLUMNS:
        raise _untiled(shape, tile, "tensor cores take tiles of whole groups of 2 x 4 pixels")
    filters = tile.filters or min(64, _up(shape.filters, _M))
    if filters % _M:
        raise _untiled(shape, tile, f"a block's {filters} filters are not a multiple of 16")
    if tile.channels % CHUNK:
        raise _untiled(shape, tile, f"tensor cores take channels by {CHUNK}")
    pixel_groups = tile.rows // _PIXEL_ROWS * (tile.columns // _PIXEL_COLUMNS)
    if pixel_groups % tile.groups:
        raise _untiled(
            shape, tile, f"{pixel_groups} groups of pixels are not {tile.groups} for each warp"
        )
    warps = pixel_groups // tile.groups
    size = 2 if variant.precision == "fp16" else 4
    depth = shape.kernel**2 * CHUNK
    weights = (depth + 1) * (filters + 8) * size
    values = _up(reach * across * (CHUNK + 4 // size) * size, 4)
    shared = weights + values + 4 * reach * across + 4 * warps * (depth + _M)
    return _assembled(
        shape, tile, variant, reach, across, filters, warps * _WARP,
        min(tile.channels, _up(shape.channels, CHUNK)), _up(shared, 16), value_bytes=values,
    )  # fmt: skip


def _tensor_dense(shape: Shape, tile: Tile, variant: Variant, reach: int, across: int) -> Geometry:
    filters = tile.filters or min(64, _up(shape.filters, _M))
    if filters % _M:
        raise _untiled(shape, tile, f"a block's {filters} filters are not a multiple of 16")
    if tile.channels % _M:
        raise _untiled(shape, tile, "tensor cores take channels by 16")
    if _DENSE_WARPS % tile.groups:
        raise _untiled(shape, tile, f"{_DENSE_WARPS} warps do not make {tile.groups} groups")
    eights = -(-tile.rows * tile.columns // 8)
    warps = tile.groups * min(_DENSE_WARPS // tile.groups, eights)
    channels = min(tile.channels, _up(shape.channels, _M))
    held = 2 * (shape.kernel**2 * channels * (filters + 8) + reach * across * (channels + 8))
    added = 4 * tile.groups * eights * 8 * (filters + _PAD)
    return _assembled(
        shape, tile, variant, reach, across, filters, warps * _WARP, channels,
        max(held, added), sums_at=added,
    )  # fmt: skip


def _assembled(
    shape: Shape, tile: Tile, variant: Variant, reach: int, across: int, filters: int,
    threads: int, slice_channels: int, shared_bytes: int, *, round_places: int = 1,
    value_bytes: int = 0, sums_at: int = 0,
) -> Geometry:  # fmt: skip
    down = -(-shape.out_height // tile.rows)
    wide = -(-shape.out_width // tile.columns)
    filter_blocks = -(-shape.filters // filters)
    slices = -(-shape.channels // tile.channels)
    cells = shape.batch * down * wide * filter_blocks
    cell_floats = tile.rows * tile.columns * filters
    copies = slices if variant.accumulation == "deterministic" else 1
    if tile.finish == "cluster":
        copies = 0
        rows = tile.rows * tile.columns
        shared_bytes = max(shared_bytes, sums_at + 4 * rows * (filters + _PAD))
    top = min(-shape.padding, 0)
    # Behind the last tile there may be a border that no output sees.
    border = max(0, shape.kernel - 2 * shape.padding - 1)
    return Geometry(
        tiles_down=down,
        tiles_across=wide,
        window_rows=reach,
        window_columns=across,
        hull_top=top,
        hull_rows=max(reach - shape.padding, tile.rows * shape.stride + border) - top,
        hull_columns=max(across - shape.padding, tile.columns * shape.stride + border) - top,
        block_filters=filters,
        filter_blocks=filter_blocks,
        slices=slices,
        slice_channels=slice_channels,
        window_stride=_up(reach * across, 4),
        threads=threads,
        round_places=round_places,
        shared_bytes=shared_bytes,
        value_bytes=value_bytes,
        sums_at=sums_at,
        cells=cells,
        cell_floats=cell_floats,
        workspace_floats=0 if slices == 1 else cells * cell_floats * copies,
    )


def _check(shape: Shape, tile: Tile, variant: Variant, made: Geometry, arch: str) -> None:
    major = capability(arch)["major"]
    if variant.granularity == TENSOR_CORE and major < 8:
        raise SparseArgumentError(
            f"compute capability {arch} lacks the tensor-core products used here",
            why="mma.m16n8k16 of fp16 and m16n8k8 of tf32 came with 8.0",
            next_step="granularity element",
        )
    shared = _shared_bytes(arch)
    if made.shared_bytes + _STATIC_BYTES > shared:
        raise _untiled(
            shape, tile, f"{made.shared_bytes} bytes of shared memory, and {arch} has {shared}"
        )
    if variant.granularity == TENSOR_CORE and tile.wide > 1:
        raise _untiled(shape, tile, "on tensor cores a thread has no filters of its own")
    if tile.finish == "cluster":
        _check_cluster(shape, tile, variant, made, arch)
    if made.threads > _MOST_THREADS:
        raise _untiled(shape, tile, f"{made.threads} threads in a block, and 1024 are the most")
    registers = _registers(shape, tile, variant, made)
    most = min(255, _REGISTERS // made.threads)
    if registers > most:
        raise _untiled(
            shape, tile, f"about {registers} registers a thread, and {made.threads} threads leave "
            f"{most} each",
        )  # fmt: skip
    places = made.window_rows * made.window_columns
    if made.value_bytes and places * (CHUNK + 2) >= 65536:
        raise _untiled(shape, tile, f"a window of {places} pixels, and 1927 are the most")
    if variant.granularity == ELEMENT and places > _MOST_PLACES:
        raise _untiled(shape, tile, f"a window of {places} places, and {_MOST_PLACES} are the most")
    if made.slices > 65535:
        raise _untiled(shape, tile, f"{made.slices} slices of channels, and 65535 are the most")
    lists = shape.batch * shape.channels * made.tiles
    if variant.has_producer and lists >= 2**31:
        raise _untiled(shape, tile, f"{lists} lists, and 2147483647 are the most")
    if max(made.cells, made.workspace_floats) >= 2**31:
        raise _untiled(shape, tile, f"partial sums of {made.workspace_floats} floats")


def _check_cluster(shape: Shape, tile: Tile, variant: Variant, made: Geometry, arch: str) -> None:
    if capability(arch)["major"] < _CLUSTERS_SINCE:
        raise SparseArgumentError(
            f"compute capability {arch} has no clusters of blocks",
            why="they came with 9.0",
            next_step="finish tail or launch",
        )
    if variant.accumulation == "atomic":
        raise SparseArgumentError(
            "a cluster adds nothing atomically", next_step="finish tail, or deterministic"
        )
    if made.slices > _MOST_CLUSTERED:
        raise _untiled(
            shape, tile, f"{made.slices} slices of channels, and a cluster has {_MOST_CLUSTERED}"
        )


def _registers(shape: Shape, tile: Tile, variant: Variant, made: Geometry) -> int:
    matrices = made.block_filters // _M
    if variant.granularity == TENSOR_CORE and variant.path == "dense":
        eights = -(-tile.rows * tile.columns // 8)
        own = -(-eights // (made.threads // _WARP // tile.groups))
        return (_up(own, 2) + 1) * matrices * 4 + own // 2 + _OTHER_REGISTERS
    if variant.granularity == TENSOR_CORE:
        return tile.groups * matrices * 4 + _OTHER_REGISTERS + 8
    return (tile.rows * tile.columns + 2 * shape.kernel**2) * tile.wide + _OTHER_REGISTERS


def _untiled(shape: Shape, tile: Tile, why: str) -> SparseArgumentError:
    return SparseArgumentError(
        f"{shape.text()} cannot be tiled by {tile.text()}",
        why=why,
        next_step="a smaller tile, or `narrowgauge kernels tune` for one that fits",
    )


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
