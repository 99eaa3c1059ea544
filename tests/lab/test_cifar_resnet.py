"""ResNet-18 to 101 for small images: sizes, costs and shapes."""

from __future__ import annotations

import pytest
import torch
import torch.fx
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.measure.cost import count
from narrowgauge_lab.networks.cifar_resnet import DEPTHS, Bottleneck, cifar_resnet

TWIN = 0.0625


@pytest.mark.parametrize(
    ("depth", "parameters", "macs"),
    [
        (18, 11_173_962, 555_422_720),
        (34, 21_282_122, 1_159_402_496),
        (50, 23_520_842, 1_297_829_888),
        (101, 42_512_970, 2_509_983_744),
    ],
)
def test_parameters_and_macs_are_the_published_forms(
    depth: int, parameters: int, macs: int
) -> None:
    cost = count(cifar_resnet(depth), torch.zeros(1, 3, 32, 32))

    assert (cost.parameters, cost.macs) == (parameters, macs)


@pytest.mark.parametrize("depth", DEPTHS)
def test_layers_with_weights_are_as_many_as_the_depth_says(depth: int) -> None:
    net = cifar_resnet(depth, TWIN)
    blocks = [each for stage in (net.layer1, net.layer2, net.layer3, net.layer4) for each in stage]
    each_has = 3 if isinstance(blocks[0], Bottleneck) else 2

    assert each_has * len(blocks) + 2 == depth
    strides = [max(max(m.stride) for m in b.modules() if isinstance(m, nn.Conv2d)) for b in blocks]
    assert strides.count(2) == 3


def test_only_the_first_block_of_a_stage_projects() -> None:
    def projecting(depth: int) -> list:
        net = cifar_resnet(depth, TWIN)
        names = ("layer1", "layer2", "layer3", "layer4")
        return [
            f"{name}.{position}"
            for name in names
            for position, block in enumerate(getattr(net, name))
            if len(block.shortcut)
        ]

    assert projecting(18) == ["layer2.0", "layer3.0", "layer4.0"]
    # Bottlenecks widen in the first stage too.
    assert projecting(50) == ["layer1.0", "layer2.0", "layer3.0", "layer4.0"]


@pytest.mark.parametrize("depth", [18, 50])
def test_any_resolution_classes_and_channels(depth: int) -> None:
    net = cifar_resnet(depth, TWIN, classes=7, channels=1).eval()
    images = torch.randn(2, 1, 20, 28, generator=torch.Generator().manual_seed(0))

    maps = net.features(images)

    assert maps.shape == (2, net.linear.in_features, 3, 4)
    assert net(images).shape == (2, 7)
    assert torch.allclose(net(images), net.linear(maps.mean((2, 3))))


@pytest.mark.parametrize("depth", [18, 50])
def test_a_block_adds_its_shortcut_before_the_last_relu(depth: int) -> None:
    torch.manual_seed(0)
    block = cifar_resnet(depth, TWIN).eval().layer2[0]
    images = torch.randn(2, block.conv1.in_channels, 8, 8)

    assert torch.equal(block(images), F.relu(block.residual(images) + block.shortcut(images)))
    assert (block.residual(images) < 0).any()


def test_a_width_scales_every_stage() -> None:
    net = cifar_resnet(18, 0.25)

    channels = [stage[-1].conv2.out_channels for stage in (net.layer1, net.layer4)]
    assert channels == [16, 128]
    assert net.conv1.out_channels == 16


def test_a_depth_that_there_is_not_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(BadValueError, match="18, 34, 50, 101"):
        cifar_resnet(20)


@pytest.mark.parametrize("width", [0.0, -1.0, 0.01, float("nan"), float("inf")])
def test_a_width_that_leaves_no_channels_is_refused(width: float) -> None:
    with pytest.raises(BadValueError, match="width"):
        cifar_resnet(18, width)


def test_fx_traces_it() -> None:
    net = cifar_resnet(50, TWIN).eval()
    images = torch.randn(1, 3, 16, 16)

    assert torch.equal(torch.fx.symbolic_trace(net)(images), net(images))
