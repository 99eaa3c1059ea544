"""Cuts of residual blocks: what runs, what it costs, and what cannot be cut."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.cifar_resnet import cifar_resnet
from narrowgauge_lab.transforms.residual_links import (
    Cut,
    block_names,
    cut,
    identity_blocks,
    parse_cuts,
)

WIDTH = 0.0625
#: A projecting block, and one whose shortcut is an identity, of any depth.
PROJECTING, IDENTITY = "layer3.0", "layer3.1"
DEPTHS = (18, 50)
#: Basic blocks and bottlenecks, as many as in a network of that depth.
BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3)}


def _net(depth: int = 18) -> nn.Module:
    """Statistics that are none of a fresh network's, or cuts would change less than they do."""
    torch.manual_seed(depth)
    net = cifar_resnet(depth, WIDTH)
    with torch.no_grad():
        for _ in range(3):
            net(_images())
    return net.eval()


def _images(count: int = 4) -> torch.Tensor:
    return torch.randn(count, 3, 16, 16, generator=torch.Generator().manual_seed(1))


def _block(net: nn.Module, name: str) -> Any:
    return dict(net.named_modules())[name]


def _maps(block: Any) -> torch.Tensor:
    """What may come into a block: nothing negative."""
    channels = block.conv1.in_channels
    generator = torch.Generator().manual_seed(2)
    return torch.rand(2, channels, 8, 8, generator=generator)


def _macs(net: nn.Module) -> int:
    return count(net, _images(1)).macs


def _computed(block: Any, mode: str, maps: torch.Tensor) -> torch.Tensor:
    """What a block's mode says; `scale` by a quarter."""
    residual, shortcut = block.residual(maps), block.shortcut(maps)
    ways = {
        "full": F.relu(residual + shortcut),
        "no_shortcut": F.relu(residual),
        "no_residual": F.relu(shortcut),
        "scale": F.relu(residual + 0.25 * shortcut),
    }
    return ways[mode]


@pytest.mark.parametrize("depth", sorted(BLOCKS))
def test_every_depth_is_cut_block_by_block(depth: int) -> None:
    net = _net(depth)
    wanted = [f"layer{stage}.{k}" for stage, n in enumerate(BLOCKS[depth], 1) for k in range(n)]
    projecting = {"layer2.0", "layer3.0", "layer4.0"} | ({"layer1.0"} if depth >= 50 else set())

    assert list(block_names(net)) == wanted
    assert set(wanted) - set(identity_blocks(net)) == projecting
    modes = ["full", "no_shortcut", "no_residual", "scale"]
    cuts = [Cut(name, modes[k % 4], 0.25) for k, name in enumerate(wanted)]
    other = cut(net, cuts)
    for each in cuts:
        block = _block(net, each.block)
        maps = _maps(block)
        assert torch.allclose(_block(other, each.block)(maps), _computed(block, each.mode, maps))


@pytest.mark.parametrize("depth", DEPTHS)
class TestWhatRuns:
    @pytest.mark.parametrize("name", [PROJECTING, IDENTITY])
    @pytest.mark.parametrize("mode", ["full", "no_shortcut", "no_residual", "scale"])
    def test_a_block_computes_what_its_mode_says(self, depth: int, name: str, mode: str) -> None:
        net = _net(depth)
        block = _block(net, name)
        maps = _maps(block)
        wanted = _computed(block, mode, maps)

        other = cut(net, [Cut(name, mode, 0.25 if mode == "scale" else 1.0)])

        assert torch.allclose(_block(other, name)(maps), wanted)

    def test_the_network_that_was_cut_stays_whole_and_shares_nothing(self, depth: int) -> None:
        net = _net(depth)
        before = net(_images())

        other = cut(net, [Cut(IDENTITY, "no_residual")])
        changed = other(_images())
        with torch.no_grad():
            for tensor in [*other.parameters(), *other.buffers()]:
                tensor.zero_()

        assert torch.equal(net(_images()), before)
        assert not torch.allclose(changed, before, atol=1e-4)

    def test_what_is_cut_goes_with_its_weights(self, depth: int) -> None:
        net = _net(depth)
        block = _block(net, PROJECTING)

        def lost(mode: str) -> int:
            other = cut(net, [Cut(PROJECTING, mode)])
            return count(net, _images(1)).parameters - count(other, _images(1)).parameters

        projection = sum(each.numel() for each in block.shortcut.parameters())
        assert lost("no_shortcut") == projection > 0
        assert lost("no_residual") == sum(p.numel() for p in block.parameters()) - projection

    def test_gradients_reach_every_weight_that_is_left(self, depth: int) -> None:
        cuts = [
            Cut("layer1.0", "no_residual"),
            Cut("layer2.0", "no_shortcut"),
            Cut("layer4.1", "scale", 2.0),
        ]
        other = cut(_net(depth), cuts).train()

        other(_images()).sum().backward()

        assert all(each.grad is not None for each in other.parameters())


