"""The CUDA kernels over 8-bit codes, bit for bit, without a GPU: their source compiled for the CPU,
with a block's threads taking turns, and barriers, tensor-core instructions and asynchronous copies
written from their specification (tests/kernels/emulated). And the planner, which is pure.
"""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import numpy
import pytest
from manual_codes_device_cases import (
    SHAPES,
    TERMS,
    Shape,
    codes,
    expected,
    operands,
    random_table,
    term_table,
)

from narrowgauge_kernels.sources import CSRC

EMULATED = Path(__file__).parent / "emulated"
TENSOR, DOT, TABLE, DIRECT = range(4)  # enum Path
H200 = (90, 132, 232448)
#: Emulation is slow: these are quick, the rest of the shapes are not.
QUICK = ("words", "grouped")
EVERY_SHAPE = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SHAPES
]
SIGNS = [(False, False), (False, True), (True, False), (True, True)]


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The launchers as a library of this machine."""
    target = tmp_path_factory.mktemp("emulated") / "manual_codes.so"
    command = ["g++", "-O1", "-std=c++14", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-shared", "-fPIC", "-I", EMULATED, "-I", CSRC, "-o", target]
    done = subprocess.run(
        [*map(str, command), str(EMULATED / "manual_codes.cpp")],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    return ctypes.CDLL(str(target))


def numbers(*values):
    return (ctypes.c_int64 * max(len(values), 1))(*values)


def aligned(array):
    """A contiguous copy that begins at a multiple of 16 bytes."""
    room = numpy.zeros(array.nbytes + 16, numpy.uint8)
    first = -room.ctypes.data % 16
    made = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def lowered(shape, x, weight, path):
    """x and weight as the tiled paths take them, and the strides of those that have any."""
    if path == DIRECT:
        return x, weight, (*x.strides, *weight.strides)
    groups, channels = shape.groups, shape.channels // shape.groups
    extra = -channels % 4
    left = x.reshape(shape.batch, groups, channels, shape.height, shape.width)
    left = numpy.pad(left.transpose(0, 3, 4, 1, 2), ((0, 0),) * 4 + ((0, extra),))
    right = weight.reshape(groups, -1, channels, *shape.kernel)
    if path == TABLE:
        more = -right.shape[1] % 32
        right = numpy.pad(right.transpose(0, 3, 4, 2, 1), ((0, 0),) * 3 + ((0, extra), (0, more)))
    else:
        right = numpy.pad(right.transpose(0, 1, 3, 4, 2), ((0, 0),) * 4 + ((0, extra),))
    return aligned(left), aligned(right), (0,) * 8


def run(device, shape, x, weight, path, **chosen):
    """The result [N, O, Ho, Wo] by one path; `table` int32 or `terms`."""
    table, terms = chosen.get("table"), chosen.get("terms", ())
    rows, x_zero = chosen.get("rows", False), chosen.get("x_zero", 0)
    left, right, strides = lowered(shape, x, weight, path)
    sizes = (shape.batch, *shape.out(), shape.outputs) if rows else None
    out = numpy.full(sizes or (shape.batch, shape.outputs, *shape.out()), -77777, numpy.int32)
    largest = 0 if table is None else int(numpy.abs(table.astype(numpy.int64)).max())
    flat = [number for term in terms for number in term]
    signs = (x.dtype == numpy.int8, weight.dtype == numpy.int8)
    device.run(
        numbers(*shape.sizes()),
        numbers(rows, *signs, x_zero & 255, *strides, largest),
        numbers(path, chosen.get("tile", 0), chosen.get("splits", 1), 1),
        left.ctypes.data_as(ctypes.c_void_p),
        right.ctypes.data_as(ctypes.c_void_p),
        None if table is None else table.ctypes.data_as(ctypes.c_void_p),
        numbers(*flat),
        len(terms),
        out.ctypes.data_as(ctypes.c_void_p),
    )  # fmt: skip
    return out.transpose(0, 3, 1, 2) if rows else out


def check(device, shape, path, signs=(True, True), **chosen):
    """One path against the numpy reference, every number."""
    x, weight = operands(shape, *signs)
    table = chosen.get("table")
    if table is None:
        table = term_table(chosen["terms"], *signs)
    wanted = expected(shape, x, weight, table, chosen.get("x_zero", 0))
    given = run(device, shape, x, weight, path, **chosen)
    numpy.testing.assert_array_equal(given, wanted)


@pytest.mark.parametrize("name", EVERY_SHAPE)
def test_tensor_cores_on_every_shape(device, name):
    """Padding pixels are codes like any other; the result in either order of memory."""
    check(device, SHAPES[name], TENSOR, tile=1, terms=TERMS["masked"], x_zero=-77, rows=True)


def test_a_large_tile_of_tensor_cores(device):
    check(device, Shape(100, 160, 1, 1, 44), TENSOR, tile=0, terms=TERMS["masked"])


@pytest.mark.slow
def test_large_tiles_of_tensor_cores(device):
    """More pixels, channels and stages than one tile has, and remainders of all."""
    shape = Shape(1, 40, 16, 17, 133, (2, 2), padding=(1, 0))
    check(device, shape, TENSOR, tile=0, terms=TERMS["masked"], x_zero=5)


@pytest.mark.parametrize(
    "signs",
    [pytest.param(each, marks=pytest.mark.slow if each[0] == each[1] else ()) for each in SIGNS],
)
def test_signed_and_unsigned_codes(device, signs):
    shape = SHAPES["words"]
    zero = -128 if signs[0] else 255
    for name in ("exact", "shifted"):
        check(device, shape, TENSOR, signs, tile=1, terms=TERMS[name], x_zero=zero)
        check(device, shape, DOT, signs, terms=TERMS[name], x_zero=zero)
        check(device, shape, DIRECT, signs, terms=TERMS[name], x_zero=zero)
    check(device, shape, TABLE, signs, table=random_table(-30000, 31000), x_zero=zero, tile=3)


@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("path", [TENSOR, DOT])
def test_every_kind_of_term_in_ranges_of_depth(device, name, path):
    """Coefficients, signs, shifts, products that vanish; sums of ranges meet in the output."""
    shape = Shape(20, 300, 1, 1, 10)
    for splits in (1, 3) if name == "shifted" else (2,):
        chosen = {"terms": TERMS[name], "splits": splits, "tile": 1 if path == TENSOR else 0}
        check(device, shape, path, **chosen)


def test_more_terms_than_one_sweep_has(device):
    terms = [(1 << i % 8, 255 - i, 1, 0, 0) for i in range(19)]
    check(device, SHAPES["linear"], TENSOR, tile=1, terms=terms)


@pytest.mark.parametrize("name", EVERY_SHAPE)
def test_dp4a_on_every_shape(device, name):
    check(device, SHAPES[name], DOT, terms=TERMS["masked"], x_zero=-77)


@pytest.mark.parametrize("name", EVERY_SHAPE)
@pytest.mark.parametrize("tile", [0, 1, 3])
def test_tables_on_every_shape(device, name, tile):
    """16-bit entries; a product of padding is not zero, nor is one of padded channels there."""
    table = random_table(-32768, 32767)
    check(device, SHAPES[name], TABLE, table=table, tile=tile, x_zero=-77, rows=tile == 0)


@pytest.mark.parametrize("tile", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 65535), (-1, 65534), (5, 65540), (-70000, -5000), (-70000, 69071), (7, 7),
     (-32767, 32767), (0, 32767), (-32768, 0), (0, 0)],
)  # fmt: skip
def test_tables_of_every_range(device, tile, least, most):
    """16-bit entries where the range is theirs, else 32-bit ones; the host need not know which."""
    table = random_table(least, most)
    check(device, Shape(3, 21, 2, 2, 35), TABLE, table=table, tile=tile)
    if tile == 0:  # lookups have 32-bit entries of any
        check(device, Shape(1, 3, 2, 2, 5), DIRECT, table=table)


def test_tables_in_ranges_of_depth(device):
    """The least product counts once per output, whichever block adds it."""
    check(device, Shape(5, 100, 2, 2, 7), TABLE, table=random_table(-3, 60000), tile=3, splits=2)
    check(device, Shape(3, 40, 1, 1, 7), TABLE, table=random_table(-3, 600), tile=3, splits=3)


@pytest.mark.slow
def test_tables_in_ranges_of_depth_and_more_than_one_tile(device):
    """And of remainders of all."""
    table = random_table(-3, 60000)
    check(device, Shape(150, 100, 2, 2, 70), TABLE, table=table, tile=3, splits=2)
    check(device, Shape(230, 70, 2, 2, 33), TABLE, table=table, tile=1, splits=2)
    check(device, Shape(260, 70, 2, 2, 33), TABLE, table=table, tile=0, splits=2)


@pytest.mark.parametrize("name", EVERY_SHAPE)
def test_lookups_on_every_shape(device, name):
    """Any strides."""
    shape = SHAPES[name]
    table = random_table(-(2**20), 2**20)
    x, weight = operands(shape, True, False)
    wanted = expected(shape, x, weight, table, -3)
    last = numpy.ascontiguousarray(x.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    for given in (x, last):
        found = run(device, shape, given, weight, DIRECT, table=table, x_zero=-3)
        numpy.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("pixels", [1, 2, 16, 17, 49, 50, 64, 196, 3136])
@pytest.mark.parametrize("channels", [1, 3, 4, 5, 64, 65, 257])
def test_planes_become_rows_of_padded_channels(device, channels, pixels):
    """As transposed and padded by numpy; from any address, and to no byte behind the result."""
    for images, first in ((1, 0), (3, 1), (2, 0)) if pixels < 3136 else ((2, 0), (1, 1)):
        x = codes((images, channels, pixels), False, 5)
        room = aligned(numpy.zeros(x.size + 16, numpy.uint8))
        room[first : first + x.size] = x.reshape(-1)
        rows = numpy.pad(x.transpose(0, 2, 1), ((0, 0), (0, 0), (0, -channels % 4)))
        result = aligned(numpy.full(rows.size + 16, 0x5A, numpy.uint8))
        device.transpose(
            numbers(images, channels, pixels),
            room[first:].ctypes.data_as(ctypes.c_void_p),
            result.ctypes.data_as(ctypes.c_void_p),
        )
        numpy.testing.assert_array_equal(result[: rows.size], rows.reshape(-1))
        assert (result[rows.size :] == 0x5A).all()


def test_planes_that_are_rows_or_too_many_are_left_to_torch(device):
    def takes(*planes):
        return bool(device.takes_planes(numbers(*planes)))

    assert takes(32, 3, 224 * 224)
    assert takes(2**20, 64, 49)
    assert not takes(0, 3, 49)
    assert not takes(32, 0, 49)
    assert not takes(32, 64, 0)
    assert not takes(32, 64, 1)
    assert not takes(1, 2**21, 49)
    assert not takes(1, 1, 2**30)
    assert not takes(2**26, 1, 2**8)


# --- the planner ---


def plan(device, shape, machine=H200, table=False, terms=()):
    made = numbers(0, 0, 0, 0, 0)
    flat = [number for term in terms for number in term]
    device.choose(
        numbers(*shape.sizes()), int(table), numbers(*flat), len(terms), numbers(*machine), made
    )
    return dict(zip(("path", "tile", "tiles", "splits", "depth"), made))


def test_large_products_take_large_tiles(device):
    big = Shape(4096, 4096, 1, 1, 4096)
    wanted = {"tile": 0, "tiles": 512, "splits": 1, "depth": 4096}
    assert plan(device, big) == {"path": TENSOR, **wanted}
    assert plan(device, big, table=True) == {"path": TABLE, **wanted}


def test_tables_take_the_tile_that_leaves_least_empty(device):
    """32 images of 14 x 14 are 7 tiles of 896 pixels."""
    for side, tile in ((14, 1), (56, 0)):
        layer = Shape(32, 256, side, side, 1024)
        assert plan(device, layer, table=True)["tile"] == tile


def test_old_devices_take_what_they_have(device):
    """7.5: no int8 product of 16 x 8 x 32, and 64 KB of shared memory; 48 KB need no permission."""
    big = Shape(4096, 4096, 1, 1, 4096)
    assert plan(device, big, (75, 40, 65536))["path"] == DOT
    assert plan(device, big, (75, 40, 65536), table=True)["tile"] == 2
    assert plan(device, big, (70, 80, 49152), table=True)["tile"] == 3
    assert plan(device, big, (86, 84, 101376), table=True)["tile"] == 0
    assert plan(device, big, (86, 84, 101376))["tile"] == 0
    assert plan(device, big, (80, 108, 49152))["tile"] == 1


def test_few_tiles_are_split_along_depth(device):
    """Of 64 at a time, and no more ranges than there is depth."""
    late = Shape(32, 512, 7, 7, 512, (3, 3), padding=(1, 1))
    for table in (False, True):
        made = plan(device, late, table=table)
        assert made["splits"] > 1
        assert made["depth"] % 64 == 0
        assert (made["splits"] - 1) * made["depth"] < 512 * 9 <= made["splits"] * made["depth"]


def test_empty_tiles_are_left_to_lookups(device):
    depthwise = Shape(32, 256, 14, 14, 256, (3, 3), padding=(1, 1), groups=256)
    assert plan(device, depthwise)["path"] == DIRECT
    assert plan(device, depthwise, table=True)["path"] == DIRECT
    assert plan(device, Shape(1, 4096, 1, 1, 4096), table=True)["path"] == DIRECT
    assert plan(device, Shape(32, 64, 56, 56, 64), table=True)["path"] == TABLE


def test_a_shifted_sum_never_wraps(device):
    """Its ranges of depth are short enough for eight products of 255 * 255."""
    long = Shape(4096, 20000, 1, 1, 4096)
    assert plan(device, long)["depth"] == 20032
    made = plan(device, long, terms=((255, 254, 3, 0, 1),))
    assert made["depth"] <= 4096
    assert 4096 * 8 * 255 * 255 < 2**31


def test_sizes_beyond_32_bits_are_left_to_lookups(device):
    assert plan(device, Shape(1, 64, 1, 2**28, 64))["path"] == DIRECT
    assert plan(device, Shape(1, 2**26, 2, 2, 64, (2, 2)))["path"] == DIRECT


def test_terms_are_folded(device):
    """Shifts into coefficients, what vanishes left out, equal coefficients into one sweep."""
    room = numbers(*[0] * 40)
    terms = ((0x11, 0xFF, 1, 0, 0), (0xEE, 0x8F, 16, 0, 3), (0x80, 0x0F, 1, 0, 0), (1, 1, 2, 1, 0),
             (0xFF, 0x0E, 6, 0, 2))  # fmt: skip
    count = device.folded(numbers(*[n for term in terms for n in term]), len(terms), room)
    made = [tuple(room[5 * i : 5 * i + 5]) for i in range(count)]
    assert made == [
        (0x8011, 0x0FFF, 2, 1, 0),
        (0xEE, 0x88, 1, 2, 0),
        (0xFF, 0x0C, 1, 3, 1),
    ]
