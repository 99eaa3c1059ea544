"""Shapes, tiles and variants of generated convolutions: what is refused, and with which limit."""

from __future__ import annotations

import contextlib
import dataclasses
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_kernels.sparse.errors import SparseArgumentError
from narrowgauge_kernels.sparse.generate import generate, products_of
from narrowgauge_kernels.sparse.geometry import derive
from narrowgauge_kernels.sparse.shapes import FINISHES, Shape, Tile, Variant
from narrowgauge_kernels.sparse.tiles import (
    NETWORKS,
    PUBLISHED,
    candidates,
    default_tile,
    network_shapes,
)

SHAPE = Shape(1, 128, 28, 28, 32)
ARCHS = ("7.0", "7.2", "7.5", "8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "12.0")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"batch": 0}, "batch is 0, and must be positive"),
        ({"kernel": 7}, "kernel cannot be 7"),
        ({"stride": 3}, "stride cannot be 3"),
        ({"padding": -1}, "padding is -1"),
        ({"height": 1, "kernel": 5, "padding": 1}, "smaller than the kernel"),
        ({"batch": 50000}, "fewer than 2147483648"),
    ],
)
def test_a_shape_that_no_kernel_can_have(changes, words):
    with pytest.raises(SparseArgumentError, match=words):
        dataclasses.replace(SHAPE, **changes)


@pytest.mark.parametrize(
    ("variant", "words"),
    [
        ({"precision": "tf32"}, "no tf32 by element"),
        ({"granularity": "tensor-core"}, "no strict fp32 on tensor cores"),
        ({"precision": "fp16", "granularity": "tensor-core", "path": "lists"}, "path lists is not"),
        ({"precision": "tf32", "granularity": "tensor-core", "path": "dense"}, "no dense tf32"),
        ({"precision": "int8"}, "precision cannot be int8"),
        ({"accumulation": "any"}, "accumulation cannot be any"),
        ({"layout": "cnhw"}, "layout cannot be cnhw"),
    ],
)
def test_a_variant_that_there_is_not(variant, words):
    with pytest.raises(SparseArgumentError, match=words):
        Variant(**variant)


CORES = Variant("fp16", granularity="tensor-core")
DENSE = Variant("fp16", granularity="tensor-core", path="dense")


@pytest.mark.parametrize(
    ("tile", "variant", "arch", "words"),
    [
        (Tile(15, 15, 2), Variant(), "9.0", "registers a thread"),
        (Tile(2, 63, 2, 32), Variant(), "9.0", "a window of 260 places, and 256 are"),
        (Tile(7, 7, 128), Variant(), "7.5", "shared memory, and 7.5 has 65536"),
        (Tile(2, 4, 8, 128, 16), Variant(), "9.0", "2048 threads"),
        (Tile(7, 7, 8, 128, 8), Variant(), "9.0", "1024 threads leave 64 each"),
        (Tile(4, 4, 8, 48), Variant(), "9.0", "not a multiple of 32"),
        (Tile(3, 4, 32), CORES, "9.0", "whole groups of 2 x 4"),
        (Tile(4, 4, 48), CORES, "9.0", "channels by 32"),
        (Tile(4, 4, 32, 24), CORES, "9.0", "not a multiple of 16"),
        (Tile(2, 4, 32, 16, 2), CORES, "9.0", "1 groups of pixels are not 2 for each warp"),
        (Tile(44, 40, 32, 16, 10), CORES, "9.0", "a window of 1932 pixels, and 1820 are"),
        (Tile(8, 8, 32), CORES, "7.5", "lacks the tensor-core products"),
        (Tile(4, 4, 8, 64, 1, wide=4), Variant(), "9.0", "64 filters are not a multiple of 128"),
        (Tile(8, 8, 8, 128, 1, wide=4), Variant(), "9.0", "registers a thread"),
        (Tile(7, 7, 32, 32, 1, wide=2), DENSE, "9.0", "no filters of its own"),
        (Tile(7, 7, 24), DENSE, "9.0", "channels by 16"),
        (Tile(7, 7, 16, 24), DENSE, "9.0", "not a multiple of 16"),
        (Tile(7, 7, 16, 16, 3), DENSE, "9.0", "8 warps do not make 3 groups"),
        (Tile(7, 7, 128, 128), DENSE, "9.0", "shared memory, and 9.0 has 232448"),
        (Tile(7, 7, 8, finish="cluster"), Variant(), "9.0", "16 slices of channels, and a cluster"),
        (Tile(7, 7, 32, finish="cluster"), Variant(), "8.9", "8.9 has no clusters"),
        (Tile(7, 7, 32, finish="cluster"), Variant(accumulation="atomic"), "9.0", "atomically"),
    ],
)
def test_a_tile_that_does_not_fit_names_its_limit(tile, variant, arch, words):
    with pytest.raises(SparseArgumentError, match=words):
        generate(SHAPE, tile, variant, arch)


