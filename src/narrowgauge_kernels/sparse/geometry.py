"""Sizes that follow from a shape, a tile and a variant."""

from __future__ import annotations

import dataclasses

from narrowgauge_kernels.sparse.limits import (
    CHUNK,
    PRODUCT_FILTERS,
    WARP,
    check,
    shared_bytes,
    untiled,
    value_row,
)
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

__all__ = ["Geometry", "derive"]

#: Pixels of a tensor-core group.
_PIXEL_ROWS, _PIXEL_COLUMNS = 2, 4
#: Floats behind a row of sums by filters, which spread banks.
_PAD = 4
#: Warps of a block of the dense kernel on tensor cores, if its tile has outputs for all.
_DENSE_WARPS = 8
#: Room in which the sums of a block's groups are added, in rounds; more where shared memory is
#: large: each round waits twice for all.
_ROUND_BYTES, _LARGE_ROUND_BYTES, _LARGE_SHARED = 16384, 65536, 160000
_ENTRY_BYTES = 8


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


def derive(shape: Shape, tile: Tile, variant: Variant, arch: str) -> Geometry:
    """The geometry, if it keeps every limit. Raises SparseArgumentError naming the one it breaks.

    arch is a compute capability such as `9.0`.
    """
    reach = (tile.rows - 1) * shape.stride + shape.kernel
    across = (tile.columns - 1) * shape.stride + shape.kernel
    if not variant.on_cores:
        room = _ROUND_BYTES if shared_bytes(arch) < _LARGE_SHARED else _LARGE_ROUND_BYTES
        geometry = _by_element(shape, tile, variant, reach, across, room)
    elif variant.dense_on_cores:
        geometry = _tensor_dense(shape, tile, variant, reach, across)
    else:
        geometry = _tensor_core(shape, tile, variant, reach, across)
    check(shape, tile, variant, geometry, arch)
    return geometry


def _by_element(
    shape: Shape, tile: Tile, variant: Variant, reach: int, across: int, room: int
) -> Geometry:
    filters = tile.filters or min(128, _up(shape.filters, WARP))
    if filters % (WARP * tile.wide):
        many = WARP * tile.wide
        raise untiled(shape, tile, f"a block's {filters} filters are not a multiple of {many}")
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
        raise untiled(shape, tile, "tensor cores take tiles of whole groups of 2 x 4 pixels")
    filters = tile.filters or min(64, _up(shape.filters, PRODUCT_FILTERS))
    if filters % PRODUCT_FILTERS:
        raise untiled(shape, tile, f"a block's {filters} filters are not a multiple of 16")
    if tile.channels % CHUNK:
        raise untiled(shape, tile, f"tensor cores take channels by {CHUNK}")
    pixel_groups = tile.rows // _PIXEL_ROWS * (tile.columns // _PIXEL_COLUMNS)
    if pixel_groups % tile.groups:
        raise untiled(
            shape, tile, f"{pixel_groups} groups of pixels are not {tile.groups} for each warp"
        )
    warps = pixel_groups // tile.groups
    size = 2 if variant.precision == "fp16" else 4
    depth = shape.kernel**2 * CHUNK
    weights = (depth + 1) * (filters + 8) * size
    values = _up(reach * across * value_row(variant) * size, 4)
    shared = weights + values + 4 * reach * across + 4 * warps * (depth + PRODUCT_FILTERS)
    return _assembled(
        shape, tile, variant, reach, across, filters, warps * WARP,
        min(tile.channels, _up(shape.channels, CHUNK)), _up(shared, 16), value_bytes=values,
    )  # fmt: skip


def _tensor_dense(shape: Shape, tile: Tile, variant: Variant, reach: int, across: int) -> Geometry:
    filters = tile.filters or min(64, _up(shape.filters, PRODUCT_FILTERS))
    if filters % PRODUCT_FILTERS:
        raise untiled(shape, tile, f"a block's {filters} filters are not a multiple of 16")
    if tile.channels % PRODUCT_FILTERS:
        raise untiled(shape, tile, "tensor cores take channels by 16")
    if _DENSE_WARPS % tile.groups:
        raise untiled(shape, tile, f"{_DENSE_WARPS} warps do not make {tile.groups} groups")
    eights = -(-tile.rows * tile.columns // 8)
    warps = tile.groups * min(_DENSE_WARPS // tile.groups, eights)
    channels = min(tile.channels, _up(shape.channels, PRODUCT_FILTERS))
    held = 2 * (shape.kernel**2 * channels * (filters + 8) + reach * across * (channels + 8))
    added = 4 * tile.groups * eights * 8 * (filters + _PAD)
    return _assembled(
        shape, tile, variant, reach, across, filters, warps * WARP, channels,
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


def _up(value: int, step: int) -> int:
    return -(-value // step) * step
