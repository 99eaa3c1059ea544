"""Adaptive depth at the positions that need it: the answers of the masked dense network."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sact_cases import images_of, lively

from narrowgauge_contract.errors import BadValueError
from narrowgauge_kernels.library import has_kernels
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.anytime.sparse_positions import (
    Grid,
    add_at,
    convolve_at,
    matrix_of,
    set_at,
)  # fmt: skip
from narrowgauge_lab.anytime.systems.breaking_even import (
    Case,
    Point,
    blobs,
    break_even,
    measure_shares,
)  # fmt: skip
from narrowgauge_lab.anytime.systems.fixed_sact import FixedSact, Room, compact
from narrowgauge_lab.anytime.systems.folded import FoldedPlain
from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet, Thought
from narrowgauge_lab.anytime.systems.sparse_sact import SparseSact, SparseUnit
from narrowgauge_lab.measure import TimingPlan

CPU = torch.device("cpu")
#: By torch's operators, and by the compiled loops where they are built.
WAYS = [
    False,
    pytest.param(True, marks=pytest.mark.skipif(not has_kernels("cpu"), reason="no kernels built")),
]


def _same(found: Thought, wanted: Thought) -> None:
    assert torch.allclose(found.logits, wanted.logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(found.macs, wanted.macs)
    assert torch.allclose(found.active, wanted.active)
    for one, other in zip(found.steps, wanted.steps):
        assert torch.equal(one, other)
    for one, other in zip(found.ponder, wanted.ponder):
        assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("bias", [-50.0, -0.7, 50.0])
@pytest.mark.parametrize("batch", [1, 5])
def test_sparse_gives_what_masked_dense_gives(compiled: bool, bias: float, batch: int) -> None:
    """Where nobody halts, some do, and everybody does at once."""
    net, images = lively(bias=bias), images_of(batch)
    with torch.no_grad():
        wanted = net.think(images)

    sparse = SparseSact(net, compiled=compiled)

    assert sparse.by == ("narrowgauge_kernels" if compiled else "torch")
    _same(sparse.think(images), wanted)
    assert torch.allclose(sparse(images), wanted.logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("compiled", WAYS)
def test_units_may_be_computed_densely_from_some_share_on(compiled: bool) -> None:
    net, images = lively(), images_of(3)
    with torch.no_grad():
        wanted = net.think(images)

    _same(SparseSact(net, dense_from=0.5, compiled=compiled).think(images), wanted)


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("dense_from", [2.0, 0.0])
def test_no_images_have_no_answers(compiled: bool, dense_from: float) -> None:
    net, none = lively(), torch.zeros(0, 3, 32, 32)
    with torch.no_grad():
        wanted = net.think(none)
    sparse = SparseSact(net, dense_from, compiled)

    assert sparse(none).shape == wanted.logits.shape == (0, 10)
    found = sparse.think(none)
    assert found.macs.shape == (0,)
    assert [each.shape for each in found.ponder] == [each.shape for each in wanted.ponder]


@pytest.mark.parametrize("compiled", WAYS)
def test_no_images_have_no_answers_by_lists_of_fixed_capacity_either(compiled: bool) -> None:
    fixed = FixedSact(lively(), images_of(2, 32), compiled=compiled)
    logits, short = fixed(torch.zeros(0, 3, 32, 32))

    assert logits.shape == fixed.answer(torch.zeros(0, 3, 32, 32)).shape == (0, 10)
    assert not bool(short)


def test_each_block_may_be_dense_from_another_share_on(monkeypatch: pytest.MonkeyPatch) -> None:
    net, images = lively(bias=-50.0), images_of(2)  # nobody halts
    asked = []
    dense = SparseUnit.add_from_everywhere

    def noting(unit: SparseUnit, *given: Any) -> None:
        asked.append(unit.scale.numel())
        dense(unit, *given)

    monkeypatch.setattr(SparseUnit, "add_from_everywhere", noting)
    sparse = SparseSact(net, dense_from=(2.0, 0.5, 2.0))
    with torch.no_grad():
        wanted = net.think(images)

    _same(sparse.think(images), wanted)
    assert asked == [16, 16], "the units of the second block, but the first one"
    with pytest.raises(BadValueError, match="2 shares to be dense from, for 3 blocks"):
        SparseSact(net, dense_from=(0.5, 0.5))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("batch", [0, 1, 3])
def test_the_folded_plain_network_is_the_plain_one(layout: torch.memory_format, batch: int) -> None:
    net, images = lively("plain"), images_of(batch)
    with torch.no_grad():
        wanted = net.think(images).logits
    kept = images.clone()

    folded = FoldedPlain(net, layout)

    assert torch.allclose(folded(images), wanted, atol=1e-4, rtol=1e-4)
    assert torch.equal(images, kept)
    assert torch.equal(folded(images), folded(images)), "nothing is left over from a call"


@pytest.mark.parametrize("kind", ["act", "sact"])
def test_networks_that_halt_are_not_folded(kind: str) -> None:
    with pytest.raises(BadValueError, match="the plain one"):
        FoldedPlain(lively(kind), torch.contiguous_format)


def test_later_weights_do_not_matter() -> None:
    net, images = lively(), images_of(2)
    sparse = SparseSact(net)
    before = sparse(images)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            if name.startswith("blocks"):
                parameter.add_(1.0)

    assert torch.equal(sparse(images), before)


@pytest.mark.parametrize("kind", ["plain", "act"])
def test_networks_without_positions_to_leave_out_are_refused(kind: str) -> None:
    with pytest.raises(BadValueError, match="no positions to leave out"):
        SparseSact(lively(kind))


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize(("channels", "filters"), [(16, 16), (3, 5), (20, 1)])
def test_convolutions_at_positions_are_those_of_the_whole_map(
    compiled: bool, channels: int, filters: int
) -> None:
    generator = torch.Generator().manual_seed(channels)
    maps = torch.randn(2, channels, 6, 7, generator=generator)
    weight = torch.randn(filters, channels, 3, 3, generator=generator)
    bias, scale = torch.randn(filters), torch.rand(filters) + 0.5
    grid = Grid(2, 6, 7, CPU, compiled)
    rows = grid.rows(channels, maps)
    grid.images(rows).copy_(maps.permute(0, 2, 3, 1))
    chosen = torch.rand(2, 6, 7, generator=generator) < 0.4
    positions = grid.everywhere[chosen.view(-1)]
    matrix = matrix_of(weight, scale, bias, compiled)
    whole = F.conv2d(maps, weight * scale.view(-1, 1, 1, 1), bias, padding=1)
    wanted = F.leaky_relu(whole, 0.1).permute(0, 2, 3, 1)[chosen]

    found = convolve_at(grid, rows, positions, matrix, 0.1)
    out, total = grid.rows(filters, maps), grid.rows(filters, maps)
    set_at(grid, rows, positions, matrix, 0.1, out)

    assert torch.allclose(found, wanted, atol=1e-4)
    assert torch.allclose(grid.images(out)[chosen], wanted, atol=1e-4)
    assert float(grid.images(out)[~chosen].abs().sum()) == 0.0
    state, share = torch.ones_like(out), torch.rand(len(positions))
    add_at(grid, rows, positions, matrix, share, state, total)
    added = whole.permute(0, 2, 3, 1)[chosen]
    assert torch.allclose(grid.images(state)[chosen], added + 1, atol=1e-4)
    assert torch.allclose(grid.images(total)[chosen], added * share.view(-1, 1), atol=1e-4)


@pytest.mark.parametrize("compiled", WAYS)
def test_dilated_positions_stay_within_their_image(compiled: bool) -> None:
    grid = Grid(2, 4, 5, CPU, compiled)
    mask = torch.zeros(2, 1, 4, 5)
    mask[0, 0, 3, 4] = mask[1, 0, 0, 0] = mask[1, 0, 2, 2] = 1.0
    wanted = F.max_pool2d(mask, 3, stride=1, padding=1).view(-1) > 0

    found = grid.dilated(grid.everywhere[mask.view(-1) > 0])

    assert torch.equal(found, grid.everywhere[wanted])
    assert grid.per_image(found).tolist() == [4.0, 12.0]
    assert torch.equal(grid.near_to(grid.everywhere[mask.view(-1) > 0]).exact(), found)


@pytest.mark.parametrize("bias", [-50.0, 50.0])
@pytest.mark.parametrize("compiled", WAYS)
def test_lists_of_fixed_capacity_where_nobody_halts_or_everybody(
    compiled: bool, bias: float
) -> None:
    net, images = lively(bias=bias), images_of(3)
    with torch.no_grad():
        wanted = net.think(images).logits

    logits, short = FixedSact(net, images, compiled=compiled)(images)

    assert not bool(short)
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=1e-4)


def test_lists_of_fixed_capacity_hold_what_fits_and_say_what_does_not() -> None:
    flags = torch.tensor([0, 1, 1, 0, 1], dtype=torch.bool)
    values = torch.tensor([10, 11, 12, 13, 14])

    for capacity, wanted, short in ((3, [11, 12, 14], False), (5, [11, 12, 14, 7, 7], False),
                                    (2, [11, 12], True)):  # fmt: skip
        (found,), used, few = compact(flags, (values,), (7,), capacity)
        assert found.tolist() == wanted
        assert used.tolist() == [number < 3 for number in range(capacity)]
        assert bool(few) is short


@pytest.mark.parametrize("compiled", WAYS)
@pytest.mark.parametrize("room", [Room(0.01, 0.5), Room(1.0, 0.01)])
def test_room_for_all_gives_the_answer_and_too_little_is_said_and_mended(
    compiled: bool, room: Room
) -> None:
    net, images = lively(), images_of(4)
    with torch.no_grad():
        wanted = net.think(images).logits
    fixed = FixedSact(net, images, margin=1.0, compiled=compiled)

    logits, short = fixed(images)

    assert fixed.by == ("narrowgauge_kernels" if compiled else "torch")
    assert not bool(short)
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=1e-4)
    assert any(each.own < 0.9 for line in fixed.rooms for each in line)
    fixed.rooms[0][0] = room
    _, short = fixed(images)
    assert bool(short)
    assert torch.allclose(fixed.answer(images), wanted, atol=1e-4, rtol=1e-4)


def test_lists_of_fixed_capacity_keep_what_graphs_read_however_many_shapes_come() -> None:
    """A captured pass has the addresses of its grids."""
    fixed = FixedSact(lively(), images_of(1), compiled=False)
    grids = fixed._grids
    maps = torch.zeros(1, 4, 4, 2)
    first = grids.of(maps)

    for batch in range(2, 40):
        grids.of(maps.expand(batch, 4, 4, 2))

    assert grids.of(maps) is first


def test_a_margin_of_nothing_is_refused() -> None:
    with pytest.raises(BadValueError, match="margin"):
        FixedSact(lively(), images_of(1), margin=0.0)


@pytest.mark.parametrize("share", [0.1, 0.5, 1.0])
def test_blobs_have_their_share_and_short_edges(share: float) -> None:
    mask = blobs(4, 16, share, torch.Generator().manual_seed(0))
    near = F.max_pool2d(mask.float().unsqueeze(1), 3, stride=1, padding=1)

    assert mask.flatten(1).sum(1).tolist() == [round(share * 256)] * 4
    strewn = torch.rand(4, 1, 16, 16, generator=torch.Generator().manual_seed(0)) < share
    edges = F.max_pool2d(strewn.float(), 3, stride=1, padding=1)
    assert float(near.mean()) <= float(edges.mean())


def test_a_break_even_is_measured() -> None:
    plan = TimingPlan(limit_s=0.02, warm_up_limit_s=0.01)

    points = measure_shares(Case(8, 8, 2), CPU, plan, shares=(0.25, 1.0), pairs=2)

    assert [point.share for point in points] == [0.25, 1.0]
    assert points[0].near > points[0].share
    assert points[1].near == 1.0
    assert all(point.sparse_s and point.dense_s for point in points)
    assert 0.0 <= break_even(points) <= 1.0


@pytest.mark.parametrize(
    ("ratios", "wanted"), [((0.9, 0.5), 0.0), ((2.0, 1.5), 1.0), ((2.0, 0.5), 0.5 + 0.5 * 2 / 3)]
)
def test_the_break_even_is_where_the_ratio_crosses_one(ratios: Any, wanted: float) -> None:
    points = [
        Point(share, share, share, (1.0,), (ratio,)) for share, ratio in zip((0.5, 1.0), ratios)
    ]

    assert break_even(points) == pytest.approx(wanted)


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_shares_that_are_none_are_refused(share: float) -> None:
    with pytest.raises(BadValueError, match="no shares"):
        measure_shares(Case(8, 8, 1), CPU, TimingPlan(), shares=(share,))


@pytest.fixture
def ieee_float32() -> Iterator[None]:
    """Neither cuDNN nor cuBLAS in TF32, which is not what the compiled loops compute."""
    with tf32_flags.tf32_set_to(False):
        yield


#: As `WAYS`, on a GPU; without kernels for it the second fails, because GPU hosts build them.
GPU_WAYS = [False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("bias", [-50.0, -0.7, 50.0])
@pytest.mark.parametrize("compiled", GPU_WAYS)
@pytest.mark.usefixtures("ieee_float32")
def test_on_a_gpu_sparse_thinks_what_masked_dense_thinks(compiled: bool, bias: float) -> None:
    device = torch.device("cuda")
    net, images = lively(bias=bias).to(device), images_of(5).to(device)
    with torch.no_grad():
        wanted = net.think(images)
    sparse = SparseSact(net, compiled=compiled)

    found = sparse.think(images)

    assert torch.allclose(found.logits, wanted.logits, atol=1e-3, rtol=1e-3)
    assert torch.allclose(found.macs, wanted.macs, rtol=1e-2)
    assert torch.allclose(sparse(images), wanted.logits, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", GPU_WAYS)
@pytest.mark.usefixtures("ieee_float32")
def test_on_a_gpu_sparse_gives_what_dense_gives_and_fixed_lists_wait_for_nothing(
    compiled: bool,
) -> None:
    device = torch.device("cuda")
    net, images = lively().to(device), images_of(8).to(device)
    with torch.no_grad():
        wanted = net.think(images).logits
    found = SparseSact(net, compiled=compiled)(images)
    assert torch.allclose(found, wanted, atol=1e-3, rtol=1e-3)
    fixed = FixedSact(net, images, compiled=compiled)
    fixed(images)  # what it keeps is made here
    torch.cuda.synchronize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls the mode a prototype
            torch.cuda.set_sync_debug_mode("error")
        logits, short = fixed(images)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not bool(short)
    assert torch.allclose(logits, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", GPU_WAYS)
@pytest.mark.usefixtures("ieee_float32")
def test_on_a_gpu_a_pass_of_fixed_lists_is_captured(compiled: bool) -> None:
    device = torch.device("cuda")
    net, images = lively().to(device), images_of(8).to(device)
    fixed = FixedSact(net, images, compiled=compiled)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            wanted, _ = fixed(images)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        logits, short = fixed(images)
    graph.replay()
    torch.cuda.synchronize()

    assert not bool(short)
    assert torch.allclose(logits, wanted, atol=1e-4, rtol=1e-4)


@pytest.mark.gpu
def test_on_a_gpu_near_lists_are_those_of_torch() -> None:
    device = torch.device("cuda")
    ours, theirs = (Grid(3, 33, 40, device, compiled) for compiled in (True, False))
    chosen = torch.rand(3 * 33 * 40, generator=torch.Generator().manual_seed(0)) < 0.1
    positions = theirs.everywhere[chosen.to(device)]

    listed = ours.near_to(positions)

    assert listed.count is not None
    assert len(listed.positions) == len(ours.everywhere)
    assert torch.equal(listed.exact(), theirs.dilated(positions))
    assert torch.equal(ours.dilated(positions), theirs.dilated(positions))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.usefixtures("ieee_float32")
def test_on_a_gpu_half_of_the_positions_take_less_time_than_all() -> None:
    """The target of sparse inference: batch 256, at most half of the positions, by the compiled
    loops against the faster of cuDNN's layouts, both in IEEE float32."""
    device = torch.device("cuda")
    found: Dict[str, Dict[str, Any]] = {}
    for channels, size in ((16, 32), (32, 16), (64, 8)):
        case = Case(channels, size, 256)
        (point,) = measure_shares(
            case, device, TimingPlan(limit_s=2.0), shares=(0.5,), compiled=True
        )
        found[str(case)] = point.to_fact()
        assert point.way == "cuda-graph"
    ratios = [each["ratio"] for each in found.values()]
    print(found)
    assert np.exp(np.mean(np.log(ratios))) > 1.0, found


def test_a_network_of_the_published_size_agrees_in_full() -> None:
    torch.manual_seed(0)
    net = AdaptiveResNet("sact").eval()
    images = images_of(2, 32)
    with torch.no_grad():
        wanted = net.think(images)

    assert torch.allclose(SparseSact(net)(images), wanted.logits, atol=1e-3, rtol=1e-3)