@pytest.mark.parametrize("depth", DEPTHS)
class TestWhatItCosts:
    def test_an_identity_shortcut_saves_no_macs(self, depth: int) -> None:
        net = _net(depth)
        every = [Cut(name, "no_shortcut") for name in identity_blocks(net)]

        assert _macs(cut(net, every)) == _macs(net)

    def test_a_projection_saves_its_own(self, depth: int) -> None:
        net = _net(depth)
        convolution = _block(net, PROJECTING).shortcut[0]
        # 16 × 16 images are 4 × 4 maps in the third stage.
        own = convolution.weight.numel() * 4 * 4

        assert _macs(net) - _macs(cut(net, [Cut(PROJECTING, "no_shortcut")])) == own

    def test_a_block_that_is_left_out_saves_its_convolutions(self, depth: int) -> None:
        net = _net(depth)
        block = _block(net, IDENTITY)
        layers = [m for m in block.modules() if isinstance(m, nn.Conv2d)]
        own = sum(layer.weight.numel() * 4 * 4 for layer in layers)

        assert _macs(net) - _macs(cut(net, [Cut(IDENTITY, "no_residual")])) == own

    def test_a_scaled_shortcut_saves_nothing(self, depth: int) -> None:
        net = _net(depth)

        assert _macs(cut(net, [Cut(PROJECTING, "scale", 0.5)])) == _macs(net)


class TestCutsOfCuts:
    def test_a_cut_network_can_be_cut_further(self) -> None:
        net = _net()

        once = cut(net, [Cut(IDENTITY, "no_residual")])
        twice = cut(once, [Cut("layer4.1", "no_residual")])
        at_once = cut(net, [Cut(IDENTITY, "no_residual"), Cut("layer4.1", "no_residual")])

        assert block_names(twice) == block_names(net)
        assert torch.equal(twice(_images()), at_once(_images()))

    @pytest.mark.parametrize("mode", ["no_residual", "no_shortcut", "scale"])
    def test_the_same_block_not_twice(self, mode: str) -> None:
        once = cut(_net(), [Cut(IDENTITY, mode, 0.5 if mode == "scale" else 1.0)])

        with pytest.raises(BadValueError, match=f"{IDENTITY} is cut twice"):
            cut(once, [Cut(IDENTITY, "no_shortcut")])

    def test_a_block_is_in_the_mode_that_it_was_in(self) -> None:
        assert not any(m.training for m in cut(_net(), [Cut(IDENTITY, "no_shortcut")]).modules())


class TestParsing:
    def test_blocks_and_stages(self) -> None:
        found = parse_cuts("layer3.1:no_residual, layer4:no_shortcut,layer1.0:scale:0.5", _net())

        assert [str(each) for each in found] == [
            "layer3.1:no_residual",
            "layer4.0:no_shortcut",
            "layer4.1:no_shortcut",
            "layer1.0:scale:0.5",
        ]

    def test_of_nothing_there_is_none(self) -> None:
        assert parse_cuts("", _net()) == ()

    @pytest.mark.parametrize(
        ("text", "error", "message"),
        [
            ("layer5.0:no_residual", UnknownNameError, "block 'layer5.0'"),
            ("layer3.2:no_residual", UnknownNameError, "block 'layer3.2'"),
            ("layer3.1.conv1:no_residual", UnknownNameError, "block 'layer3.1.conv1'"),
            ("layer3.1:nothing", UnknownNameError, "mode 'nothing'"),
            ("layer3.1", BadValueError, "names no mode"),
            ("layer3.1:scale", BadValueError, "scale wants a factor"),
            ("layer3.1:no_residual:2", BadValueError, "no other mode takes one"),
            ("layer3.1:scale:half", BadValueError, "'half' is no number"),
            ("layer3.1:scale:nan", BadValueError, "finite"),
            ("layer3:no_residual,layer3.1:no_residual", BadValueError, "cut twice"),
            ("layer3.1:no_residual,layer3.1:no_shortcut", BadValueError, "leaves no network"),
            (
                "layer1:no_residual,layer2:no_residual,layer3:no_residual,layer4:no_residual",
                BadValueError,
                "leaves no network",
            ),
        ],
    )
    def test_what_cannot_be_cut_is_refused(self, text: str, error: Any, message: str) -> None:
        with pytest.raises(error) as refused:
            parse_cuts(text, _net())

        assert message in str(refused.value)

    def test_what_cannot_be_parsed_cannot_be_cut_either(self) -> None:
        net = _net()
        everything = [Cut(name, "no_residual") for name in block_names(net)]
        refused: List[Tuple[List[Cut], Any]] = [
            ([Cut("layer9.0", "no_residual")], UnknownNameError),
            ([Cut(IDENTITY, "nothing")], UnknownNameError),
            ([Cut(IDENTITY, "scale", float("inf"))], BadValueError),
            ([Cut(IDENTITY, "no_residual"), Cut(IDENTITY, "no_shortcut")], BadValueError),
            (everything, BadValueError),
        ]

        for cuts, error in refused:
            with pytest.raises(error):
                cut(net, cuts)

    def test_the_last_branch_is_not_taken_step_by_step_either(self) -> None:
        net = _net()
        names = block_names(net)
        almost = cut(net, [Cut(name, "no_residual") for name in names[:-1]])

        with pytest.raises(BadValueError, match="leaves no network"):
            cut(almost, [Cut(names[-1], "no_residual")])

    def test_a_network_without_blocks_is_refused(self) -> None:
        with pytest.raises(BadValueError, match="no residual blocks"):
            cut(nn.Sequential(nn.Linear(2, 2)), ())