@pytest.mark.parametrize("arch", ["9", "x.y", ""])
def test_what_is_no_capability(arch):
    with pytest.raises(SparseArgumentError, match="not a compute capability"):
        derive(SHAPE, Tile(4, 7, 8), Variant(), arch)


def test_the_published_tiles_all_fit_everywhere():
    for (c, h, w, n), tiles in PUBLISHED.items():
        for tile in tiles:
            for arch in ARCHS:
                derive(Shape(1, c, h, w, n), Tile(*tile), Variant(), arch)


def test_published_tiles_come_first_and_all_candidates_fit():
    found = candidates(SHAPE, Variant(), "9.0")
    assert {each.text() for each in found[:2]} == {"4x7x2", "7x7x2"}
    assert len(found) == len(set(found)) == 32
    for tile in found:
        derive(SHAPE, tile, Variant(), "9.0")


@pytest.mark.parametrize("variant", [Variant(), Variant("tf32", granularity="tensor-core")])
@pytest.mark.parametrize("kernel", [1, 5])
def test_every_kernel_has_a_default_tile(variant, kernel):
    shape = Shape(8, 96, 14, 14, 48, kernel, 2, kernel // 2)
    tile = default_tile(shape, variant, "8.7")
    derive(shape, tile, variant, "8.7")


@pytest.mark.parametrize(("variant", "rows"), [(CORES, 16), (DENSE, 14)])
def test_large_tiles_on_tensor_cores_are_for_several_images(variant, rows):
    for batch, wanted in ((1, False), (8, True)):
        every = candidates(Shape(batch, 64, 28, 28, 64), variant, "9.0", 1 << 16)
        tall = [tile for tile in every if tile.rows > 8]
        assert bool(tall) is wanted
        assert all(tile.rows == rows <= tile.columns for tile in tall)
    small = candidates(Shape(8, 64, 7, 7, 64), variant, "9.0", 1 << 16)
    assert max(tile.rows for tile in small) <= 8


def test_no_tile_says_the_limit():
    with pytest.raises(SparseArgumentError, match="lacks the tensor-core"):
        default_tile(SHAPE, CORES, "7.0")


def test_a_network_is_its_shapes():
    assert {shape.filters for shape in network_shapes("densenet169", 4)} == {32}
    assert all(shape.batch == 4 for name in NETWORKS for shape in network_shapes(name, 4))
    with pytest.raises(SparseArgumentError, match="no network 'alexnet'"):
        network_shapes("alexnet", 1)


@settings(max_examples=40)
@given(
    st.tuples(*[st.integers(1, 40)] * 5, st.sampled_from([1, 3, 5]), st.sampled_from([1, 2])),
    st.integers(2, 4),
)
def test_a_shape_is_what_its_text_says(sizes, padding):
    shape = Shape(*sizes, padding)
    assert Shape.parse(shape.text()) == shape
    assert Shape.parse(shape.text().replace(",", "x")) == shape


@settings(max_examples=40)
@given(st.tuples(*[st.integers(1, 99)] * 5), st.sampled_from(FINISHES), st.sampled_from([1, 2, 4]))
def test_a_tile_is_what_its_text_says(numbers, finish, wide):
    tile = Tile(*numbers, finish, wide)
    assert Tile.parse(tile.text()) == tile


@settings(max_examples=60)
@given(st.text(alphabet="0123456789x,kspfg/-. ", max_size=24))
def test_no_text_does_anything_but_parse_or_refuse(text):
    for parse in (Shape.parse, Tile.parse):
        with contextlib.suppress(SparseArgumentError):
            assert parse(text) == parse(parse(text).text())


@pytest.mark.parametrize(
    ("kernel", "stride", "padding"), [(1, 1, 0), (1, 2, 0), (3, 1, 1), (3, 2, 0), (5, 2, 2)]
)
def test_the_cases_are_all_products_of_a_tile(kernel, stride, padding):
    """Each output with each tap once, from the place that the convolution reads for it."""
    shape, tile = Shape(1, 1, 9, 9, 1, kernel, stride, padding), Tile(2, 3, 1)
    made = derive(shape, tile, Variant(), "9.0")
    products = {}
    for row in range(made.window_rows):
        for column in range(made.window_columns):
            for out, tap in products_of(shape, tile, row, column):
                assert (out, tap) not in products
                products[out, tap] = (row, column)
    assert len(products) == 6 * kernel**2
    for (out, tap), (row, column) in products.items():
        assert row == out // 3 * stride + tap // kernel
        assert column == out % 3 * stride + tap % kernel


@pytest.mark.parametrize("wide", [1, 2])
@pytest.mark.parametrize(("kernel", "stride"), [(1, 1), (1, 2), (3, 1), (3, 2), (5, 1)])
def test_a_jump_leads_to_the_products_of_its_place(kernel, stride, wide):
    """The PTX, which emulated threads do not run, says what the switch says, which they do."""
    shape, variant = Shape(1, 4, 9, 9, 64, kernel, stride, 0), Variant()
    tile = Tile(2, 3, 2, 64, wide=wide)
    made = derive(shape, tile, variant, "9.0")
    source = generate(shape, tile, variant, "9.0")
    source = source[source.index("multiply_entry(int place") :]
    ptx = re.findall(r'^      "(.*)\\n"$', source, re.MULTILINE)
    assert ptx[0] == "{"
    assert ptx[-2:] == ["DONE:", "}"]
    labels = ptx[1].partition(".branchtargets ")[2].rstrip(";").split(", ")
    sums, taps = 6 * wide, kernel**2 * wide
    assert ptx[2] == f"brx.idx.uni %{sums + taps + 1}, PLACES;"
    behind = source.partition('      "}\\n"')[2].partition(";")[0]
    operands = re.findall(r'"(\+?[fr])"\((\w+)(?:\[(\d+)\])?\)', behind)
    assert [name for _, name, _ in operands] == (
        ["sums"] * sums + ["taps"] * taps + ["value", "place"]
    )
    assert [int(at) for _, _, at in operands[:-2]] == [*range(sums), *range(taps)]
    for place, label in enumerate(labels):
        wanted = [
            (out * wide + i, tap * wide + i)
            for out, tap in products_of(shape, tile, *divmod(place, made.window_columns))
            for i in range(wide)
        ]
        found = []
        for line in ptx[ptx.index(f"{label}:") + 1 :]:
            product = re.fullmatch(r"fma\.rn\.f32 %(\d+), %(\d+), %(\d+), %(\d+);", line)
            if product is None:
                assert line in ("bra.uni DONE;", "}")
                break
            into, value, tap, out = map(int, product.groups())
            assert (into, value) == (out, sums + taps)
            found.append((out, tap - sums))
        assert found == wanted
    assert len(labels) == made.window_rows * made.window_columns
