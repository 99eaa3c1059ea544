"""The convolution at listed positions: against its reference, in place, and what it refuses."""

from __future__ import annotations

from typing import Any, Dict, Tuple

import pytest
import torch

from narrowgauge_kernels import library
from narrowgauge_kernels.position_conv import (
    add_at,
    flagged,
    near_list,
    packed,
    position_conv,
    position_conv_example,
    position_conv_ref,
    positions_near,
    run_packed,
    set_at,
)  # fmt: skip

pytestmark = pytest.mark.skipif(not library.has_kernels("cpu"), reason="no kernels built")

TAPS = [-7, -6, -5, -1, 0, 1, 5, 6, 7]


def _inputs(channels: int, filters: int, count: int = 29) -> Tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(channels * filters)
    rows = torch.randn(60, channels, generator=generator)
    positions = torch.randperm(46, generator=generator)[:count] + 7
    weight = torch.randn(9, channels, filters, generator=generator) * 0.1
    return rows, positions, weight, torch.randn(filters, generator=generator)


def _instruction_sets() -> Tuple[str, ...]:
    found = []
    rows, positions, weight, bias = _inputs(2, 2)
    library.require("cpu")
    for name in ("generic", "avx2", "avx512", "neon"):
        try:
            torch.ops.narrowgauge.position_conv(
                rows, positions, packed(weight), bias, TAPS, 1.0, isa=name
            )
        except RuntimeError:
            continue
        found.append(name)
    assert "generic" in found, "which every CPU has"
    return tuple(found)


@pytest.mark.parametrize("channels", [1, 16, 19])
@pytest.mark.parametrize("filters", [1, 5, 16, 48, 64, 133])
def test_results_are_those_of_the_reference(channels: int, filters: int) -> None:
    rows, positions, weight, bias = _inputs(channels, filters)
    wanted = position_conv_ref(rows.double(), positions, weight.double(), bias.double(), TAPS, 0.1)

    found = position_conv(rows, positions, weight, bias, TAPS, 0.1)

    assert torch.allclose(found.double(), wanted, atol=1e-5)
    assert bool((wanted < 0).any())


@pytest.mark.parametrize("filters", [1, 16, 100])
def test_bits_depend_neither_on_the_instruction_set_nor_on_the_list(filters: int) -> None:
    rows, positions, weight, bias = _inputs(17, filters)
    given = (packed(weight), bias, TAPS, 1.0)
    whole = run_packed(rows, positions, *given)

    for name in _instruction_sets():
        found = torch.ops.narrowgauge.position_conv(rows, positions, *given, isa=name)
        assert torch.equal(found, whole), name
    for index in (0, 11, 28):
        alone = run_packed(rows, positions[index : index + 1], *given)
        assert torch.equal(alone[0], whole[index])


def test_many_positions_by_several_threads_give_the_same_bits() -> None:
    rows, _, weight, bias = _inputs(16, 32)
    rows = torch.randn(5000, 16)
    positions = torch.arange(7, 4990)
    before = torch.get_num_threads()
    found = []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(run_packed(rows, positions, packed(weight), bias, TAPS, 0.5))
    finally:
        torch.set_num_threads(before)

    assert torch.equal(found[0], found[1])


@pytest.mark.parametrize("filters", [1, 20, 64])
def test_results_are_put_and_added_where_they_belong(filters: int) -> None:
    rows, positions, weight, bias = _inputs(8, filters)
    wanted = position_conv(rows, positions, weight, bias, TAPS)
    out, total = torch.full((60, filters), 3.0), torch.full((60, filters), 5.0)
    share = torch.rand(len(positions))

    set_at(rows, positions, packed(weight), bias, TAPS, 0.2, out)

    others = torch.ones(60, dtype=torch.bool)
    others[positions] = False
    assert torch.equal(out[positions], torch.where(wanted < 0, wanted * 0.2, wanted))
    assert bool((out[others] == 3.0).all())
    state = torch.full((60, filters), 2.0)
    add_at(rows, positions, packed(weight), bias, TAPS, share, state, total)
    assert torch.allclose(state[positions], wanted + 2.0, atol=1e-6)
    assert torch.allclose(total[positions], wanted * share.view(-1, 1) + 5.0, atol=1e-6)
    assert bool((state[others] == 2.0).all())
    assert bool((total[others] == 5.0).all())


def test_no_positions_give_no_results() -> None:
    rows, positions, weight, bias = _inputs(4, 6)

    assert position_conv(rows, positions[:0], weight, bias, TAPS).shape == (0, 6)
    assert positions_near(positions[:0], TAPS, torch.ones(60, dtype=torch.bool)).shape == (0,)


