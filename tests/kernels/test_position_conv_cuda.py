"""The convolution at listed positions, and the lists, on CUDA. Needs a GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels/test_position_conv_cuda.py
"""

from __future__ import annotations

import contextlib
import warnings
from typing import Any, Iterator, Tuple

import pytest
import torch

from narrowgauge_kernels.position_conv import (
    add_at,
    flagged,
    near_list,
    packed,
    position_conv,
    position_conv_ref,
    positions_near,
    run_packed,
    set_at,
)  # fmt: skip

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

CELLS = 5000
TAPS = [-41, -40, -39, -1, 0, 1, 39, 40, 41]
#: Channels, filters, positions: each panel alone and beside others, tails, and what SACT has.
SHAPES = [
    (16, 16, 4000), (32, 32, 2000), (64, 64, 1000), (16, 16, 1), (19, 16, 130), (3, 16, 129),
    (3, 5, 257), (8, 20, 64), (5, 40, 70), (4, 64, 32), (7, 50, 40), (12, 133, 35), (1, 112, 3),
    (128, 256, 700), (16, 1, 4000), (64, 1, 999), (19, 1, 33), (2, 1, 16),
]  # fmt: skip


def _inputs(channels: int, filters: int, listed: int) -> Tuple[torch.Tensor, ...]:
    """Rows, positions, weight and bias on the GPU."""
    generator = torch.Generator().manual_seed(channels * 1000 + filters)
    rows = torch.randn(CELLS, channels, generator=generator)
    positions = torch.randperm(CELLS - 82, generator=generator)[:listed] + 41
    weight = torch.randn(9, channels, filters, generator=generator) / (3 * channels**0.5)
    bias = torch.randn(filters, generator=generator)
    return tuple(each.cuda() for each in (rows, positions, weight, bias))


def _exact(given: Tuple[torch.Tensor, ...], slope: float = 1.0, taps: Any = TAPS) -> torch.Tensor:
    rows, positions, weight, bias = (each.cpu() for each in given)
    return position_conv_ref(rows.double(), positions, weight.double(), bias.double(), taps, slope)


def _ours(given: Tuple[torch.Tensor, ...], taps: Any = TAPS, slope: float = 1.0) -> torch.Tensor:
    rows, positions, weight, bias = given
    return position_conv(rows, positions, weight, bias, taps, slope)


def _near(found: torch.Tensor, wanted: torch.Tensor, atol: float = 1e-5) -> bool:
    return bool(torch.allclose(found.cpu().double(), wanted, atol=atol, rtol=1e-5))


@contextlib.contextmanager
def nothing_waits() -> Iterator[None]:
    """torch refuses to synchronise, where it can (1.10 and later)."""
    if not hasattr(torch.cuda, "set_sync_debug_mode"):
        yield
        return
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_are_those_of_the_reference(shape: Any) -> None:
    given = _inputs(*shape)

    assert _near(_ours(given, slope=0.1), _exact(given, 0.1))


@pytest.mark.parametrize("taps", [[0], [-1, 2], list(range(-41, 42, 3)), [0] * 256], ids=len)
@pytest.mark.parametrize("filters", [1, 24, 64])
def test_there_may_be_any_taps_up_to_256(taps: Any, filters: int) -> None:
    rows, positions, _, bias = _inputs(6, filters, 50)
    weight = torch.randn(len(taps), 6, filters, device="cuda") / len(taps)
    given = (rows, positions, weight, bias)

    assert _near(_ours(given, taps), _exact(given, taps=taps))


def test_more_taps_are_refused() -> None:
    rows, positions, _, bias = _inputs(6, 16, 50)
    weight = torch.zeros(257, 6, 16, device="cuda")

    with pytest.raises(RuntimeError, match="257 taps; on a GPU there may be 256 at most"):
        position_conv(rows, positions, weight, bias, [0] * 257)


@pytest.mark.parametrize("filters", [1, 6, 16, 32, 36, 64, 112])
def test_results_are_put_and_added_where_they_belong(filters: int) -> None:
    given = _inputs(16, filters, 1500)
    rows, positions, weight, bias = given
    wanted = _exact(given)
    out, total = (torch.full((CELLS, filters), each, device="cuda") for each in (3.0, 5.0))
    others = torch.ones(CELLS, dtype=torch.bool, device="cuda")
    others[positions] = False
    share = torch.rand(len(positions), device="cuda")

    set_at(rows, positions, packed(weight), bias, TAPS, 0.2, out)

    assert _near(out[positions], _exact(given, 0.2))
    assert bool((out[others] == 3.0).all())
    state = torch.full((CELLS, filters), 2.0, device="cuda")
    add_at(rows, positions, packed(weight), bias, TAPS, share, state, total)
    assert _near(state[positions], wanted + 2.0)
    assert _near(total[positions], wanted * share.cpu().double().view(-1, 1) + 5.0)
    assert bool((state[others] == 2.0).all())
    assert bool((total[others] == 5.0).all())


