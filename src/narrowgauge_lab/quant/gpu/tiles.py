"""Blockings of the implicit matrix product: which may suit a shape, before anything is measured."""

from __future__ import annotations

import dataclasses
from typing import Tuple

__all__ = ["ProductShape", "Tile", "candidates"]


@dataclasses.dataclass(frozen=True)
class ProductShape:
    """[pixels, window · depth] × [window · depth, count]."""

    pixels: int
    count: int
    depth: int
    window: int


@dataclasses.dataclass(frozen=True)
class Tile:
    """A program's share: m output pixels, n output channels, k elements of the sum at a time."""

    m: int
    n: int
    k: int
    warps: int
    stages: int


_TILES = (
    Tile(128, 128, 64, 8, 4),
    Tile(128, 128, 128, 8, 3),
    Tile(128, 64, 64, 4, 5),
    Tile(128, 64, 128, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 4),
    Tile(64, 128, 64, 4, 4),
    Tile(64, 128, 128, 4, 4),
    Tile(64, 256, 64, 8, 4),
    Tile(128, 256, 64, 8, 4),
    Tile(128, 256, 128, 8, 3),
    Tile(256, 64, 64, 8, 4),
    Tile(256, 128, 64, 8, 4),
)
_STEM = (Tile(128, 64, 32, 4, 5), Tile(256, 64, 32, 8, 4), Tile(64, 64, 32, 4, 6))


def candidates(shape: ProductShape) -> Tuple[Tile, ...]:
    """Tiles that do not waste most of their work on a shape; never none."""
    if shape.depth < 64:
        return _STEM
    widest = max(64, 1 << (shape.count - 1).bit_length())
    tallest = max(64, 1 << (shape.pixels - 1).bit_length())
    fitting = [
        tile
        for tile in _TILES
        if tile.n <= widest and tile.m <= tallest and shape.depth % tile.k == 0
    ]
    return tuple(fitting)
