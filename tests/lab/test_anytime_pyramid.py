"""Exits that fuse maps top-down: what they read, what they pay, and rivals of the same cost."""

from __future__ import annotations

from typing import Any, Dict

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.network import select
from narrowgauge_lab.anytime.systems import pyramid
from narrowgauge_lab.anytime.systems.pyramid import FORMS, PyramidNet, apart
from narrowgauge_lab.measure.cost import count

IMAGES = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
SMALL: Dict[str, Any] = {"blocks": 2, "width": 0.25, "channels": 4}


def _net(form: str, **given: Any) -> PyramidNet:
    torch.manual_seed(5)
    return PyramidNet(form, **{**SMALL, **given}).eval()


@pytest.mark.parametrize(
    ("form", "given"),
    [("own", {"exits_per_scale": 1}), ("trunk", {"exits_per_scale": 1, "channels": 6})],
)
def test_an_exit_pays_for_what_it_reads_and_so_does_its_rival(
    form: str, given: Dict[str, Any]
) -> None:
    net = _net(form, **given)
    rival = net.rival()
    ours, others = exit_costs(net, IMAGES[:1]), exit_costs(rival, IMAGES[:1])

    assert apart(ours.direct, others.direct) <= 0.01
    assert apart(ours.cumulative, others.cumulative) <= 0.01
    assert ours.trunk == others.trunk
    for each, costs in ((net, ours), (rival, others)):
        assert costs.heads == tuple(head.macs(32 >> head.scale) for head in each.heads)
        for number in range(net.exits):
            assert costs.direct[number] == sum(costs.trunk[: number + 1]) + costs.heads[number]


@pytest.mark.parametrize("form", FORMS)
def test_a_rival_begins_with_the_same_trunk(form: str) -> None:
    net = _net(form)
    with torch.no_grad():
        one = net.advance(0, net.begin(IMAGES), head=False).state
        other = net.rival().eval().advance(0, net.begin(IMAGES), head=False).state

    assert torch.equal(one[0], other[0])


@pytest.mark.parametrize("form", FORMS)
def test_the_network_of_the_paper_profile_has_the_cost_of_resnet_32(form: str) -> None:
    net = PyramidNet(form)
    heads, others = net.heads, net.rival().heads
    whole = count(lambda images: net.eval().forward_until(5, images), IMAGES[:1]).macs

    assert net.exits == 6
    # 68.86 M without its 640 of the linear layer, and two projections of 131,072 each.
    assert whole - heads[5].macs(8) == 69_124_096
    for one, other in zip(heads, others):
        assert other.macs(32 >> one.scale) == pytest.approx(one.macs(32 >> one.scale), rel=0.01)


def _spoil(module: nn.Module) -> None:
    for each in module.parameters():
        each.data.fill_(float("nan"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("number", [0, 2, 4])
def test_no_exit_reads_what_comes_after_it(form: str, number: int) -> None:
    net = _net(form)
    with torch.no_grad():
        before = net(IMAGES)
        for later in range(number + 1, net.exits):
            _spoil(net.stages[later])
            _spoil(net.heads[later])
        after = net(IMAGES)
        alone = net.forward_until(number, IMAGES)

    assert torch.equal(after[number], before[number])
    assert torch.allclose(alone, before[number], atol=1e-5)
    assert after[-1].isnan().all()


def _read(net: PyramidNet, number: int, changed: int) -> bool:
    """Whether an answer changes with one of the maps that its head is given."""
    with torch.no_grad():
        state = net.begin(IMAGES)
        for each in range(number):
            state = net.advance(each, state, head=False).state
        maps = net.advance(number, state).state
        other = tuple(m + 1.0 if place == changed else m for place, m in enumerate(maps))
        return not torch.equal(net.heads[number](maps), net.heads[number](other))


def test_the_form_trunk_reads_every_scale_so_far_and_own_the_newest() -> None:
    trunk, own = _net("trunk"), _net("own")

    assert [_read(trunk, 5, scale) for scale in range(3)] == [True, True, True]
    assert [_read(own, 5, scale) for scale in range(3)] == [False, False, True]
    # Where there is one scale, the form trunk has nothing to fuse and its rival is of its kind.
    assert trunk.rival().plain_channels[:2] == [4, 4]
    assert trunk.plain_channels == []


def test_coarse_maps_are_enlarged_and_added() -> None:
    fine, middle = torch.zeros(1, 1, 4, 4), torch.tensor([[[[1.0, 2.0], [3.0, 4.0]]]])
    coarse = torch.full((1, 1, 1, 1), 10.0)

    fused = pyramid._top_down([fine, middle, coarse])

    assert torch.equal(fused[2], coarse)
    assert fused[1][0, 0].tolist() == [[11.0, 12.0], [13.0, 14.0]]
    assert fused[0][0, 0].tolist() == [
        [11.0, 11.0, 12.0, 12.0],
        [11.0, 11.0, 12.0, 12.0],
        [13.0, 13.0, 14.0, 14.0],
        [13.0, 13.0, 14.0, 14.0],
    ]


def test_heads_of_their_own_go_down_to_an_eighth_of_the_sides() -> None:
    net = _net("own", exits_per_scale=1)

    assert [len(head.down) for head in net.heads] == [3, 2, 1]


@pytest.mark.parametrize("form", FORMS)
def test_some_samples_may_go_on_alone(form: str) -> None:
    net = _net(form)
    with torch.no_grad():
        state = net.begin(IMAGES)
        for number in range(3):
            state = net.advance(number, state).state
        chosen = select(state, torch.tensor([2, 0]))
        expected = net.advance(3, state).logits[[2, 0]]

        assert torch.allclose(net.advance(3, chosen).logits, expected, atol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_every_weight_learns(form: str) -> None:
    net = _net(form).train()
    sum(logits.pow(2).sum() for logits in net(IMAGES)).backward()

    assert all(each.grad is not None and each.grad.any() for each in net.parameters())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"form": "later"}, "no form 'later'"),
        ({"blocks": 0}, "0 blocks"),
        ({"channels": 0}, "0 of the fused maps"),
        ({"width": 0.01}, "0 channels"),
        ({"exits_per_scale": 3}, "3 exits a scale of 2 blocks"),
    ],
)
def test_what_cannot_be_built_is_said(given: Dict[str, Any], words: str) -> None:
    with pytest.raises(BadValueError, match=words):
        PyramidNet(**{"form": "own", **SMALL, **given})
