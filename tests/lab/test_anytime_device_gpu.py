"""Decisions on the device held against the host's, on a GPU."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
from exit_cases import Toy, fresh, require_mixed, splitting, toy

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import precision
from narrowgauge_lab.anytime.adaptive import adaptive, masked
from narrowgauge_lab.anytime.buckets import BucketedExits
from narrowgauge_lab.anytime.conditional import why_no_switch, why_not
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.deadline import deadline, measure_stages
from narrowgauge_lab.anytime.device_exit import (
    CapturedStages,
    ConditionalExits,
    EagerExits,
    SteppedExits,
    all_stages,
    make_exits,
)
from narrowgauge_lab.anytime.network import Answer, State
from narrowgauge_lab.anytime.policies import Policy, parse
from narrowgauge_lab.anytime.replayed import replayed_or_why

pytestmark = pytest.mark.gpu

CUDA = torch.device("cuda")
POLICIES = (
    "entropy:1.37", "entropy-normalised:0.99,0.2", "max-probability:0.3", "margin:0.03",
    "patience:1", "max-probability:0", "max-probability:inf",
)  # fmt: skip


@pytest.fixture(autouse=True)
def ieee() -> None:
    """Without TF32: batches of other sizes differ by its rounding, and who leaves with them."""
    precision.enter("fp32", CUDA)


def images(count: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 6, 6, generator=generator).cuda()


def captured(net: Toy, x: torch.Tensor, policy: Policy) -> CapturedStages:
    return CapturedStages(net, x, policy, exit_costs(net, x[:1]))


def both_ways(net: Toy, x: torch.Tensor, policy: Policy) -> Tuple[ConditionalExits, SteppedExits]:
    """Each with stages of its own: those of the first set conditions of its graph."""
    return ConditionalExits(captured(net, x, policy)), SteppedExits(captured(net, x, policy))


def needs_nodes() -> None:
    lacking = why_not(CUDA)
    if lacking:
        pytest.skip(lacking)


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("text", POLICIES)
def test_device_and_host_decide_alike(text: str, batch: int) -> None:
    needs_nodes()
    net, policy = toy().cuda(), parse(text)
    device, host = both_ways(net, images(batch), policy)
    for seed in range(6):
        x = images(batch, seed)
        wanted = adaptive(net, x, policy)
        for way in (device, host):
            got = way(x)
            assert got.exits.tolist() == wanted.exits.tolist()
            assert torch.allclose(got.logits, wanted.logits, atol=1e-4)
            assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
def test_some_of_a_batch_leave_and_some_go_on_at_eight_exits(kind: str) -> None:
    needs_nodes()
    net, x = fresh(exits=8).cuda(), images(16)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    wanted = adaptive(net, x, policy, costs)
    require_mixed(wanted.exits)
    # Captured with other images: `begin` makes a tensor of its own, which has to follow these.
    other = images(16, seed=9)
    packed = [BucketedExits(net, other, policy, costs, each) for each in (True, False)]
    for way in (*both_ways(net, other, policy), *packed):
        for _ in range(2):
            got = way(x)
            assert got.exits.tolist() == wanted.exits.tolist()
            assert torch.allclose(got.logits, wanted.logits, rtol=1e-3, atol=1e-4)
            assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_that_leaves_in_the_middle_ends_there(batch: int) -> None:
    needs_nodes()
    net, policy = fresh(exits=8).cuda(), parse("margin:inf,inf,inf,0,inf,inf,inf")
    x = images(batch, seed=5)
    packed = BucketedExits(net, images(batch), policy, exit_costs(net, x[:1]))
    for way in (*both_ways(net, images(batch), policy), packed):
        got = way(x)
        assert got.exits.tolist() == [3] * batch
        assert torch.allclose(got.logits, net(x)[3], rtol=1e-3, atol=1e-4)


def test_no_images_are_answered_with_none() -> None:
    needs_nodes()
    net, x = toy().cuda(), images(2)
    for way in both_ways(net, x, parse("entropy:1")):
        got = way(x[:0])
        assert got.logits.shape == (0, 4)
        assert got.exits.tolist() == got.macs.tolist() == []


def test_the_device_really_stops() -> None:
    needs_nodes()
    net = Counting().cuda().eval()
    x = images(1)
    exits = ConditionalExits(captured(net, x, parse("max-probability:0")))
    net.runs.zero_()
    for _ in range(3):
        exits(x)
    assert net.runs.tolist() == [3, 0, 0]
    onward = ConditionalExits(captured(net, x, parse("max-probability:inf")))
    net.runs.zero_()
    onward(x)
    assert net.runs.tolist() == [1, 1, 1]
    net.runs.zero_()
    straight = all_stages(captured(net, x, parse("max-probability:0")))
    net.runs.zero_()
    straight.launch()
    assert net.runs.tolist() == [1, 1, 1]


def test_the_device_chooses_how_many_are_computed() -> None:
    lacking = why_no_switch(CUDA)
    if lacking:
        pytest.skip(lacking)
    torch.manual_seed(0)
    net, x = Counting(exits=8).cuda().eval(), images(40)
    with torch.no_grad():
        for weight in net.parameters():
            weight.mul_(2.5)
    for policy in (splitting(net, x, "margin"), parse("margin:inf,inf,0,inf,inf,inf,inf")):
        costs = exit_costs(net, x[:1])
        exits = BucketedExits(net, images(40, seed=9), policy, costs)
        assert "the device chooses by conditional graph nodes, one kernel" in exits.description
        for seed in (1, 5, 6, 1):
            given = images(40, seed)
            wanted = adaptive(net, given, policy, costs)
            net.images.zero_()
            got = exits(given)
            assert got.exits.tolist() == wanted.exits.tolist()
            assert got.macs.tolist() == wanted.macs.tolist()
            assert torch.allclose(got.logits, wanted.logits, rtol=1e-3, atol=1e-4)
            came = [int((wanted.exits >= number).sum()) for number in range(8)]
            sizes = [min(size for size in exits.sizes if size >= each) for each in came if each]
            assert net.images.tolist() == [40, *sizes[1:], *[0] * came.count(0)]


class Counting(Toy):
    """Counts on the device how often each stage ran there, and for how many images."""

    def __init__(self, exits: int = 3) -> None:
        super().__init__(exits)
        self.register_buffer("runs", torch.zeros(exits, dtype=torch.int64))
        self.register_buffer("images", torch.zeros(exits, dtype=torch.int64))

    def advance(self, exit: int, state: State, head: bool = True) -> Answer:
        self.runs[exit : exit + 1].add_(1)
        self.images[exit : exit + 1].add_(state[0].shape[0])
        return super().advance(exit, state, head)


def test_eight_exits_nest() -> None:
    needs_nodes()
    net = toy(exits=8).cuda()
    policy = parse("patience:4")
    exits = ConditionalExits(captured(net, images(1), policy))
    for seed in range(8):
        x = images(1, seed)
        assert exits(x).exits.tolist() == adaptive(net, x, policy).exits.tolist()


def test_nan_goes_to_the_last_exit() -> None:
    needs_nodes()
    net = toy().cuda()
    exits = ConditionalExits(captured(net, images(1), parse("max-probability:0")))
    assert exits(images(1)).exits.tolist() == [0]
    assert exits(torch.full_like(images(1), float("nan"))).exits.tolist() == [2]
    assert exits(images(1)).exits.tolist() == [0]


def test_images_of_another_shape_are_refused() -> None:
    net = toy().cuda()
    stages = captured(net, images(2), parse("entropy:1"))
    with pytest.raises(BadValueError, match="captured with"):
        SteppedExits(stages)(images(3))


def test_the_best_way_is_taken_and_named() -> None:
    exits = make_exits(toy().cuda(), images(1), parse("entropy:1"))
    if why_not(CUDA):
        assert isinstance(exits, SteppedExits)
        assert why_not(CUDA) in exits.description
    else:
        assert exits.description == "conditional graph node, one kernel decides"


def test_a_network_that_reads_the_device_runs_launch_by_launch() -> None:
    class Reads(Toy):
        def advance(self, exit: int, state: State, head: bool = True) -> Answer:
            float(state[0].sum())
            return super().advance(exit, state, head)

    net, x = Reads().cuda().eval(), images(3)
    exits = make_exits(net, x, parse("max-probability:0.3"))
    assert isinstance(exits, EagerExits)
    assert "could not be captured" in exits.description
    wanted = masked(net, x, parse("max-probability:0.3"))
    assert exits(x).exits.tolist() == wanted.exits.tolist()


def test_compaction_and_masking_agree_on_the_device() -> None:
    net, x, policy = toy().cuda(), images(64), parse("max-probability:0.3")
    fast, slow = adaptive(net, x, policy), masked(net, x, policy)
    assert fast.exits.tolist() == slow.exits.tolist()
    assert torch.allclose(fast.logits, slow.logits, atol=1e-4)
    assert adaptive(net, x[:0], policy).logits.shape == (0, 4)


def test_costs_on_the_device_are_those_of_the_host() -> None:
    costs: ExitCosts = exit_costs(toy().cuda(), images(1))
    assert costs == exit_costs(toy(), images(1).cpu())


@pytest.mark.parametrize("text", POLICIES)
def test_compaction_by_captured_sizes_answers_as_the_plain_pass(text: str) -> None:
    net, policy, x = toy().cuda(), parse(text), images(64)
    exits = BucketedExits(net, x, policy, exit_costs(net, x[:1]))
    for seed in (1, 2, 3, 1):
        x = images(64, seed)
        wanted, got = adaptive(net, x, policy), exits(x)
        assert got.exits.tolist() == wanted.exits.tolist()
        assert torch.allclose(got.logits, wanted.logits, atol=1e-4)
        assert got.macs.tolist() == wanted.macs.tolist()
    with pytest.raises(BadValueError, match="captured with"):
        exits(x[:3])


@pytest.mark.parametrize("batch", [1, 5])
def test_replayed_stages_answer_as_the_network_and_keep_deadlines(batch: int) -> None:
    net = fresh(exits=4).cuda()
    stages, way = replayed_or_why(net, images(batch, seed=9))
    assert way == "captured stages"
    for seed in range(3):
        x = images(batch, seed)
        for got, wanted in zip(stages(x), net(x)):
            assert torch.allclose(got, wanted, rtol=1e-3, atol=1e-4)
    times = measure_stages(stages, x, passes=5)
    last = deadline(stages, x, 60_000, times)
    assert (last.exit, last.late) == (3, False)
    assert torch.allclose(last.logits, net(x)[3], rtol=1e-3, atol=1e-4)
    first = deadline(stages, x, 0, times)
    assert (first.exit, first.late) == (0, True)
    assert torch.allclose(first.logits, net(x)[0], rtol=1e-3, atol=1e-4)
