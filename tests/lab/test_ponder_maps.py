"""Pictures of ponder maps: colours, sheets, and PNG files that others read."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge_lab.anytime.ponder_maps import heat, ponder_map, sheet, write_png


def _read(path: Path) -> np.ndarray:
    """A reader of its own: signature, checked chunks, rows without filters."""
    data, at, found = path.read_bytes(), 8, {}
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert zlib.crc32(kind + body) == check
        found[kind] = body
        at += 12 + length
    width, height, *rest = struct.unpack(">IIBBBBB", found[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0]
    rows = np.frombuffer(zlib.decompress(found[b"IDAT"]), np.uint8).reshape(height, 1 + 3 * width)
    assert not rows[:, 0].any()
    return rows[:, 1:].reshape(height, width, 3)


def test_a_written_picture_is_read_back(tmp_path: Path) -> None:
    pixels = np.random.RandomState(0).randint(0, 256, (5, 7, 3)).astype(np.uint8)

    write_png(tmp_path / "it.png", pixels)

    assert np.array_equal(_read(tmp_path / "it.png"), pixels)


def test_more_thought_is_lighter() -> None:
    colours = heat(np.array([0.0, 1.0, 2.0, 3.0, 9.0]), 0.0, 3.0).astype(int).sum(-1)

    assert list(colours) == sorted(colours)
    assert colours[3] == colours[4]
    assert heat(np.ones((2, 2)), 1.0, 1.0).shape == (2, 2, 3)


def test_maps_of_blocks_are_added_at_the_size_of_the_image() -> None:
    blocks = [torch.ones(2, 1, 8, 8), torch.arange(32.0).view(2, 1, 4, 4), torch.ones(2, 1, 1, 1)]

    found = ponder_map(blocks, 8)

    assert found.shape == (2, 8, 8)
    assert found[1, 2, 6] == 1 + float(blocks[1][1, 0, 1, 3]) + 1


@pytest.mark.parametrize(("count", "height"), [(0, 38), (3, 38), (5, 76)])
def test_a_sheet_has_each_image_above_its_map(count: int, height: int) -> None:
    images = np.full((count, 3, 6, 5), 200, np.uint8)
    maps = np.linspace(0, 1, max(1, count))[:count, None, None] * np.ones((count, 6, 5))

    page = sheet(images, maps, columns=4, zoom=3)

    assert page.shape == (height, 4 * 17, 3)
    if count:
        assert (page[:18, :15] == 200).all()
        assert not (page[18:36, :15] == 200).all()
