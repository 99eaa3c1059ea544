"""The layers that kernels are measured on are those of the networks that they are said to be of."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest
import torch
from torch import nn

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.networks.layer_shapes import (
    MANUAL_MNIST,
    RESNET50,
    SETS,
    SPARSE,
    LayerShape,
    product,
    shapes_named,
)
from narrowgauge_lab.networks.manual_mnist import ManualNet
from narrowgauge_lab.networks.resnet import ResNet


def _layers_of(model: nn.Module, images: torch.Tensor) -> List[LayerShape]:
    """Every convolution and linear layer that runs, in that order."""
    found = []

    def note(layer: Any, inputs: Tuple[torch.Tensor, ...], _output: torch.Tensor) -> None:
        if isinstance(layer, nn.Linear):
            found.append(product(0, layer.in_features, layer.out_features))
            return
        (kernel, _), (stride, _), (padding, _) = layer.kernel_size, layer.stride, layer.padding
        size = inputs[0].shape[-1]
        found.append(
            LayerShape(layer.in_channels, layer.out_channels, kernel, stride, size, padding)
        )

    for layer in model.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear)):
            layer.register_forward_hook(note)
    with torch.no_grad():
        model(images)
    return found


def test_resnet_50_has_these_23_convolutions() -> None:
    """At an eighth of the width and half the size: the layers are the same but for that."""
    model = ResNet((3, 4, 6, 3), width=8, classes=2).eval()
    found = [each for each in _layers_of(model, torch.zeros(1, 3, 112, 112)) if not each.linear]
    scaled = [
        LayerShape(
            max(3, each.channels // 8), each.filters // 8, each.kernel, each.stride,
            # The last stage of half a size is 3.5 wide.
            -(-each.size // 2), each.padding,
        )
        for each in RESNET50
    ]  # fmt: skip

    assert len(RESNET50) == len(set(RESNET50)) == 23
    assert set(found) == set(scaled)


def test_the_manual_layers_network_has_these_four() -> None:
    assert tuple(_layers_of(ManualNet(), torch.zeros(1, 1, 28, 28))) == MANUAL_MNIST


def test_four_of_the_sparse_papers_shapes_are_resnet_50s() -> None:
    assert len(set(SPARSE)) == 8
    assert len(set(SPARSE) & set(RESNET50)) == 4
    assert len(SETS["convolutions"]) == 31


def test_a_shape_has_a_name_and_a_name_has_a_shape() -> None:
    assert RESNET50[0].name == "3-64-7x7s2-224"
    assert MANUAL_MNIST[2].name == "160-100"
    assert product(64, 128, 256).name == "64-128-256"
    for shapes in SETS.values():
        for shape in shapes:
            assert shapes_named(shape.name) == [shape]
    assert shapes_named("sparse") == list(SPARSE)
    with pytest.raises(UnknownNameError, match="resnet50"):
        shapes_named("resnet5")


def test_inputs_are_images_or_rows() -> None:
    assert RESNET50[0].input_shape(2) == (2, 3, 224, 224)
    assert RESNET50[0].weight_shape() == (64, 3, 7, 7)
    assert MANUAL_MNIST[3].input_shape(5) == (5, 100)
    assert product(64, 128, 256).input_shape(5) == (64, 128)
    assert product(64, 128, 256).weight_shape() == (256, 128)
