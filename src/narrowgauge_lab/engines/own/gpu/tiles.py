"""Blockings of the implicit matrix product: which may suit a shape, before anything is measured."""

from __future__ import annotations

import dataclasses
from typing import List, Tuple

__all__ = ["MEAN", "MOVING", "Block", "ProductShape", "Tile", "candidates", "linear_tiles"]

#: Programs that a device runs side by side, about: more parts than fill it gain nothing.
_FULL = 264


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """[pixels, window · depth] × [window · depth, count], `width` bytes an element. `wide_math`:
    without tensor cores, for which large tiles take minutes to compile."""

    pixels: int
    count: int
    depth: int
    window: int
    width: int
    wide_math: bool = False


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's share: m output pixels, n output channels, k elements of the sum at a time, and
    one of `parts` of the whole sum."""

    m: int
    n: int
    k: int
    warps: int
    stages: int
    parts: int = 1

    def __str__(self) -> str:
        return f"{self.m}x{self.n}x{self.k}" + (f" in {self.parts}" if self.parts > 1 else "")


@dataclasses.dataclass(frozen=True)
class Block:
    """A program's share of what only moves data."""

    pixels: int
    channels: int

    def __str__(self) -> str:
        return f"{self.pixels}x{self.channels}"


MOVING = (Block(32, 64), Block(64, 32), Block(16, 128), Block(8, 64), Block(128, 64))
#: Of a mean over all pixels: so many of them at a time.
MEAN = (Block(64, 16), Block(64, 32), Block(64, 64), Block(64, 128), Block(16, 128))


#: (m, n, warps, stages, bytes of k), in the order in which they won on an H200: in 1,000 layers of
#: 16 networks in fp16. A search may have no time for the last. From 64 pixels on Hopper's wide
#: instructions are used.
_LARGE = (
    (128, 128, 8, 4, 128), (256, 128, 8, 3, 128), (128, 64, 4, 4, 128), (128, 256, 8, 3, 128),
    (64, 128, 4, 4, 128), (64, 64, 4, 5, 128), (128, 32, 4, 4, 128), (64, 256, 8, 3, 128),
    (256, 64, 8, 3, 128), (64, 32, 4, 5, 128),
)  # fmt: skip
_SMALL = (
    (32, 32, 4, 5, 128), (16, 32, 2, 5, 256), (64, 32, 4, 5, 128), (16, 64, 4, 4, 256),
    (64, 64, 4, 3, 256), (64, 64, 4, 5, 128), (32, 64, 4, 4, 256), (16, 64, 4, 5, 128),
    (32, 64, 4, 5, 128), (64, 32, 4, 4, 256), (16, 128, 4, 4, 128),
)  # fmt: skip
_SCALAR = ((64, 64, 8, 3, 64), (32, 32, 4, 3, 128), (16, 32, 4, 3, 128))
#: Up to this many pixels a layer is one of a few images.
_FEW = 4096


def candidates(shape: ProductShape) -> Tuple[Tile, ...]:
    """Tiles that do not waste most of their work on a shape; never none."""
    blocks = _SMALL if shape.pixels <= _FEW else _LARGE
    if shape.wide_math:
        blocks = _SCALAR
    tallest, widest = _power(max(16, shape.pixels)), _power(max(32, shape.count))
    found: List[Tile] = []
    for m, n, warps, stages, k_bytes in blocks:
        if m > tallest or n > widest:
            continue
        k = _divisor(shape.depth, k_bytes // shape.width)
        tile = Tile(m, n, k, warps, stages)
        found += [dataclasses.replace(tile, parts=parts) for parts in _parts(shape, tile)]
    if not found:
        found = [Tile(16, 32, _divisor(shape.depth, 64 // shape.width), 4, 3)]
    return tuple(dict.fromkeys(found))


def _parts(shape: ProductShape, tile: Tile) -> List[int]:
    """Into how many parts the sum may be worth dividing: while programs are fewer than the device
    takes, and each part still has two steps."""
    programs = -(-shape.pixels // tile.m) * -(-shape.count // tile.n)
    steps = shape.window * shape.depth // tile.k
    found, parts = [1], 2
    while parts <= 16 and programs * parts <= 2 * _FULL and steps >= 2 * parts:
        found.append(parts)
        parts *= 2
    # The smallest ones leave most of the device idle.
    return found if programs >= 16 else found[1:] or found


def linear_tiles() -> Tuple[Tile, ...]:
    """Of `linear_kernel`: n outputs a program, k of their weights at a time."""
    return (
        Tile(1, 4, 1024, 4, 1), Tile(1, 8, 512, 4, 1), Tile(1, 16, 256, 4, 1),
        Tile(1, 8, 1024, 8, 1), Tile(1, 2, 2048, 4, 1), Tile(1, 1, 4096, 4, 1),
    )  # fmt: skip


def _divisor(depth: int, most: int) -> int:
    """The largest power of two up to `most` that divides `depth`."""
    return min(most, depth & -depth)


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
