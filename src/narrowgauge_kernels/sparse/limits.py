"""What a device allows a generated kernel: shared memory, threads, registers, 32-bit numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

if TYPE_CHECKING:
    from narrowgauge_kernels.sparse.geometry import Geometry

__all__ = [
    "CHUNK", "PRODUCT_FILTERS", "WARP", "capability", "check", "shared_bytes", "untiled",
    "value_row",
]  # fmt: skip

#: Channels whose weights and values a tensor-core block holds at a time: a mask's bits.
CHUNK = 32
#: A tensor-core product's filters.
PRODUCT_FILTERS = 16
WARP = 32
#: Shared memory of one block in bytes, opted in, by compute capability (CUDA C++ Programming
#: Guide, "Technical Specifications per Compute Capability"); 48 KiB, which all have, for others.
_SHARED_BYTES = {
    (7, 0): 98304, (7, 2): 98304, (7, 5): 65536, (8, 0): 166912, (8, 6): 101376, (8, 7): 166912,
    (8, 9): 101376, (9, 0): 232448, (10, 0): 232448, (12, 0): 101376,
}  # fmt: skip
_SHARED_ANYWHERE = 49152
#: Shared memory that kernels declare themselves: the last block's flag.
_STATIC_BYTES = 64
_MOST_THREADS, _REGISTERS = 1024, 65536
#: Of a thread's 255 registers, those for addresses and loops.
_OTHER_REGISTERS = 32
#: One byte holds a place of the window in the published format; a switch of more cases is as slow
#: as the branch it replaces.
_MOST_PLACES = 256
#: Blocks of a cluster that every device of 9.0 and later can have, and the capability's major.
_MOST_CLUSTERED, _CLUSTERS_SINCE = 8, 9


def capability(arch: str) -> Dict[str, int]:
    """The numbers of a capability such as `9.0a`. Raises SparseArgumentError."""
    digits = arch.rstrip("af").partition(".")
    if not (digits[0].isdigit() and digits[2].isdigit()):
        raise SparseArgumentError(f"'{arch}' is not a compute capability", next_step="such as 8.0")
    return {"major": int(digits[0]), "minor": int(digits[2])}


def shared_bytes(arch: str) -> int:
    """Of one block on such a device, at most. Raises SparseArgumentError."""
    found = capability(arch)
    return _SHARED_BYTES.get((found["major"], found["minor"]), _SHARED_ANYWHERE)


def check(shape: Shape, tile: Tile, variant: Variant, made: Geometry, arch: str) -> None:
    """Raise SparseArgumentError naming the first limit of the capability that is broken."""
    major = capability(arch)["major"]
    if variant.on_cores and major < 8:
        raise SparseArgumentError(
            f"compute capability {arch} lacks the tensor-core products used here",
            why="mma.m16n8k16 of fp16 and m16n8k8 of tf32 came with 8.0",
            next_step="granularity element",
        )
    shared = shared_bytes(arch)
    if made.shared_bytes + _STATIC_BYTES > shared:
        raise untiled(
            shape, tile, f"{made.shared_bytes} bytes of shared memory, and {arch} has {shared}"
        )
    if variant.on_cores and tile.wide > 1:
        raise untiled(shape, tile, "on tensor cores a thread has no filters of its own")
    if tile.finish == "cluster":
        _check_cluster(shape, tile, variant, made, arch)
    if made.threads > _MOST_THREADS:
        raise untiled(shape, tile, f"{made.threads} threads in a block, and 1024 are the most")
    registers = _registers(shape, tile, variant, made)
    most = min(255, _REGISTERS // made.threads)
    if registers > most:
        raise untiled(
            shape, tile, f"about {registers} registers a thread, and {made.threads} threads leave "
            f"{most} each",
        )  # fmt: skip
    places = made.window_rows * made.window_columns
    if variant.on_cores and variant.has_lists and places * value_row(variant) >= 65536:
        most = 65535 // value_row(variant)
        raise untiled(shape, tile, f"a window of {places} pixels, and {most} are the most")
    if not variant.on_cores and places > _MOST_PLACES:
        raise untiled(shape, tile, f"a window of {places} places, and {_MOST_PLACES} are the most")
    if made.slices > 65535:
        raise untiled(shape, tile, f"{made.slices} slices of channels, and 65535 are the most")
    lists = shape.batch * shape.channels * made.tiles
    if variant.has_producer and lists >= 2**31:
        raise untiled(shape, tile, f"{lists} lists, and 2147483647 are the most")
    if max(made.cells, made.workspace_floats) >= 2**31:
        raise untiled(shape, tile, f"partial sums of {made.workspace_floats} floats")


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
        raise untiled(
            shape, tile, f"{made.slices} slices of channels, and a cluster has {_MOST_CLUSTERED}"
        )


def _registers(shape: Shape, tile: Tile, variant: Variant, made: Geometry) -> int:
    matrices = made.block_filters // PRODUCT_FILTERS
    if variant.dense_on_cores:
        eights = -(-tile.rows * tile.columns // 8)
        own = -(-eights // (made.threads // WARP // tile.groups))
        return (own + own % 2 + 1) * matrices * 4 + own // 2 + _OTHER_REGISTERS
    if variant.on_cores:
        return tile.groups * matrices * 4 + _OTHER_REGISTERS + 8
    return (tile.rows * tile.columns + 2 * shape.kernel**2) * tile.wide + _OTHER_REGISTERS


def value_row(variant: Variant) -> int:
    """Elements from one pixel's chunk of channels to the next pixel's, where tensor cores take
    lists: the pad spreads banks, and in 16 bits leaves stores of eight bytes in step."""
    return CHUNK + (4 if variant.precision == "fp16" else 1)


def untiled(shape: Shape, tile: Tile, why: str) -> SparseArgumentError:
    """The error of a tile that a shape cannot have."""
    return SparseArgumentError(
        f"{shape.text()} cannot be tiled by {tile.text()}",
        why=why,
        next_step="a smaller tile, or `narrowgauge kernels tune` for one that fits",
    )
