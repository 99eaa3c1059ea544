"""The Triton kernels of the 8-bit passes without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowgauge_lab.layers.passes import tiling
from narrowgauge_lab.layers.passes.tiling import FULL, Tile, depth_block, settled, tiles


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 10), reason="Triton needs Python 3.10")
def test_the_kernels_give_by_the_interpreter_the_bits_of_the_reference() -> None:
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "src"), str(here)]
    done = subprocess.run(
        [sys.executable, str(here / "passes_interpreted.py")],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout == "8 layers\n"


@pytest.mark.parametrize(("rows", "columns"), [(12544, 256), (50176, 1024), (3136, 2048)])
def test_a_large_product_is_offered_tiles_that_fill_the_device(rows: int, columns: int) -> None:
    offered = tiles(rows, columns)

    assert 1 < len(offered) <= 7
    programs = [-(-rows // each.m) * -(-columns // each.n) for each in offered]
    assert min(programs) >= FULL


@pytest.mark.parametrize("rows", [1, 20, 49, 1568])
@pytest.mark.parametrize("columns", [1, 10, 64, 4608])
def test_there_is_a_tile_for_any_product_and_none_wastes_more_than_it_has_to(
    rows: int, columns: int
) -> None:
    for tile in tiles(rows, columns):
        assert tile.m < 2 * max(32, rows)
        assert tile.n < 2 * max(32, columns)


def test_a_sum_is_divided_where_its_result_leaves_processors_idle() -> None:
    few = tiling.parts(Tile(128, 128, 8, 4), 64, 64, 1, 1568, 1)
    many = tiling.parts(Tile(128, 128, 8, 4), 8192, 8192, 1, 8, 1)

    assert few == 16
    assert many <= 2
    assert tiling.parts(Tile(32, 32, 4, 4), 16, 16, 1, 3, 1) <= 3
    assert tiling.parts(Tile(32, 32, 4, 4), 16, 16, 1, 40000, 39) == 39


def test_sums_go_in_blocks_that_hold_what_there_is() -> None:
    assert [depth_block(channels) for channels in (1, 3, 33, 64, 128, 2048)] == [
        32, 32, 64, 64, 128, 128
    ]  # fmt: skip


def test_without_a_gpu_the_first_tile_runs_and_nothing_is_measured() -> None:
    started = []
    offered = (Tile(64, 64, 4, 4), Tile(32, 32, 4, 4))

    found = settled(("a problem",), offered, started.append, torch.device("cpu"), ValueError)

    assert found == offered[0]
    assert started == []
