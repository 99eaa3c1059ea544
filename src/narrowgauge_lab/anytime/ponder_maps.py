"""Pictures of where a network thought for how long: images beside heat maps, as PNG.

The lab has no library for pictures, and a PNG of plain rows is one zlib stream.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path
from typing import Sequence

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["heat", "ponder_map", "sheet", "write_png"]

#: From little to much: dark blue, violet, orange, pale yellow; lightness rises, so it can be read
#: without colours as well.
_STOPS = np.array([[10, 10, 60], [110, 20, 130], [235, 110, 40], [255, 250, 190]], dtype=np.float64)
_GAP = 2


def ponder_map(ponder: Sequence[torch.Tensor], size: int) -> torch.Tensor:
    """Σ over blocks of ρ [B, 1, h, w], each brought to size × size by repeating: float [B, size,
    size]."""
    parts = [F.interpolate(each.float(), size=(size, size), mode="nearest") for each in ponder]
    return torch.stack(parts).sum(0)[:, 0]


def heat(values: np.ndarray, low: float, high: float) -> np.ndarray:
    """Colours uint8 [..., 3] of values; `low` and what is below is darkest, `high` lightest."""
    span = high - low
    part = np.clip((values - low) / span if span > 0 else np.zeros_like(values), 0.0, 1.0)
    where = part * (len(_STOPS) - 1)
    index = np.minimum(where.astype(np.int64), len(_STOPS) - 2)
    rest = (where - index)[..., None]
    mixed = _STOPS[index] * (1 - rest) + _STOPS[index + 1] * rest
    return np.asarray(mixed.round(), dtype=np.uint8)


def sheet(images: np.ndarray, maps: np.ndarray, columns: int = 8, zoom: int = 3) -> np.ndarray:
    """Images uint8 [n, 3, H, W], each above its map [n, H, W], `columns` side by side; all maps on
    one scale. Gives uint8 [H', W', 3]."""
    count, _, height, width = images.shape
    low, high = (float(maps.min()), float(maps.max())) if count else (0.0, 0.0)
    pairs = [
        np.concatenate((image.transpose(1, 2, 0), heat(one, low, high)), axis=0)
        for image, one in zip(images, maps)
    ]
    lines = -(-count // columns)
    tall, wide = 2 * height * zoom + _GAP, width * zoom + _GAP
    page = np.full((max(1, lines) * tall, columns * wide, 3), 255, dtype=np.uint8)
    for number, pair in enumerate(pairs):
        top, left = number // columns * tall, number % columns * wide
        large = pair.repeat(zoom, axis=0).repeat(zoom, axis=1)
        page[top : top + large.shape[0], left : left + large.shape[1]] = large
    return page


def write_png(path: Path, pixels: np.ndarray) -> None:
    """Write pixels uint8 [H, W, 3]."""
    height, width, _ = pixels.shape
    rows = np.concatenate(
        (np.zeros((height, 1), np.uint8), pixels.reshape(height, width * 3)), axis=1
    )
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    path.write_bytes(
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", head)
        + _chunk(b"IDAT", zlib.compress(rows.tobytes(), 9))
        + _chunk(b"IEND", b"")
    )


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