def test_nan_in_a_window_reaches_its_results_alone() -> None:
    rows, _, weight, bias = _inputs(4, 16)
    rows[20] = float("nan")
    positions = torch.arange(7, 53)

    found = position_conv(rows, positions, weight, bias, TAPS, 0.1)

    reached = torch.tensor([any(p + tap == 20 for tap in TAPS) for p in positions.tolist()])
    assert torch.equal(torch.isnan(found).all(1), reached)
    assert torch.equal(torch.isnan(found).any(1), reached)


def test_near_positions_are_in_order_each_once_and_inside() -> None:
    inside = torch.ones(60, dtype=torch.bool)
    inside[::6] = False

    found = positions_near(torch.tensor([20, 21, 8]), [-1, 0, 1, 6], inside)

    assert found.tolist() == [7, 8, 9, 14, 19, 20, 21, 22, 26, 27]


@pytest.mark.parametrize("filters", [1, 20])
@pytest.mark.parametrize("count", [-3, 0, 11, 29, 40])
def test_a_count_says_how_many_positions_are_meant(filters: int, count: int) -> None:
    rows, positions, weight, bias = _inputs(8, filters)
    meant = positions[: max(count, 0)]
    wanted = position_conv(rows, meant, weight, bias, TAPS)
    positions = positions.clone()
    positions[max(count, 0) :] = 10**9  # nobody may look there
    given = (rows, positions, packed(weight), bias, TAPS)
    number = torch.tensor([count])

    found = run_packed(*given, 1.0, number)
    out, state, total = (torch.zeros(60, filters) for _ in range(3))
    set_at(*given, 1.0, out, number)
    add_at(*given, torch.full((29,), 0.5), state, total, number)

    assert found.shape == (29, filters)
    assert torch.equal(found[: len(meant)], wanted)
    for each, scale in ((out, 1.0), (state, 1.0), (total, 0.5)):
        assert torch.equal(each[meant], wanted * scale)
        assert each.abs().sum() == pytest.approx(float((wanted * scale).abs().sum()), rel=1e-4)


def test_lists_have_room_to_spare_or_say_that_they_are_short() -> None:
    flags = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)

    for capacity, count, wanted, number in (
        (5, None, [1, 2, 4, 0, 0], 3), (2, None, [1, 2], 3), (0, None, [], 3),
        (3, 2, [1, 0, 0], 1), (3, 9, [1, 2, 4], 3), (3, -1, [0, 0, 0], 0),
    ):  # fmt: skip
        found, many = flagged(flags, capacity, None if count is None else torch.tensor([count]))
        assert (found.tolist(), many.tolist()) == (wanted, [number])


def test_near_lists_are_the_near_positions() -> None:
    inside = torch.ones(60, dtype=torch.bool)
    inside[::6] = False
    positions = torch.tensor([20, 21, 8])

    found, many = near_list(positions, [-1, 0, 1, 6], inside, 60)
    assert torch.equal(found[: int(many)], positions_near(positions, [-1, 0, 1, 6], inside))
    assert int(found[int(many) :].sum()) == 0
    found, many = near_list(positions, [-1, 0, 1, 6], inside, 4, torch.tensor([2]))
    assert (found.tolist(), many.tolist()) == ([19, 20, 21, 22], [6])


def test_a_count_that_is_none_is_refused() -> None:
    rows, positions, weight, bias = _inputs(4, 4)
    given = (rows, positions, packed(weight), bias, TAPS, 1.0)

    for count in (torch.tensor([1.0]), torch.tensor([1, 2])):
        with pytest.raises(RuntimeError, match="must be one int64 on cpu"):
            run_packed(*given, count)
    with pytest.raises(RuntimeError, match="flags is"):
        flagged(torch.zeros(4), 3)
    with pytest.raises(RuntimeError, match="no room for -1"):
        flagged(torch.zeros(4, dtype=torch.bool), -1)


_BAD: Dict[str, Any] = {
    "float64 rows": ({"rows": torch.zeros(60, 4, dtype=torch.float64)}, "rows is"),
    "rows not contiguous": ({"rows": torch.zeros(4, 60).t()}, "rows is"),
    "int32 positions": ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions is"),
    "a window before the rows": ({"positions": torch.tensor([9, 6])}, "reaches out"),
    "a window behind the rows": ({"positions": torch.tensor([53])}, "reaches out"),
    "another weight": ({"packed_weight": torch.zeros(5)}, "packed has 5 elements"),
    "no taps": ({"taps": []}, "packed has"),
}


