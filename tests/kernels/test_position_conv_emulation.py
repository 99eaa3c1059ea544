"""The CUDA kernels of convolutions at listed positions, and of the lists, without a GPU: their
source compiled for the CPU, a block's threads taking turns (tests/kernels/emulated)."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch

from narrowgauge_kernels.position_conv import packed
from narrowgauge_kernels.sources import CSRC

EMULATED = Path(__file__).parent / "emulated"
PUT, SET, ADD = range(3)
CELLS = 700
TAPS = [-21, -20, -19, -1, 0, 1, 19, 20, 21]


@pytest.fixture(scope="module")
def device(tmp_path_factory: Any) -> ctypes.CDLL:
    """The launchers as a library of this machine."""
    target = tmp_path_factory.mktemp("emulated") / "position_conv.so"
    command = ["g++", "-O1", "-std=c++14", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
    command += ["-ffp-contract=off", "-shared", "-fPIC", "-I", str(EMULATED), "-I", str(CSRC)]
    done = subprocess.run(
        [*command, "-o", str(target), str(EMULATED / "position_conv.cpp")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return ctypes.CDLL(str(target))


class Given(NamedTuple):
    """Operands of one call, numpy; `weight` [T, C, F]."""

    rows: np.ndarray
    positions: np.ndarray
    weight: np.ndarray
    bias: np.ndarray
    taps: Any = TAPS

    def wanted(self, slope: float = 1.0) -> np.ndarray:
        """In float64."""
        result = np.tile(self.bias.astype(np.float64), (len(self.positions), 1))
        for tap, matrix in zip(self.taps, self.weight.astype(np.float64)):
            result += self.rows[self.positions + tap].astype(np.float64) @ matrix
        return np.asarray(np.where(result < 0, result * slope, result))


def given(channels: int, filters: int, listed: int, taps: Any = TAPS) -> Given:
    draw = np.random.default_rng(channels * 1000 + filters)

    def normal(*size: int) -> np.ndarray:
        return draw.standard_normal(size).astype(np.float32)

    reach = max(map(abs, taps))
    places = reach + draw.permutation(CELLS - 2 * reach)[:listed].astype(np.int64)
    weight = normal(len(taps), channels, filters) / np.float32(3)
    return Given(aligned(normal(CELLS, channels)), places, weight, normal(filters), taps)


def aligned(array: np.ndarray, floats_off: int = 0) -> np.ndarray:
    """A copy that begins so many floats after a multiple of 16 bytes."""
    room = np.zeros(array.nbytes + 32, np.uint8)
    first = -room.ctypes.data % 16 + 4 * floats_off
    made = room[first : first + array.nbytes].view(array.dtype).reshape(array.shape)
    made[...] = array
    return made


def pointer(array: Optional[np.ndarray]) -> ctypes.c_void_p:
    return ctypes.c_void_p(None if array is None else array.ctypes.data)


def convolve(
    device: ctypes.CDLL, operands: Given, out: np.ndarray, finish: int = PUT, *,
    count: Optional[int] = None, slope: float = 1.0, share: Optional[np.ndarray] = None,
    total: Optional[np.ndarray] = None, at_once: bool = False,
) -> None:  # fmt: skip
    """By the launcher, into `out`; nothing may be read outside of the operands."""
    weight = aligned(packed(torch.from_numpy(operands.weight)).numpy())
    sizes = [len(operands.rows), weight.size, len(operands.positions), *operands.weight.shape[1:]]
    sizes += [finish, len(operands.taps), int(at_once)]
    faults = device.convolve(
        (ctypes.c_longlong * 8)(*sizes), pointer(operands.rows), pointer(operands.positions),
        pointer(None if count is None else np.array([count], np.int64)), pointer(weight),
        pointer(operands.bias), pointer(np.array(operands.taps, np.int64)), ctypes.c_float(slope),
        pointer(share), pointer(out), pointer(total),
    )  # fmt: skip
    assert faults == 0


#: Every panel, alone and beside others; channels that fill no chunk, no quad, or many chunks.
SHAPES = [
    (16, 16, 300), (16, 16, 1), (19, 16, 130), (3, 5, 129), (32, 32, 65), (8, 20, 64), (5, 40, 70),
    (64, 64, 33), (4, 64, 32), (7, 50, 40), (12, 133, 35), (1, 112, 3),
    (16, 1, 40), (19, 1, 33), (2, 1, 16),
]  # fmt: skip


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_float64(device: ctypes.CDLL, shape: Any, at_once: bool) -> None:
    operands = given(*shape)
    out = aligned(np.full((shape[2], shape[1]), np.nan, np.float32))

    convolve(device, operands, out, slope=0.1, at_once=at_once)

    np.testing.assert_allclose(out, operands.wanted(0.1), atol=2e-5)
    assert (out < 0).any() or out.size < 20


@pytest.mark.parametrize("taps", [[0], [-1, 2], list(range(-12, 13))], ids=len)
@pytest.mark.parametrize("filters", [1, 24, 64])
def test_there_may_be_any_taps(device: ctypes.CDLL, taps: Any, filters: int) -> None:
    operands = given(6, filters, 50, taps)
    out = np.zeros((50, filters), np.float32)

    convolve(device, operands, out)

    np.testing.assert_allclose(out, operands.wanted(), atol=2e-5)


@pytest.mark.parametrize("filters", [1, 6, 16, 36, 64])
def test_results_are_put_and_added_where_they_belong(device: ctypes.CDLL, filters: int) -> None:
    operands = given(8, filters, 90)
    places, wanted = operands.positions, operands.wanted()
    others = np.setdiff1d(np.arange(CELLS), places)
    out, total = (aligned(np.full((CELLS, filters), each, np.float32)) for each in (3.0, 5.0))

    convolve(device, operands, out, SET, slope=0.5)

    np.testing.assert_allclose(out[places], operands.wanted(0.5), atol=2e-5)
    assert (out[others] == 3.0).all()
    out[...] = 2.0
    share = np.random.default_rng(0).random(90).astype(np.float32)
    convolve(device, operands, out, ADD, share=share, total=total)
    np.testing.assert_allclose(out[places], wanted + 2.0, atol=2e-5)
    np.testing.assert_allclose(total[places], wanted * share[:, None] + 5.0, atol=2e-5)
    assert (out[others] == 2.0).all()
    assert (total[others] == 5.0).all()


@pytest.mark.parametrize("filters", [1, 16, 96])
@pytest.mark.parametrize("count", [-1, 0, 1, 64, 89, 200])
def test_a_count_on_the_device_says_how_many_are_meant(
    device: ctypes.CDLL, filters: int, count: int
) -> None:
    operands = given(8, filters, 90)
    operands.positions[max(count, 0) :] = 10**12  # nobody may look there
    out = np.full((90, filters), 7.0, np.float32)
    meant = operands._replace(positions=operands.positions[: max(count, 0)])

    convolve(device, operands, out, count=count)

    np.testing.assert_allclose(out[: len(meant.positions)], meant.wanted(), atol=2e-5)
    assert (out[len(meant.positions) :] == 7.0).all()


@pytest.mark.parametrize("filters", [1, 16, 32, 64])
def test_bits_do_not_depend_on_the_list(device: ctypes.CDLL, filters: int) -> None:
    operands = given(17, filters, 150)
    whole = np.zeros((150, filters), np.float32)
    convolve(device, operands, whole)

    for first, last in ((0, 1), (3, 140), (149, 150)):
        part = operands._replace(positions=operands.positions[first:last].copy())
        out = np.zeros((last - first, filters), np.float32)
        convolve(device, part, out)
        np.testing.assert_array_equal(out, whole[first:last])


@pytest.mark.parametrize("off", [1, 2])
@pytest.mark.parametrize("filters", [16, 64])
def test_operands_need_no_alignment(device: ctypes.CDLL, off: int, filters: int) -> None:
    operands = given(8, filters, 40)
    operands = operands._replace(rows=aligned(operands.rows, off))
    out = aligned(np.zeros((40, filters), np.float32), off)

    convolve(device, operands, out)

    np.testing.assert_allclose(out, operands.wanted(), atol=2e-5)


@pytest.mark.parametrize("filters", [1, 16, 64])
def test_nan_reaches_the_results_of_its_window_alone(device: ctypes.CDLL, filters: int) -> None:
    operands = given(4, filters, 200)
    operands.rows[300, 2] = np.nan
    out = np.zeros((200, filters), np.float32)

    convolve(device, operands, out, slope=0.1)

    reached = np.isin(operands.positions, 300 - np.array(TAPS))
    assert reached.any()
    assert (np.isnan(out) == reached[:, None]).all()


def test_nothing_listed_and_no_channels(device: ctypes.CDLL) -> None:
    operands = given(4, 16, 0)
    convolve(device, operands, np.zeros((0, 16), np.float32))
    for filters in (1, 20):
        out = np.zeros((9, filters), np.float32)
        empty = given(1, filters, 9)
        empty = empty._replace(rows=empty.rows[:, :0].copy(), weight=empty.weight[:, :0].copy())
        convolve(device, empty, out, slope=0.5)
        np.testing.assert_array_equal(out, np.tile(leaky(empty.bias), (9, 1)))


def leaky(values: np.ndarray) -> np.ndarray:
    return np.where(values < 0, values * np.float32(0.5), values)


def test_the_emulation_counts_reads_outside(device: ctypes.CDLL) -> None:
    """So that the zero faults above mean something."""
    operands = given(4, 16, 20)
    operands.positions[3] = CELLS - 1

    with pytest.raises(AssertionError):
        convolve(device, operands, np.zeros((20, 16), np.float32))


def listed(
    device: ctypes.CDLL, flags: np.ndarray, capacity: int, limit: Optional[int] = None,
    filled: bool = False,
) -> Any:  # fmt: skip
    """The list, -1 where nothing was put, and how many it says there are."""
    places, found = np.full(capacity, -1, np.int64), np.full(1, -1, np.int64)
    many = None if limit is None else np.array([limit], np.int64)
    device.list(
        pointer(flags), pointer(many), ctypes.c_longlong(len(flags)), ctypes.c_longlong(capacity),
        int(filled), pointer(places), pointer(found),
    )  # fmt: skip
    return places, int(found[0])


@pytest.mark.parametrize("cells", [0, 1, 15, 2048, 2049, 5000])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_flags_are_listed_in_order(device: ctypes.CDLL, cells: int, density: float) -> None:
    flags = (np.random.default_rng(cells).random(cells) < density).astype(np.uint8)
    wanted = np.flatnonzero(flags)

    for off in (0, 1):
        room = np.zeros(cells + 32, np.uint8)
        first = -room.ctypes.data % 16 + off
        room[first : first + cells] = flags
        places, found = listed(device, room[first : first + cells], cells + 3)
        assert found == len(wanted)
        np.testing.assert_array_equal(places[:found], wanted)
        assert (places[found:] == -1).all()


def test_a_list_holds_what_fits_and_says_how_many_there_were(device: ctypes.CDLL) -> None:
    flags = np.zeros(4500, np.uint8)
    flags[[3, 40, 2047, 2048, 4499]] = 1

    places, found = listed(device, flags, 3)
    assert (places.tolist(), found) == ([3, 40, 2047], 5)
    places, found = listed(device, flags, 7, filled=True)
    assert (places.tolist(), found) == ([3, 40, 2047, 2048, 4499, 0, 0], 5)
    places, found = listed(device, flags, 7, limit=2048)
    assert (places.tolist(), found) == ([3, 40, 2047, -1, -1, -1, -1], 3)
    places, found = listed(device, flags, 2, limit=9999)
    assert (places.tolist(), found) == ([3, 40], 5)


@pytest.mark.parametrize("count", [None, 0, 30])
def test_near_cells_are_marked_where_they_are_inside(
    device: ctypes.CDLL, count: Optional[int]
) -> None:
    draw = np.random.default_rng(1)
    places, inside = draw.permutation(CELLS)[:60].astype(np.int64), draw.random(CELLS) < 0.7
    flags = np.full(CELLS, 9, np.uint8)
    taps = np.array(TAPS, np.int64)

    device.near(
        pointer(places), pointer(None if count is None else np.array([count], np.int64)),
        ctypes.c_longlong(60), pointer(taps), 9, pointer(inside), ctypes.c_longlong(CELLS),
        pointer(flags),
    )  # fmt: skip

    cells = (places[:count, None] + taps).ravel()
    wanted = np.zeros(CELLS, np.uint8)
    wanted[cells[(cells >= 0) & (cells < CELLS)]] = 1
    np.testing.assert_array_equal(flags, wanted * inside)
