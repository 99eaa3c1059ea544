"""Samples that leave a network early: what they get, what it costs, and that nothing is lost."""

from __future__ import annotations

import pytest
import torch
from exit_cases import Told, logits_of, toy

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.adaptive import adaptive, masked
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.policies import MaxProbability, parse, simulate

#: MACs of one 6×6 image: 3×3 convolutions of 3→8, 8→8, 8→8 channels, heads of 8→4.
TRUNK = (36 * 9 * 3 * 8, 36 * 9 * 8 * 8, 36 * 9 * 8 * 8)
HEAD = 8 * 4


def images(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 3, 6, 6, generator=generator)


def middle_threshold(net, x: torch.Tensor) -> MaxProbability:
    """By which about half leave at the first exit."""
    with torch.no_grad():
        sure = torch.softmax(net(x)[0], dim=1).max(dim=1)[0]
    return MaxProbability([float(sure.median())])


def test_costs_are_of_one_image_stage_by_stage() -> None:
    costs = exit_costs(toy(), images(2))
    assert costs.trunk == TRUNK
    assert costs.heads == (HEAD,) * 3
    assert costs.stages == tuple(part + HEAD for part in TRUNK)
    assert costs.cumulative == tuple(
        sum(TRUNK[: number + 1]) + (number + 1) * HEAD for number in range(3)
    )
    assert costs.direct == tuple(sum(TRUNK[: number + 1]) + HEAD for number in range(3))
    assert costs.heads_share == pytest.approx(2 * HEAD / (sum(TRUNK) + HEAD))


def test_costs_leave_the_mode_as_it_was_and_need_an_image() -> None:
    net = toy().train()
    exit_costs(net, images(1))
    assert net.training
    with pytest.raises(BadValueError, match="no image"):
        exit_costs(net, images(0))


def test_nothing_counted_is_no_share() -> None:
    assert ExitCosts((0,), (0,), (0,), (0,)).heads_share == 0.0


@pytest.mark.parametrize("batch", [1, 2, 37])
@pytest.mark.parametrize("text", ["entropy:1.38", "margin:0.02", "patience:1"])
def test_answers_exits_and_macs_are_those_of_the_whole_pass(batch: int, text: str) -> None:
    net, x, policy = toy(), images(batch), parse(text)
    every = torch.stack(net(x)).detach()
    costs = exit_costs(net, x[:1])
    got, wanted = adaptive(net, x, policy, costs), simulate(policy, every)
    assert got.exits.tolist() == wanted.tolist()
    assert got.exits.dtype == torch.int64
    picked = every[wanted, torch.arange(batch)]
    assert torch.allclose(got.logits, picked, atol=1e-6)
    assert got.macs.tolist() == [costs.cumulative[number] for number in wanted]
    assert got.macs.dtype == torch.float64


def test_masking_gives_the_same_and_computes_everything() -> None:
    net, x = toy(), images(16)
    policy = middle_threshold(net, x)
    costs = exit_costs(net, x[:1])
    net.given.clear()
    fast = adaptive(net, x, policy, costs)
    compacted, net.given = net.given, []
    slow = masked(net, x, policy, costs)
    assert net.given == [16, 16, 16]
    assert compacted[0] == 16
    assert compacted[1] == int((fast.exits > 0).sum()) < 16
    assert torch.allclose(fast.logits, slow.logits, atol=1e-6)
    assert fast.exits.tolist() == slow.exits.tolist()
    assert fast.macs.tolist() == slow.macs.tolist()


def test_who_leaves_is_no_longer_computed_and_nobody_starts_no_stage() -> None:
    net, x = toy(), images(5)
    costs = exit_costs(net, x[:1])
    net.given.clear()
    adaptive(net, x, parse("max-probability:0"), costs)
    assert net.given == [5]
    net.given.clear()
    got = adaptive(net, x, parse("max-probability:inf"), costs)
    assert net.given == [5, 5, 5]
    assert got.exits.tolist() == [2] * 5


@pytest.mark.parametrize("way", [adaptive, masked])
def test_a_batch_of_none_is_answered_without_running(way) -> None:
    net = toy()
    got = way(net, images(0), parse("entropy:1"))
    assert got.logits.shape == (0, 4)
    assert got.exits.tolist() == []
    assert got.macs.tolist() == []
    assert net.given == []


@pytest.mark.parametrize("way", [adaptive, masked])
def test_nan_goes_to_the_last_exit_and_the_others_leave(way) -> None:
    net, x = toy(), images(4)
    x[1] = float("nan")
    got = way(net, x, parse("max-probability:0"))
    assert got.exits.tolist() == [0, 2, 0, 0]
    assert torch.isnan(got.logits[1]).all()
    assert torch.isfinite(got.logits[[0, 2, 3]]).all()


@pytest.mark.parametrize("way", [adaptive, masked])
def test_work_that_depends_on_the_sample_counts_as_it_came(way) -> None:
    told = logits_of([9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 0.0])
    macs = torch.tensor([[1.0, 2.0, 3.0], [10.0, 20.0, 30.0], [100.0, 200.0, 300.0]])
    net = Told(told, macs).eval()
    got = way(net, net.images(), parse("max-probability:0.9"))
    assert got.exits.tolist() == [0, 1, 2]
    assert got.macs.tolist() == [1.0, 22.0, 333.0]


@pytest.mark.parametrize("way", [adaptive, masked])
def test_a_wrong_number_of_thresholds_is_refused_before_anything_runs(way) -> None:
    net = toy()
    with pytest.raises(BadValueError, match="3 thresholds"):
        way(net, images(2), parse("entropy:0.1,0.2,0.3"))
    assert net.given == []


@pytest.mark.parametrize("way", [adaptive, masked])
def test_training_mode_is_refused(way) -> None:
    with pytest.raises(BadValueError, match="training mode") as error:
        way(toy().train(), images(2), parse("entropy:1"))
    assert "eval" in error.value.next_step


def test_a_network_of_one_exit_always_answers_there() -> None:
    got = adaptive(toy(exits=1), images(3), parse("entropy:0.1"))
    assert got.exits.tolist() == [0, 0, 0]


def test_no_gradient_is_kept() -> None:
    assert not adaptive(toy(), images(2), parse("entropy:1")).logits.requires_grad
