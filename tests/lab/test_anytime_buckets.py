"""Packing who goes on, as the device does it, with plain tensors; captures are the GPU's tests."""

from __future__ import annotations

import pytest
import torch
from exit_cases import fresh, require_mixed, splitting, toy

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.anytime.adaptive import Adaptive, adaptive
from narrowgauge_lab.anytime.buckets import BucketedExits, Packed, ladder
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.fused import MOST_SIZES
from narrowgauge_lab.anytime.policies import parse


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [
        (1, (1,)),
        (3, (1, 2, 3)),
        (8, tuple(range(1, 9))),
        (36, (1, 2, 3, 5, 9, 14, 18, 23, 27, 32, 36)),
        (256, (1, 2, 4, 8, 16, *range(32, 257, 32))),
    ],
)
def test_the_ladder_ends_with_the_batch(batch: int, sizes: tuple) -> None:
    assert ladder(batch) == sizes


def test_a_ladder_has_no_more_sizes_than_a_warp_can_look_at() -> None:
    sizes = ladder(10**9, steps=30)
    assert len(sizes) == MOST_SIZES
    assert sizes == tuple(sorted(set(sizes)))
    assert sizes[-1] == 10**9


def test_who_goes_on_stands_in_front_and_the_rest_points_nowhere() -> None:
    packed = Packed((torch.zeros(5, 2),), (torch.zeros(5),), torch.zeros(5, dtype=torch.int64))
    state = torch.arange(8.0).reshape(4, 2)
    rest = torch.tensor([0, 1, 3, 4])
    onward = torch.tensor([False, True, True, False])
    packed.fill((state,), (torch.tensor([5.0, 6.0, 7.0, 8.0]),), rest, onward)
    assert packed.rest.tolist() == [1, 3, 4, 4, 4]
    assert packed.state[0][:2].tolist() == [[2.0, 3.0], [4.0, 5.0]]
    assert packed.memory[0][:2].tolist() == [6.0, 7.0]
    assert packed.first(2).rest.tolist() == [1, 3]
    # Nobody, and everybody.
    packed.fill((state,), (torch.zeros(4),), rest, torch.zeros(4, dtype=torch.bool))
    assert packed.rest.tolist() == [4] * 5
    packed.fill((state,), (torch.zeros(4),), torch.arange(4), torch.ones(4, dtype=torch.bool))
    assert packed.rest.tolist() == [0, 1, 2, 3, 4]


def images(batch: int, seed: int = 2) -> torch.Tensor:
    return torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))


def require_alike(got: Adaptive, wanted: Adaptive) -> None:
    assert got.exits.tolist() == wanted.exits.tolist()
    assert torch.allclose(got.logits, wanted.logits, rtol=1e-4, atol=1e-5)
    assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("batch", [1, 2, 19])
@pytest.mark.parametrize("text", ["entropy:1.37", "patience:1", "margin:0", "margin:inf"])
def test_the_packed_pass_answers_as_the_plain_one(batch: int, text: str) -> None:
    net, policy = toy(exits=4), parse(text)
    costs = exit_costs(net, images(1))
    exits = BucketedExits(net, images(batch), policy, costs)
    for seed in (2, 3, 2):
        x = images(batch, seed)
        require_alike(exits(x), adaptive(net, x, policy, costs))


@pytest.mark.usefixtures("recorded")
@pytest.mark.parametrize("kind", ["entropy", "entropy-normalised", "max-probability", "margin"])
def test_a_batch_that_leaves_bit_by_bit_at_eight_exits_is_packed(kind: str) -> None:
    net, x = fresh(exits=8), images(19)
    policy, costs = splitting(net, x, kind), exit_costs(net, x[:1])
    wanted = adaptive(net, x, policy, costs)
    require_mixed(wanted.exits)
    exits = BucketedExits(net, images(19, seed=9), policy, costs)
    for _ in range(2):
        require_alike(exits(x), wanted)
        require_alike(exits(images(19, 3)), adaptive(net, images(19, 3), policy, costs))


@pytest.mark.usefixtures("recorded")
def test_stages_run_for_the_smallest_size_that_holds_who_comes() -> None:
    net, x = fresh(exits=4), images(16)
    policy, costs = splitting(net, x, "max-probability"), exit_costs(net, x[:1])
    exits = BucketedExits(net, x, policy, costs)
    left = adaptive(net, x, policy, costs).exits
    require_mixed(left)
    exits(x)
    for number, graphs in enumerate(exits._graphs):
        comes = int((left >= number).sum())
        sizes = ladder(16) if number else (16,)
        needed = min(size for size in sizes if size >= comes) if comes else None
        assert [graph.replays for graph in graphs] == [int(size == needed) for size in sizes]


@pytest.mark.usefixtures("recorded")
def test_everybody_may_leave_in_the_middle() -> None:
    net, policy = fresh(exits=8), parse("margin:inf,inf,inf,0,inf,inf,inf")
    exits = BucketedExits(net, images(9), policy, exit_costs(net, images(1)))
    assert exits(images(9, seed=5)).exits.tolist() == [3] * 9
    assert [sum(graph.replays for graph in graphs) for graphs in exits._graphs] == [1] * 4 + [0] * 4


@pytest.mark.usefixtures("recorded")
def test_nothing_is_captured_for_no_image() -> None:
    net = toy()
    with pytest.raises(BadValueError, match="for no image"):
        BucketedExits(net, images(0), parse("entropy:1"), exit_costs(net, images(1)))


def test_without_a_gpu_there_is_no_such_pass() -> None:
    x = torch.randn(2, 3, 6, 6)
    with pytest.raises(NotApplicableError, match="cannot be captured here"):
        BucketedExits(toy(), x, parse("entropy:1"), exit_costs(toy(), x[:1]))