@pytest.mark.parametrize("filters", [1, 16, 100])
@pytest.mark.parametrize("count", [-1, 0, 1, 128, 999, 2000])
def test_a_count_on_the_device_says_how_many_are_meant(filters: int, count: int) -> None:
    rows, positions, weight, bias = _inputs(8, filters, 1000)
    meant = min(max(count, 0), 1000)
    wanted = _exact((rows, positions[:meant], weight, bias))
    number, out = torch.tensor([count]).cuda(), torch.full((CELLS, filters), 7.0).cuda()
    given = (rows, positions, packed(weight), bias, TAPS)

    with nothing_waits():
        found = run_packed(*given, 1.0, number)
        set_at(*given, 1.0, out, number)

    assert _near(found[:meant], wanted)
    assert _near(out[positions[:meant]], wanted)
    assert bool((out[positions[meant:]] == 7.0).all())


@pytest.mark.parametrize("filters", [1, 16, 32, 64, 112])
def test_bits_do_not_depend_on_the_list_nor_on_the_call(filters: int) -> None:
    rows, positions, weight, bias = _inputs(17, filters, 3000)
    given = (packed(weight), bias, TAPS, 1.0)
    whole = run_packed(rows, positions, *given)

    assert torch.equal(run_packed(rows, positions, *given), whole)
    for first, last in ((0, 1), (3, 2040), (2999, 3000)):
        assert torch.equal(run_packed(rows, positions[first:last], *given), whole[first:last])


def test_no_positions_give_no_results() -> None:
    rows, positions, weight, bias = _inputs(4, 6, 10)
    none = positions[:0]

    assert position_conv(rows, none, weight, bias, TAPS).shape == (0, 6)
    assert positions_near(none, TAPS, torch.ones(CELLS, dtype=torch.bool).cuda()).shape == (0,)
    set_at(rows, none, packed(weight), bias, TAPS, 1.0, torch.zeros(CELLS, 6).cuda())
    found, count = flagged(torch.zeros(0, dtype=torch.bool).cuda(), 3)
    assert (found.tolist(), count.tolist()) == ([0, 0, 0], [0])
    torch.cuda.synchronize()


@pytest.mark.parametrize("filters", [1, 16, 64])
def test_nan_in_a_window_reaches_its_results_alone(filters: int) -> None:
    rows, _, weight, bias = _inputs(4, filters, 1)
    rows[2000, 3] = float("nan")
    positions = torch.arange(41, CELLS - 41, device="cuda")

    found = position_conv(rows, positions, weight, bias, TAPS, 0.1)

    reached = ((2000 - positions).view(-1, 1) == torch.tensor(TAPS).cuda()).any(1)
    assert torch.equal(torch.isnan(found).all(1), reached)
    assert torch.equal(torch.isnan(found).any(1), reached)


@pytest.mark.parametrize("off", [1, 2])
def test_operands_need_no_alignment(off: int) -> None:
    given = _inputs(8, 16, 300)
    rows, positions, weight, bias = given
    room = torch.zeros(CELLS * 8 + off, device="cuda")
    room[off:] = rows.view(-1)
    target = torch.zeros(CELLS * 16 + off, device="cuda")[off:].view(CELLS, 16)

    set_at(room[off:].view(CELLS, 8), positions, packed(weight), bias, TAPS, 1.0, target)

    assert _near(target[positions], _exact(given))


def test_what_does_not_fit_is_refused() -> None:
    rows, positions, weight, bias = _inputs(4, 4, 20)
    given = (packed(weight), bias, TAPS)
    out = torch.zeros(CELLS, 4, device="cuda")

    with pytest.raises(RuntimeError, match="rows is"):
        run_packed(rows.t().contiguous().t(), positions, *given)
    with pytest.raises(RuntimeError, match="rows is"):
        run_packed(rows.double(), positions, *given)
    with pytest.raises(RuntimeError, match=r"positions is .* on cpu"):
        run_packed(rows, positions.cpu(), *given)
    with pytest.raises(RuntimeError, match=r"packed is .* on cuda:0"):
        run_packed(rows.cpu(), positions, *given)
    with pytest.raises(RuntimeError, match="must be one int64 on cuda:0"):
        run_packed(rows, positions, *given, 1.0, torch.tensor([3]))
    with pytest.raises(RuntimeError, match=r"out is .* on cpu"):
        set_at(rows, positions, *given, 1.0, out.cpu())
    with pytest.raises(RuntimeError, match="they must be others"):
        set_at(rows, positions, *given, 1.0, rows)
    with pytest.raises(RuntimeError, match="state and total share memory"):
        add_at(rows, positions, *given, torch.ones(20, device="cuda"), out, out)
    with pytest.raises(RuntimeError, match="share has 3 elements"):
        add_at(rows, positions, *given, torch.ones(3, device="cuda"), out, out.clone())
    with pytest.raises(RuntimeError, match="instruction set of the CPU"):
        torch.ops.narrowgauge.position_conv(rows, positions, *given, 1.0, isa="avx2")


