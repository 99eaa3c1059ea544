"""BranchyNet's networks: sizes and costs to the number, Chainer's operators, one interface."""

from __future__ import annotations

from typing import Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.network import select
from narrowgauge_lab.anytime.systems.branchynet import NETS, BranchyNet, branchy_net
from narrowgauge_scores.areas import RANGES


def _images(name: str, count: int = 2) -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(count, *NETS[name].image)


def _macs(layers: Tuple[Tuple[int, int, int], ...]) -> int:
    """Of (pixels that come out, channels that come out, weights for each of them)."""
    return sum(pixels * channels * weights for pixels, channels, weights in layers)


#: By hand from the shapes of the published program, layer by layer: trunk segments and branches.
_LENET_TRUNK = (
    _macs(((30**2, 5, 25),)),
    _macs(((17**2, 10, 5 * 25), (11**2, 20, 10 * 25), (1, 84, 720))),
)
_LENET_HEADS = (_macs(((15**2, 10, 5 * 9), (1, 10, 640))), 840)
_ALEX_TRUNK = (
    _macs(((32**2, 32, 75), (16**2, 64, 32 * 25))),
    _macs(((8**2, 96, 64 * 9),)),
    _macs(((8**2, 96, 96 * 9), (8**2, 64, 96 * 9), (1, 256, 1024), (1, 128, 256))),
)
_ALEX_HEADS = (
    _macs(((8**2, 32, 64 * 9), (8**2, 32, 32 * 9), (1, 10, 512))),
    _macs(((4**2, 32, 96 * 9), (1, 10, 128))),
    1280,
)


@pytest.mark.parametrize("data", ["mnist", "fashion-mnist"])
def test_the_ranges_of_digits_end_where_the_plain_lenet_does(data: str) -> None:
    costs = exit_costs(branchy_net("b-lenet"), _images("b-lenet"))

    assert RANGES[data].high == costs.direct[-1] == 1_140_070


@pytest.mark.parametrize(
    ("name", "trunk", "heads", "megamacs", "baseline"),
    [
        ("b-lenet", _LENET_TRUNK, _LENET_HEADS, (0.220, 1.248), 1.140),
        ("b-alexnet", _ALEX_TRUNK, _ALEX_HEADS, (17.34, 21.32, 30.47), 28.25),
    ],
)
def test_costs_are_those_of_the_published_shapes(
    name: str,
    trunk: Tuple[int, ...],
    heads: Tuple[int, ...],
    megamacs: Tuple[float, ...],
    baseline: float,
) -> None:
    costs = exit_costs(branchy_net(name), _images(name))

    assert costs.trunk == trunk
    assert costs.heads == heads
    assert [each / 1e6 for each in costs.cumulative] == pytest.approx(megamacs, rel=1e-3)
    assert costs.direct[-1] / 1e6 == pytest.approx(baseline, rel=1e-3)
    assert costs.direct[-1] == sum(trunk) + heads[-1]


def test_the_residual_network_has_110_layers_and_the_published_maps() -> None:
    net = branchy_net("b-resnet-110")
    costs = exit_costs(net, _images("b-resnet-110", 1))
    stage = 36 * 16 * 16 * 9 * 900
    first = 900 * (64 * 16 * 25 + 32 * 64 * 9 + 32 * 32 * 9) + 28800 * 10

    weighted = [
        each
        for part in (net.segments, net.heads[-1:])
        for each in part.modules()
        if isinstance(each, (nn.Conv2d, nn.Linear))
    ]
    assert len(weighted) == 110
    assert [head[-1].in_features for head in net.heads[:2]] == [28800, 14400]
    assert net.heads[2].in_features == 576
    assert costs.trunk[:2] == (900 * 16 * 27, stage)
    assert costs.heads == (first, 2 * 900 * 16 * 16 * 9 + 144000, 5760)
    # 18 blocks of 32 channels at 15², 18 of 64 at 8².
    assert costs.trunk[2] == 225 * 32 * 9 * (16 + 35 * 32) + 64 * 64 * 9 * (32 + 35 * 64)


