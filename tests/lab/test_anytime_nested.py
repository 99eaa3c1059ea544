"""The depth-nested network: that it nests, doubles, and reuses what was computed."""

from __future__ import annotations

from typing import List

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.anytime.costs import exit_costs
from narrowgauge_lab.anytime.network import select
from narrowgauge_lab.anytime.systems.nested import NestedNet, channels_of
from narrowgauge_lab.measure.cost import count


def _net(exits: int = 3, blocks: int = 1, channels: int = 2) -> NestedNet:
    torch.manual_seed(0)
    return NestedNet(5, exits, blocks, channels).eval()


def _images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("blocks", [1, 2])
def test_each_exit_has_twice_the_layers_of_the_one_before(blocks: int) -> None:
    net = _net(exits=4, blocks=blocks)
    ran: List[nn.Module] = []
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_hook(lambda layer, *_: ran.append(layer))
    for exit in range(4):
        ran.clear()
        net.forward_until(exit, _images())
        assert len(ran) == len(set(ran)) == 1 + net.layers(exit)
        assert net.layers(exit) == 2**exit * net.layers(0) == 2**exit * 6 * blocks


def test_exits_cost_what_they_add() -> None:
    net = NestedNet(10, 4, 1, 16)
    costs = exit_costs(net, torch.zeros(1, 3, 32, 32))

    #: By hand: 3·16·9 at 32²; blocks of 16·16·9 · 2 at 32², 32·(16 + 32)·9 at 16², and so on.
    stem = 32 * 32 * 9 * 3 * 16
    same = 2 * 9 * 16 * 16 * 32 * 32
    narrowing = same // 4 + same // 2
    assert costs.trunk[0] == stem + same + 2 * narrowing
    assert costs.trunk[1:] == (3 * same, 6 * same, 12 * same)
    assert costs.heads == (640,) * 4
    assert costs.cumulative[3] == sum(costs.trunk) + 4 * 640
    whole = count(lambda images: net(images)[-1], torch.zeros(1, 3, 32, 32))
    assert whole.macs == costs.cumulative[3], "nothing is computed twice"


def test_old_layers_never_read_new_ones() -> None:
    """Whatever later stages hold, the answers before stay the same in every bit."""
    net = _net(exits=4)
    before = net(_images())
    for stage in (net.stages[2], net.stages[3]):
        for parameter in stage.parameters():
            parameter.data.normal_()
    after = net(_images())

    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert not torch.allclose(before[2], after[2])
    assert not torch.allclose(before[3], after[3])


def test_the_losses_of_early_exits_reach_no_later_layer() -> None:
    net = _net().train()
    parameters = dict(net.named_parameters())
    found = torch.autograd.grad(
        net(_images())[1].sum(), list(parameters.values()), allow_unused=True
    )
    for name, gradient in zip(parameters, found):
        later = name.startswith(("stages.2", "heads.2", "heads.0"))
        assert (gradient is None) == later, name


def test_every_new_layer_reads_the_old_network() -> None:
    """A stage whose own stream adds nothing answers by the old stream alone."""
    net = _net(exits=2)
    for block in net.stages[1].modules():
        if isinstance(block, nn.Conv2d):
            block.weight.data.zero_()
    net.heads[1].load_state_dict(net.heads[0].state_dict())
    first, second = net(_images())

    assert torch.equal(first, second)


def test_new_layers_come_between_the_old_ones() -> None:
    """The second stage's layers, by hand: old, old + new, old, old + new in each resolution."""
    net = _net(exits=2, blocks=2, channels=2)
    old = net.advance(0, net.begin(_images())).state
    found = net._interlaced(1, old)

    stream = None
    for level, stack in enumerate(net.stages[1]):
        if stream is not None:
            halved = stream[:, :, ::2, ::2]
            zeros = torch.zeros_like(halved[:, : halved.shape[1] // 2])
            stream = torch.cat([zeros, halved, zeros], 1)
        for place, block in enumerate(stack):
            given = old[2 * level + place]
            read = given if stream is None else given + stream
            assert torch.equal(found[level][2 * place], read)
            stream = block(read) if stream is None else stream + block(read)
            assert torch.equal(found[level][2 * place + 1], given + stream)


def test_some_of_the_samples_may_go_on_alone() -> None:
    net, images = _net(), _images(6)
    whole = net(images)
    kept = torch.tensor([4, 1])
    state = select(net.advance(0, net.begin(images)).state, kept)
    second = net.advance(1, state, head=False)
    third = net.advance(2, second.state)

    assert second.logits.shape == (2, 0)
    assert torch.allclose(third.logits, whole[2][kept], atol=1e-5)
    assert torch.allclose(net.forward_until(2, images), whole[2], atol=1e-6)


@pytest.mark.parametrize("count", [0, 1])
def test_batches_of_one_and_none(count: int) -> None:
    answers = _net()(_images(4)[:count])

    assert [tuple(logits.shape) for logits in answers] == [(count, 5)] * 3


def test_grey_images_of_other_sizes() -> None:
    net = NestedNet(3, 2, 1, 2, channels_in=1).eval()

    assert net(torch.zeros(2, 1, 28, 28))[1].shape == (2, 3)


@pytest.mark.parametrize("given", [{"exits": 0}, {"blocks": 0}, {"channels": 0}, {"classes": 0}])
def test_nothing_cannot_be_built(given: dict) -> None:
    with pytest.raises(BadValueError, match="one of each"):
        NestedNet(**given)


def test_an_exit_that_there_is_not() -> None:
    with pytest.raises(BadValueError, match="no exit 3"):
        _net().forward_until(3, _images())
    with pytest.raises(BadValueError, match="no exit 3"):
        _net().layers(3)


def test_widths_are_channels() -> None:
    assert [channels_of(width) for width in (1, 0.25, 2)] == [16, 4, 32]
    with pytest.raises(BadValueError, match="no channel"):
        channels_of(0.01)