@pytest.mark.parametrize("cells", [0, 1, 2048, 2049, 300_000])
@pytest.mark.parametrize("density", [0.0, 0.3, 1.0])
def test_flags_are_listed_in_order(cells: int, density: float) -> None:
    generator = torch.Generator().manual_seed(cells)
    for off in (0, 1):
        flags = (torch.rand(cells + off, generator=generator) < density)[off:]
        on_gpu = torch.zeros(cells + off, dtype=torch.bool, device="cuda")[off:]
        on_gpu.copy_(flags)
        for capacity in (cells + 5, cells // 7):
            for count in (None, cells // 2):
                many = None if count is None else torch.tensor([count])
                wanted = flagged(flags.clone(), capacity, many)
                found = flagged(on_gpu, capacity, None if many is None else many.cuda())
                assert torch.equal(found[0].cpu(), wanted[0])
                assert torch.equal(found[1].cpu(), wanted[1])


@pytest.mark.parametrize("count", [None, 0, 30, 500])
def test_near_lists_are_those_of_the_cpu(count: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    inside = torch.rand(CELLS, generator=generator) < 0.8
    positions = torch.randperm(CELLS - 82, generator=generator)[:60] + 41
    many = None if count is None else torch.tensor([count])

    wanted = near_list(positions, TAPS, inside, 400, many)
    found = near_list(
        positions.cuda(), TAPS, inside.cuda(), 400, None if many is None else many.cuda()
    )

    assert torch.equal(found[0].cpu(), wanted[0])
    assert torch.equal(found[1].cpu(), wanted[1])
    exact = positions_near(positions.cuda(), TAPS, inside.cuda())
    assert torch.equal(exact.cpu(), positions_near(positions, TAPS, inside))


def test_the_current_stream_is_used() -> None:
    """Work queued before, on a stream of our own, is seen: there is no hidden default stream."""
    rows, positions, weight, bias = _inputs(16, 16, 3000)
    given = (positions, packed(weight), bias, TAPS)
    expected = run_packed(rows, *given)
    slow = torch.randn(4096, 4096, device="cuda")
    late, stream = torch.zeros_like(rows), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = torch.mm(slow, slow).clamp(-1, 1)
        late.copy_(rows)
        result = run_packed(late, *given)
    stream.synchronize()

    assert torch.equal(result, expected)


def test_a_cuda_graph_captures_lists_and_what_is_done_with_them() -> None:
    """A unit of sparse inference, whose lists get another length at replay."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    rows, _, weight, bias = _inputs(16, 16, 1)
    weight = packed(weight)
    inside = torch.zeros(CELLS, dtype=torch.bool, device="cuda")
    inside[82:-82] = True
    flags, out = inside & (torch.rand(CELLS, device="cuda") < 0.1), torch.zeros_like(rows)

    def unit() -> torch.Tensor:
        kept, count = flagged(flags, CELLS)
        near, many = near_list(kept, TAPS, inside, CELLS, count)
        out.zero_()
        set_at(rows, near, weight, bias, TAPS, 0.1, out, many)
        return many

    with nothing_waits():
        unit()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        many = unit()
    flags.copy_(inside & (torch.rand(CELLS, device="cuda") < 0.02))
    rows.normal_()
    graph.replay()
    torch.cuda.synchronize()
    captured, length = out.clone(), int(many)
    assert int(unit()) == length
    assert torch.equal(captured, out)
    assert 0 < length < 2000


def test_the_device_of_the_tensors_is_used() -> None:
    """Not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = _inputs(16, 20, 300)
    on_second = tuple(each.to("cuda:1") for each in given)

    found = _ours(on_second)

    assert found.device == torch.device("cuda:1")
    assert torch.cuda.current_device() == 0
    assert torch.equal(found.cpu(), _ours(given).cpu())


def test_offsets_past_two_to_the_31_elements() -> None:
    """The last rows of 2³¹ + 2²⁰ floats, read and written."""
    if torch.cuda.get_device_properties(0).total_memory < 20 * 2**30:
        pytest.skip("needs 20 GiB of device memory")
    cells = 2**31 // 16 + 2**16
    rows, out = (torch.zeros(cells, 16, device="cuda") for _ in range(2))
    _, _, weight, bias = _inputs(16, 16, 1)
    rows[-100:] = torch.randn(100, 16, device="cuda")
    positions = torch.arange(cells - 95, cells - 5, device="cuda")
    taps = [-4, -3, -2, -1, 0, 1, 2, 3, 4]

    set_at(rows, positions, packed(weight), bias, taps, 1.0, out)

    wanted = position_conv(rows[-100:].clone(), torch.arange(5, 95).cuda(), weight, bias, taps)
    assert torch.equal(out[-95:-5], wanted)
    assert not bool(out[: 2**20].any())