def test_pools_round_up_and_responses_are_normalised_as_by_chainer() -> None:
    """torch's own divides its factor by the number of channels, and Chainer's constant is 2."""
    net = branchy_net("b-alexnet").eval()
    norms = [each for each in net.modules() if type(each).__name__ == "_ResponseNorm"]
    hidden = 30.0 * torch.randn(2, 6, 3, 3)
    expected = F.local_response_norm(hidden, 3, alpha=3 * 5e-5, beta=0.75, k=2.0)

    assert len(norms) == 3
    for norm in norms:
        assert torch.allclose(norm(hidden), expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert net.segments[0](_images("b-alexnet")).shape == (2, 64, 8, 8)
        assert branchy_net("b-lenet").segments[0](_images("b-lenet")).shape == (2, 5, 15, 15)


def test_a_branch_sees_what_the_published_order_gives_it() -> None:
    """There the branch leaves before pool and ReLU and has its own; the values are the same."""
    net = branchy_net("b-lenet").eval()
    images = _images("b-lenet")
    with torch.no_grad():
        hidden = net.segments[0][0](images)
        assert hidden.shape == (2, 5, 30, 30)
        branch = net.heads[0]
        inner = branch[0](F.relu(F.max_pool2d(hidden, 2)))
        inner = F.relu(F.max_pool2d(inner, 2, ceil_mode=True))
        expected = branch[-1](inner.flatten(1))

        assert torch.allclose(net(images)[0], expected, atol=1e-6)


def test_lenet_has_nothing_but_a_product_between_its_last_layers() -> None:
    rest, answer = branchy_net("b-lenet").segments[1], branchy_net("b-lenet").heads[1]

    assert isinstance(rest[-1], nn.Linear)
    assert (rest[-1].in_features, rest[-1].out_features) == (720, 84)
    assert (answer.in_features, answer.out_features) == (84, 10)


@pytest.mark.parametrize("name", sorted(NETS))
def test_every_way_to_an_answer_gives_the_same_answer(name: str) -> None:
    net = branchy_net(name, width=0.25, head_norm=True).eval()
    images = _images(name, 3)
    with torch.no_grad():
        answers = net(images)
        state = net.advance(0, net.begin(images)).state
        alone = net.advance(1, select(state, torch.tensor([2]))).logits
        none = net.forward_until(net.exits - 1, images[:0])

        assert [each.shape for each in answers] == [(3, 10)] * net.exits
        for number, logits in enumerate(answers):
            assert torch.allclose(net.forward_until(number, images), logits, atol=1e-5)
        assert torch.allclose(alone, answers[1][2:], rtol=1e-4, atol=1e-4)
        assert none.shape == (0, 10)
        assert net.advance(0, net.begin(images), head=False).logits.shape == (3, 0)
    with pytest.raises(BadValueError, match="no exit"):
        net.forward_until(net.exits, images)


@pytest.mark.parametrize("name", ["b-lenet", "b-alexnet"])
def test_the_last_loss_reaches_the_trunk_and_no_branch(name: str) -> None:
    """And the first one reaches no later segment: a loss weight of 0 takes an exit out."""
    net = branchy_net(name, width=0.25)
    images = _images(name)

    def reached(number: int) -> Tuple[bool, bool, bool]:
        net.zero_grad()
        net(images)[number].square().sum().backward()
        parts = (net.segments[0], net.segments[-1], net.heads[0])
        return tuple(  # type: ignore[return-value]
            any(p.grad is not None and bool(p.grad.abs().sum() > 0) for p in part.parameters())
            for part in parts
        )

    assert reached(-1) == (True, True, False)
    assert reached(0) == (True, False, True)


def test_heads_may_have_batch_normalisation_and_trunks_do_not_change() -> None:
    plain, normed = branchy_net("b-alexnet"), branchy_net("b-alexnet", head_norm=True)

    def norms(net: BranchyNet, part: str) -> int:
        return sum(isinstance(each, nn.BatchNorm2d) for each in getattr(net, part).modules())

    assert (norms(plain, "heads"), norms(normed, "heads")) == (0, 3)
    assert norms(plain, "segments") == norms(normed, "segments") == 0
    example = _images("b-alexnet")
    assert exit_costs(plain, example) == exit_costs(normed, example)


def test_weights_begin_with_the_deviation_of_chainer() -> None:
    torch.manual_seed(0)
    net = branchy_net("b-alexnet")
    layer = net.segments[0][4]

    assert layer.weight.shape == (64, 32, 5, 5)
    assert float(layer.weight.detach().std()) == pytest.approx((32 * 25) ** -0.5, rel=0.02)
    assert not layer.bias.detach().any()
    block = branchy_net("b-resnet-110").segments[1][0]
    assert float(block.conv1.weight.detach().std()) == pytest.approx(
        (2 / (16 * 9)) ** 0.5, rel=0.06
    )


def test_a_quarter_has_a_quarter_of_the_channels() -> None:
    whole, quarter = branchy_net("b-alexnet"), branchy_net("b-alexnet", width=0.25)

    convs = zip(whole.segments.modules(), quarter.segments.modules())
    pairs = [
        (a.out_channels, b.out_channels) for a, b in convs if isinstance(a, nn.Conv2d)
    ]  # fmt: skip
    assert [4 * few for _, few in pairs] == [many for many, _ in pairs]
    assert branchy_net("b-lenet", width=0.1).segments[0][0].out_channels == 1


def test_shortcuts_take_every_second_pixel_and_put_zeros_first() -> None:
    block = branchy_net("b-resnet-110").segments[2][0].eval()
    nn.init.zeros_(block.bn2.weight)
    images = torch.rand(2, 16, 15, 15)
    with torch.no_grad():
        result = block(images)

    assert result.shape == (2, 32, 8, 8)
    assert not result[:, :16].any()
    assert torch.equal(result[:, 16:], images[:, :, ::2, ::2])


def test_published_thresholds_are_of_the_exits() -> None:
    for name, net in NETS.items():
        exits = branchy_net(name, width=0.1).exits
        assert len(net.thresholds) == exits - 1
    assert NETS["b-lenet"].thresholds == (0.025,)
    assert NETS["b-alexnet"].thresholds == (1e-4, 0.05)


def test_names_and_widths_that_there_are_not() -> None:
    with pytest.raises(UnknownNameError, match="b-lnet") as caught:
        branchy_net("b-lnet")
    assert caught.value.nearest == "b-lenet"
    for width in (0.0, -1.0, float("nan"), 5.0):
        with pytest.raises(BadValueError, match="width"):
            branchy_net("b-lenet", width=width)
