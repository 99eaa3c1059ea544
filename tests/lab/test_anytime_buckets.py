"""Packing who goes on, as the device does it, with plain tensors; captures are the GPU's tests."""

from __future__ import annotations

import pytest
import torch
from exit_cases import toy

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.anytime import buckets
from narrowgauge_lab.anytime.adaptive import adaptive
from narrowgauge_lab.anytime.buckets import BucketedExits, Packed, ladder
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.policies import parse


@pytest.mark.parametrize(
    ("batch", "sizes"),
    [(1, (1,)), (3, (1, 2, 3)), (8, tuple(range(1, 9))), (256, tuple(range(32, 257, 32)))],
)
def test_the_ladder_ends_with_the_batch(batch: int, sizes: tuple) -> None:
    assert ladder(batch) == sizes


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


class Replayed:
    """A graph that is its stage, run again."""

    def __init__(self, exits: BucketedExits, number: int, size: int) -> None:
        self._given = exits, number, size
        self.size = size

    def replay(self) -> None:
        exits, number, size = self._given
        with torch.no_grad():
            exits._stage(number, size)


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that are run again instead of replayed."""
    monkeypatch.setattr(buckets.torch_compat, "graphs_available", lambda device: True)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)

    def captured(self: BucketedExits, stream: None):
        return [
            [Replayed(self, number, size) for size in (self.sizes if number else self.sizes[-1:])]
            for number in range(self._net.exits)
        ]

    monkeypatch.setattr(BucketedExits, "_captured", captured)


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("batch", [1, 2, 19])
@pytest.mark.parametrize(
    "text", ["entropy:1.37", "margin:0.03", "patience:1", "margin:0", "margin:inf"]
)
def test_the_packed_pass_answers_as_the_plain_one(batch: int, text: str) -> None:
    net, policy = toy(exits=4), parse(text)
    x = torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    costs = exit_costs(net, x[:1])
    exits = BucketedExits(net, x, policy, costs)
    for seed in (2, 3, 2):
        x = torch.randn(batch, 3, 6, 6, generator=torch.Generator().manual_seed(seed))
        wanted, got = adaptive(net, x, policy, costs), exits(x)
        assert got.exits.tolist() == wanted.exits.tolist()
        assert torch.allclose(got.logits, wanted.logits, atol=1e-6)
        assert got.macs.tolist() == wanted.macs.tolist()


@pytest.mark.usefixtures("replayed")
def test_stages_run_for_the_smallest_size_that_holds_who_comes() -> None:
    net = toy()
    x = torch.randn(16, 3, 6, 6, generator=torch.Generator().manual_seed(2))
    policy = parse("max-probability:0.3")
    costs = exit_costs(net, x[:1])
    exits = BucketedExits(net, x, policy, costs)
    onward = int((adaptive(net, x, policy, costs).exits > 0).sum())
    net.given.clear()
    exits(x)
    assert net.given[0] == 16
    if onward:
        assert net.given[1] == min(size for size in ladder(16) if size >= onward)


def test_without_a_gpu_there_is_no_such_pass() -> None:
    x = torch.randn(2, 3, 6, 6)
    with pytest.raises(NotApplicableError, match="cannot be captured here"):
        BucketedExits(toy(), x, parse("entropy:1"), exit_costs(toy(), x[:1]))