@pytest.mark.parametrize("name", list(_BAD))
def test_what_does_not_fit_is_refused(name: str) -> None:
    change, message = _BAD[name]
    rows, positions, weight, bias = _inputs(4, 6)
    given: Dict[str, Any] = {
        "rows": rows, "positions": positions, "packed_weight": packed(weight), "bias": bias,
        "taps": TAPS, **change,
    }  # fmt: skip

    with pytest.raises(RuntimeError, match=message):
        run_packed(**given)


def test_rows_that_are_read_may_not_be_written() -> None:
    rows, positions, weight, bias = _inputs(4, 4)

    with pytest.raises(RuntimeError, match="they must be others"):
        set_at(rows, positions, packed(weight), bias, TAPS, 1.0, rows)
    with pytest.raises(RuntimeError, match="has no neighbour"):
        positions_near(torch.tensor([2]), TAPS, torch.ones(60, dtype=torch.bool))


_BUFFER = torch.zeros(61, 4)
_OWN = torch.zeros(60, 4)
_SHARED: Dict[str, Any] = {
    "rows as out": (_BUFFER[:60], (_BUFFER[:60],), "out share memory with the rows"),
    "rows one further as out": (_BUFFER[:60], (_BUFFER[1:],), "out share memory with the rows"),
    "rows one before as out": (_BUFFER[1:], (_BUFFER[:60],), "out share memory with the rows"),
    "rows as state": (_BUFFER[1:], (_BUFFER[:60], _OWN), "state share memory with the rows"),
    "rows as total": (_BUFFER[1:], (_OWN, _BUFFER[:60]), "total share memory with the rows"),
    "state as total": (torch.zeros(60, 4), (_OWN, _OWN), "state and total share memory"),
    "state one further as total": (
        torch.zeros(60, 4), (_BUFFER[:60], _BUFFER[1:]), "state and total share memory",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", list(_SHARED))
def test_what_is_written_has_memory_of_its_own(name: str) -> None:
    rows, written, message = _SHARED[name]
    _, positions, weight, bias = _inputs(4, 4)
    given = (rows, positions, packed(weight), bias, TAPS)
    write = set_at if len(written) == 1 else add_at
    how = 1.0 if len(written) == 1 else torch.ones(len(positions))

    with pytest.raises(RuntimeError, match=message):
        write(*given, how, *written)


def test_views_of_one_buffer_that_only_touch_are_fine() -> None:
    rows, positions, weight, bias = _inputs(4, 4)
    buffer = torch.zeros(180, 4)
    buffer[60:120] = rows

    set_at(buffer[60:120], positions, packed(weight), bias, TAPS, 1.0, buffer[:60])
    share = torch.ones(len(positions))
    add_at(rows, positions, packed(weight), bias, TAPS, share, buffer[60:120], buffer[120:])

    wanted = run_packed(rows, positions, packed(weight), bias, TAPS)
    assert torch.equal(buffer[:60][positions], wanted)
    assert torch.equal(buffer[120:][positions], wanted)


def test_empty_rows_are_written_to_without_a_word() -> None:
    """Empty tensors all begin at address 0, and share nothing."""
    _, positions, weight, bias = _inputs(4, 4)
    none = [torch.zeros(0, 4) for _ in range(3)]
    given = (none[0], positions[:0], packed(weight), bias, TAPS)

    set_at(*given, 1.0, none[1])
    add_at(*given, torch.zeros(0), none[1], none[2])


def test_a_position_that_is_listed_twice_is_read_and_never_written() -> None:
    rows, _, weight, bias = _inputs(4, 4)
    positions = torch.tensor([9, 30, 9])
    given = (rows, positions, packed(weight), bias, TAPS)

    assert torch.equal(run_packed(*given)[0], run_packed(*given)[2])
    with pytest.raises(RuntimeError, match="position 9 is listed twice"):
        set_at(*given, 1.0, torch.zeros(60, 4))
    with pytest.raises(RuntimeError, match="position 9 is listed twice"):
        add_at(*given, torch.ones(3), torch.zeros(60, 4), torch.zeros(60, 4))


def test_the_example_of_the_self_check_fills_no_vector() -> None:
    rows, positions, weight, bias, taps, slope = position_conv_example(torch.Generator())

    assert rows.shape[1] % 16
    assert weight.shape[2] % 16
    assert position_conv(rows, positions, weight, bias, taps, slope).shape == (23, 85)
