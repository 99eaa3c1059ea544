"""The CUDA kernels of the manual layers without a GPU: their plans, and their index arithmetic,
stages and barriers on emulated threads (manual_float_emulation.cpp)."""

from __future__ import annotations

import ctypes
import dataclasses
from typing import Tuple

import numpy as np
import pytest
from manual_cases import SPECIALS

from narrowgauge_kernels import toolchain
from narrowgauge_kernels.mac import Mac, reference
from narrowgauge_kernels.sources import CSRC

DIRECT, T128x128, T128x64, T128x32, T64x64, HEAVY128x64, HEAVY64x32 = range(7)
ROWS, QUADS, DEPTH = range(3)
LIGHT, MIDDLE, HEAVY = range(3)
TILES = {
    T128x128: (128, 128),
    T128x64: (128, 64),
    T128x32: (128, 32),
    T64x64: (64, 64),
    HEAVY128x64: (128, 64),
    HEAVY64x32: (64, 32),
}
STEP = 8
#: As run_policy has them; any other is of the first.
POLICIES = {"truncated": 0, "axfpm_fixed": 1, "custom": 2, "mitchell": 3, "axbf16": 4, "marked": 5}
#: That look for NaN, on tiles that they have.
ASKING = (
    ("mitchell", T128x64),
    ("mitchell", HEAVY64x32),
    ("axfpm_fixed", HEAVY128x64),
    ("axfpm_fixed", HEAVY64x32),
    ("axbf16", HEAVY64x32),
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A convolution; `channels` and `filters` are of one group."""

    batch: int = 1
    channels: int = 8
    filters: int = 8
    size: Tuple[int, int] = (5, 5)
    kernel: Tuple[int, int] = (1, 1)
    stride: Tuple[int, int] = (1, 1)
    padding: Tuple[int, int] = (0, 0)
    dilation: Tuple[int, int] = (1, 1)
    groups: int = 1
    last: bool = False  # x and the result are channels last

    def out_size(self):
        return tuple(
            (n + 2 * p - d * (k - 1) - 1) // s + 1
            for n, k, s, p, d in zip(
                self.size, self.kernel, self.stride, self.padding, self.dilation
            )
        )


@dataclasses.dataclass(frozen=True)
class Plan:
    """As manual_float_plan.h's."""

    tile: int
    loader: int
    channels_inside: bool
    quads_out: bool
    splits: int
    chunks: int
    blocks: int

    def numbers(self):
        return np.array([int(value) for value in dataclasses.astuple(self)], np.int64)


def numbers_of(shape, x, weight):
    """A Convolution's fields, strides in elements."""
    fields = [shape.batch, shape.groups, shape.channels, shape.filters, *shape.size]
    fields += [*shape.kernel, *shape.out_size(), *shape.stride, *shape.padding, *shape.dilation]
    fields += [stride // 4 for stride in (*x.strides, *weight.strides)]
    return np.array([*fields, int(shape.last)], np.int64)


def operands(shape, values):
    """x, weight, bias; x in its memory order. `values(size)` draws."""
    channels = shape.groups * shape.channels
    filters = shape.groups * shape.filters
    x = values((shape.batch, channels, *shape.size))
    if shape.last:
        x = np.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    return x, values((filters, shape.channels, *shape.kernel)), values((filters,))


def small_integers(seed):
    """Draws whose sums of products float32 holds without rounding."""
    generator = np.random.RandomState(seed)
    return lambda size: generator.randint(-8, 9, size).astype(np.float32)


def expected(shape, x, weight, bias, mac):
    """Products of the reference, added one by one in float32, channels then taps; then the bias."""
    high, wide = shape.out_size()
    (ph, pw), (sh, sw), (dh, dw) = shape.padding, shape.stride, shape.dilation
    padded = np.pad(x, ((0, 0), (0, 0), (ph, ph), (pw, pw)), mode="constant")
    out = np.zeros((shape.batch, shape.groups * shape.filters, high, wide), np.float32)
    for group in range(shape.groups):
        own = slice(group * shape.filters, (group + 1) * shape.filters)
        for c in range(shape.channels):
            for r in range(shape.kernel[0]):
                for s in range(shape.kernel[1]):
                    plane = padded[
                        :,
                        None,
                        group * shape.channels + c,
                        r * dh : r * dh + (high - 1) * sh + 1 : sh,
                        s * dw : s * dw + (wide - 1) * sw + 1 : sw,
                    ]
                    out[:, own] += reference(mac, plane, weight[None, own, c, r, s, None, None])
    return out + bias[None, :, None, None]


@pytest.fixture(scope="module")
def emulator(tmp_path_factory):
    """The device code for the host, compiled once."""
    library = tmp_path_factory.mktemp("manual") / "emulation.so"
    source = CSRC.parents[2] / "tests" / "kernels" / "manual_float_emulation.cpp"
    flags = ["-std=c++17", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror"]
    flags += ["-Wno-unknown-pragmas", "-fno-strict-aliasing", "-ffp-contract=off"]
    command = [toolchain.find_cxx("g++").path, *flags, "-I", str(CSRC), str(source)]
    toolchain.run([*command, "-o", str(library)], "compiling the emulation")
    return ctypes.CDLL(str(library))


def pointer(array):
    return None if array is None else array.ctypes.data_as(ctypes.c_void_p)


def planned(emulator, numbers, family=LIGHT, slots=1.25, multiprocessors=132, aligned=True):
    found = np.zeros(7, np.int64)
    emulator.manual_plan(
        pointer(numbers),
        ctypes.c_double(slots),
        family,
        multiprocessors,
        int(aligned),
        pointer(found),
    )
    tile, loader, inside, quads, splits, chunks, blocks = (int(value) for value in found)
    return Plan(tile, loader, bool(inside), bool(quads), splits, chunks, blocks)


def tiled(plan, shape, tile, splits=1):
    """The plan with another tile and number of splits, as plan_for would fill it in."""
    high, wide = shape.out_size()
    rows, filters = TILES[tile]
    all_chunks = -(-shape.channels * shape.kernel[0] * shape.kernel[1] // STEP)
    chunks = -(-all_chunks // splits)
    used = -(-all_chunks // chunks)
    blocks = -(-shape.batch * high * wide // rows) * -(-shape.filters // filters)
    return dataclasses.replace(
        plan, tile=tile, splits=used, chunks=chunks, blocks=blocks * shape.groups * used
    )


def emulate(emulator, shape, x, weight, bias, plan, mac, policy=None):
    """What the kernels write, from memory that begins as NaN; `policy` where it is not `mac`'s."""
    kept = 0xFFFFFFFF << (23 - mac.bits) & 0xFFFFFFFF if mac.bits else 0xFFFFFFFF
    high, wide = shape.out_size()
    filters = shape.groups * shape.filters
    out = np.full((shape.batch, high, wide, filters), np.nan, np.float32)
    if not shape.last:
        out = np.full((shape.batch, filters, high, wide), np.nan, np.float32)
    partial = np.full(plan.splits * out.size, np.nan, np.float32)
    faults = emulator.manual_emulate(
        pointer(numbers_of(shape, x, weight)),
        pointer(plan.numbers()),
        POLICIES.get(policy or mac.name, 0),
        pointer(x),
        ctypes.c_int64(x.size),
        pointer(weight),
        ctypes.c_int64(weight.size),
        pointer(bias),
        pointer(out),
        pointer(partial),
        ctypes.c_uint(kept),
        int(mac.name != "exact_fp32"),
    )
    assert faults == 0
    return out.transpose(0, 3, 1, 2) if shape.last else out


def mac_of(tile):
    return Mac("axfpm_fixed") if tile in (HEAVY128x64, HEAVY64x32) else Mac("exact_fp32")


#: Tails of pixels, filters and depth; strides, padding, dilation, groups; each way of loading x.
SHAPES = {
    "point, quads": Shape(2, 20, 40, (6, 6)),
    "point, odd plane": Shape(3, 9, 33, (5, 7)),
    "3x3": Shape(2, 5, 17, (9, 8), (3, 3), padding=(1, 1)),
    "strided": Shape(2, 3, 70, (15, 13), (5, 3), (2, 3), (2, 0)),
    "dilated": Shape(1, 4, 8, (14, 12), (3, 2), dilation=(2, 3), padding=(3, 1)),
    "groups": Shape(2, 6, 12, (7, 6), (3, 3), padding=(1, 1), groups=3),
    "last, 3x3": Shape(2, 12, 20, (7, 6), (3, 3), padding=(1, 1), last=True),
    "last, groups": Shape(1, 8, 9, (6, 9), (2, 2), groups=2, last=True),
    "last, point": Shape(2, 33, 36, (8, 9), last=True),
    "linear": Shape(1, 67, 50, (1, 75), last=True),
    "deep": Shape(1, 150, 10, (3, 3), (3, 3), padding=(1, 1)),
}


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", SHAPES)
def test_every_tile_gives_the_reference(emulator, name, tile):
    """Exact products of small integers, so that any sum is exact; Ax-FPM's to the bit in order."""
    shape = SHAPES[name]
    mac = mac_of(tile)
    x, weight, bias = operands(shape, small_integers(1))
    plan = planned(emulator, numbers_of(shape, x, weight))
    ordered = mac.name == "exact_fp32" or not plan.channels_inside
    plan = tiled(plan, shape, tile)
    result = emulate(emulator, shape, x, weight, bias, plan, mac)
    wanted = expected(shape, x, weight, bias, mac)
    if ordered:
        np.testing.assert_array_equal(result, wanted)
    else:
        np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-4)


def test_the_three_ways_of_loading_are_all_tried(emulator):
    """By the planner's own choice."""
    loaders = set()
    for shape in SHAPES.values():
        x, weight, _ = operands(shape, small_integers(1))
        loaders.add(planned(emulator, numbers_of(shape, x, weight)).loader)
    assert loaders == {ROWS, QUADS, DEPTH}


@pytest.mark.parametrize("tile", [T128x32, T64x64, HEAVY64x32])
@pytest.mark.parametrize("name", ["3x3", "last, 3x3", "deep", "linear", "groups"])
def test_a_split_depth_gives_the_sum_and_one_bias(emulator, name, tile):
    """Partial sums of uneven splits."""
    shape = SHAPES[name]
    x, weight, bias = operands(shape, small_integers(2))
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, tile, splits=3)
    assert plan.splits > 1
    result = emulate(emulator, shape, x, weight, bias, plan, mac_of(tile))
    wanted = expected(shape, x, weight, bias, mac_of(tile))
    np.testing.assert_allclose(result, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("mac", [Mac("exact_fp32"), Mac("truncated", bits=3), Mac("axfpm_fixed")])
@pytest.mark.parametrize("name", ["groups", "strided", "last, groups", "linear"])
def test_the_direct_kernel_gives_the_reference(emulator, name, mac):
    """One output per thread."""
    shape = SHAPES[name]
    x, weight, bias = operands(shape, small_integers(3))
    plan = Plan(DIRECT, ROWS, False, False, 1, 0, 0)
    result = emulate(emulator, shape, x, weight, bias, plan, mac)
    np.testing.assert_array_equal(result, expected(shape, x, weight, bias, mac))


@pytest.mark.parametrize("tile", [T128x64, T64x64])
@pytest.mark.parametrize("name", ["point, quads", "3x3", "last, 3x3"])
def test_operands_are_prepared_once_and_all_of_them(emulator, name, tile):
    """Truncated to 2 bits, where 5, 7 and -7 change; by each way of loading."""
    shape = SHAPES[name]
    mac = Mac("truncated", bits=2)
    x, weight, bias = operands(shape, small_integers(4))
    x, weight = x * np.float32(1.125), weight * np.float32(1.125)
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, tile)
    result = emulate(emulator, shape, x, weight, bias, plan, mac)
    np.testing.assert_array_equal(result, expected(shape, x, weight, bias, mac))


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("name", ["point, quads", "deep", "linear"])
def test_no_chunk_is_used_before_it_is_prepared(emulator, name, tile):
    """A policy that marks what it prepares: an operand used unmarked, or marked twice, is a fault.
    Of more chunks than stages, and of one chunk a split."""
    shape = SHAPES[name]
    x, weight, bias = operands(shape, small_integers(9))
    mac = Mac("truncated", bits=23)
    chunks = -(-shape.channels * shape.kernel[0] * shape.kernel[1] // STEP)
    for splits in (1, 2, chunks):
        plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, tile, splits)
        result = emulate(emulator, shape, x, weight, bias, plan, mac, "marked")
        np.testing.assert_array_equal(result, expected(shape, x, weight, bias, mac))


@pytest.mark.parametrize(("name", "tile"), ASKING)
def test_chunks_with_and_without_nan_are_the_references(emulator, name, tile):
    """NaN, infinity and subnormals in a few chunks of x, of weight and of both: to the bit, so that
    the NaN of one row or filter is nowhere else, and that of its own is there."""
    shape = Shape(2, 80, 70, (8, 9))
    x, weight, bias = operands(shape, small_integers(10))
    weight[weight == 0] = 3.0
    x[0, 5, 3, 3], x[1, 33, 7, 8], x[1, 34, 0, 0] = np.nan, np.nan, np.inf
    x[0, 70, 1, 1], x[0, 71, 2, 1], x[0, 72, 2, 2] = np.inf, -np.inf, 1e-40
    weight[7, 17], weight[69, 36], weight[9, 50], weight[8, 72] = np.nan, np.nan, np.inf, 1e-40
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, tile)
    result = emulate(emulator, shape, x, weight, bias, plan, Mac(name))
    with np.errstate(invalid="ignore"):
        wanted = expected(shape, x, weight, bias, Mac(name))
    nan = np.isnan(wanted)
    assert nan[:, [7, 69]].all()
    assert 0 < nan.sum() < nan.size / 3
    np.testing.assert_array_equal(result, wanted)


@pytest.mark.parametrize(("name", "tile"), ASKING)
@pytest.mark.parametrize("special", [SPECIALS, SPECIALS[~np.isnan(SPECIALS)]], ids=["nan", "none"])
def test_products_of_specials_are_the_references_to_the_bit(emulator, special, name, tile):
    """All pairs, as sums of one term beside 0 times 0, whose sign is the sum's; with the test for
    NaN, and without one."""
    shape = Shape(1, STEP, len(special), (1, len(special)), last=True)
    x, weight, bias = operands(shape, lambda size: np.zeros(size, np.float32))
    x[0, 3, 0, :], weight[:, 3, 0, 0] = special, special
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, tile)
    result = emulate(emulator, shape, x, weight, bias, plan, Mac(name))[0, :, 0]
    wanted = reference(Mac(name), special[None, :], special[:, None])
    np.testing.assert_array_equal(result, wanted)
    assert np.isnan(wanted).any()  # of infinity times zero, without one among the operands


@pytest.mark.parametrize("name", ["deep", "linear", "3x3", "strided"])
def test_the_depth_ends_where_it_ends_and_padding_is_multiplied(emulator, name):
    """A functor that adds 1 to each product: a sum has as many ones as its depth has steps."""
    shape = SHAPES[name]
    x, weight, bias = operands(shape, small_integers(8))
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, HEAVY64x32, splits=2)
    result = emulate(emulator, shape, x, weight, bias, plan, Mac("custom", library="OneMore"))
    depth = shape.channels * shape.kernel[0] * shape.kernel[1]
    exact = expected(shape, x, weight, bias, Mac("exact_fp32"))
    np.testing.assert_array_equal(result, exact + np.float32(depth))


def test_a_view_is_read_by_its_strides(emulator):
    """Neither order of memory, and no alignment."""
    shape = Shape(2, 6, 20, (6, 5), (3, 3), padding=(1, 1))
    whole = small_integers(5)((3, 7, 13, 12))
    x = whole[1:, 1:, 1::2, 2::2]
    _, weight, bias = operands(shape, small_integers(6))
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, T64x64)
    assert plan.loader == ROWS
    kept = x.base if x.base is not None else x
    result = emulate_view(emulator, shape, x, weight, bias, plan, kept)
    np.testing.assert_array_equal(result, expected(shape, x, weight, bias, Mac("exact_fp32")))


def emulate_view(emulator, shape, x, weight, bias, plan, whole):
    """As `emulate`, where x is a part of `whole`."""
    out = np.full((shape.batch, shape.filters, *shape.out_size()), np.nan, np.float32)
    start = (x.ctypes.data - whole.ctypes.data) // 4
    faults = emulator.manual_emulate(
        pointer(numbers_of(shape, x, weight)), pointer(plan.numbers()), 0,
        pointer(x), ctypes.c_int64(whole.size - start), pointer(weight),
        ctypes.c_int64(weight.size), pointer(bias), pointer(out), None,
        ctypes.c_uint(0xFFFFFFFF), 0,
    )  # fmt: skip
    assert faults == 0
    return out


def test_the_emulation_counts_reads_outside(emulator):
    """So that the zero faults above mean something: an x that ends one element early."""
    shape = SHAPES["3x3"]
    x, weight, bias = operands(shape, small_integers(7))
    plan = tiled(planned(emulator, numbers_of(shape, x, weight)), shape, T64x64)
    out = np.zeros((shape.batch, shape.filters, *shape.out_size()), np.float32)
    faults = emulator.manual_emulate(
        pointer(numbers_of(shape, x, weight)), pointer(plan.numbers()), 0,
        pointer(x), ctypes.c_int64(x.size - 1), pointer(weight), ctypes.c_int64(weight.size),
        pointer(bias), pointer(out), None, ctypes.c_uint(0xFFFFFFFF), 0,
    )  # fmt: skip
    assert faults > 0


@pytest.mark.parametrize(
    ("shape", "family", "tile"),
    [
        (Shape(32, 256, 256, (56, 56)), LIGHT, T128x128),
        (Shape(32, 64, 64, (56, 56), (3, 3), padding=(1, 1)), LIGHT, T128x64),
        (Shape(32, 128, 32, (56, 56), (3, 3), padding=(1, 1)), LIGHT, T128x32),
        (Shape(32, 256, 256, (56, 56)), MIDDLE, T128x64),
        (Shape(32, 256, 256, (56, 56)), HEAVY, HEAVY128x64),
        (Shape(32, 128, 32, (56, 56), (3, 3), padding=(1, 1)), HEAVY, HEAVY64x32),
        (Shape(32, 1, 1, (56, 56), (3, 3), padding=(1, 1), groups=64), LIGHT, DIRECT),
        (Shape(1, 3, 16, (64, 64), (17, 3)), LIGHT, DIRECT),
    ],
)
def test_the_tile_fits_the_shape(emulator, shape, family, tile):
    """On 132 multiprocessors: large tiles where there are many, narrow ones for few filters."""
    assert planned(emulator, sizes(shape), family).tile == tile


def sizes(shape):
    """A Convolution's fields of contiguous operands, without the operands."""
    channels = shape.groups * shape.channels
    high, wide = shape.size
    area = shape.kernel[0] * shape.kernel[1]
    x = [channels * high * wide, high * wide, wide, 1]
    if shape.last:
        x = [channels * high * wide, 1, wide * channels, channels]
    weight = [shape.channels * area, area, shape.kernel[1], 1]
    fields = [shape.batch, shape.groups, shape.channels, shape.filters, *shape.size]
    fields += [*shape.kernel, *shape.out_size(), *shape.stride, *shape.padding, *shape.dilation]
    return np.array([*fields, *x, *weight, int(shape.last)], np.int64)


@pytest.mark.parametrize("family", [LIGHT, MIDDLE, HEAVY])
@pytest.mark.parametrize("multiprocessors", [6, 40, 132])
def test_few_tiles_are_split_and_every_chunk_has_its_block(emulator, family, multiprocessors):
    """All shapes of ResNet-50's last stage at batch 1: no split may be empty."""
    for channels, filters, kernel in [(512, 512, 3), (2048, 512, 1), (512, 2048, 1)]:
        shape = Shape(
            1, channels, filters, (7, 7), (kernel, kernel), padding=(kernel // 2, kernel // 2)
        )
        plan = planned(emulator, sizes(shape), family, multiprocessors=multiprocessors)
        assert plan == tiled(plan, shape, plan.tile, plan.splits)
        chunks = -(-channels * kernel * kernel // STEP)
        assert (plan.splits - 1) * plan.chunks < chunks <= plan.splits * plan.chunks
        if multiprocessors == 132:
            assert plan.splits > 1


def test_offsets_past_32_bits_take_the_kernel_with_64(emulator):
    """Inside one image; many images are no matter."""
    image = Shape(1, 300, 16, (2000, 2000), (3, 3))
    assert planned(emulator, sizes(image)).tile == DIRECT
    images = Shape(4000, 64, 64, (112, 112))
    assert planned(emulator, sizes(images)).tile != DIRECT


def test_quads_need_alignment_and_planes_of_four(emulator):
    """Else a 16-byte access would fault."""
    shape = Shape(2, 16, 16, (6, 6))
    assert planned(emulator, sizes(shape)).loader == QUADS
    assert planned(emulator, sizes(shape), aligned=False).loader == ROWS
    assert planned(emulator, sizes(Shape(2, 16, 16, (5, 5)))).loader == ROWS
    assert planned(emulator, sizes(Shape(2, 16, 16, (6, 6), padding=(1, 1)))).loader == ROWS
    assert planned(emulator, sizes(Shape(2, 16, 16, (6, 6), last=True))).loader == DEPTH
