"""What oneDNN's fused layers take with them, and what may not be moved or written over."""

from __future__ import annotations

from typing import Dict, Tuple

import pytest
import torch
from torch import nn
from torch.nn import functional

from narrowgauge_lab.engines.own.cpu import onednn
from narrowgauge_lab.engines.own.cpu.fusion import Fusion, fuse
from narrowgauge_lab.measure.probe import observe
from narrowgauge_lab.networks import build, network
from narrowgauge_lab.torch_compat import torch_version
from narrowgauge_lab.transforms import fold_batch_norm

FAMILIES = (
    "alexnet-tiny", "squeezenet-tiny", "resnet18-tiny", "resnet50-tiny", "densenet-tiny",
    "vgg_bn-tiny", "mobilenet-tiny",
)  # fmt: skip

needs_onednn = pytest.mark.skipif(
    torch_version() < (2, 0), reason="torch has fused operators of oneDNN since 2.0"
)


def _images(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) - 0.4


def _run(fusion: Fusion, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = fusion.model(x.contiguous(memory_format=torch.channels_last))
    return result


def _strict(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    # In-place operators of a model may write over its input.
    with torch.no_grad():
        result: torch.Tensor = model.double()(x.double().clone())
    model.float()
    return result


def _operators(fusion: Fusion) -> Dict[str, Tuple[str, str]]:
    return {each.layer: (each.operator, each.provider) for each in fusion.layers}


def _check(model: nn.Module, x: torch.Tensor, *, linear: bool = True) -> Fusion:
    """Fuse, and hold what it computes, twice, against float64."""
    model = model.eval()
    fusion = fuse(model, x, linear=linear)
    strict = _strict(model, x)
    for _ in range(2):
        found = _run(fusion, x).double()
        assert float((found - strict).norm() / strict.norm()) < 1e-5
    return fusion


class Block(nn.Module):
    """A residual block; a test may change what becomes of its parts."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.third = nn.Conv2d(8, 8, 1)
        self.activation = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.activation(self.first(x))
        return self.activation(self.third(self.second(x)) + x)


def _adding(fusion: Fusion) -> str:
    (kernel,) = [each.kernel for each in fusion.layers if "+add" in each.operator]
    return kernel


@needs_onednn
@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_fused_network_computes_what_it_did(name: str, linear: bool) -> None:
    model = fold_batch_norm(build(name, seed=3))
    size = network(name).size

    fusion = _check(model, _images(2, 3, size, size), linear=linear)

    convolutions = [each for each in fusion.layers if each.operator.startswith("conv2d")]
    assert {each.provider for each in convolutions} == {"oneDNN"}
    kinds = [each for each in fusion.layers if each.operator.lower().startswith("linear")]
    assert {each.provider for each in kinds} <= ({"oneDNN"} if linear else {"ATen"})


@needs_onednn
def test_residual_blocks_are_one_operator_at_their_end() -> None:
    fusion = fuse(fold_batch_norm(build("resnet50-tiny")), _images(1, 3, 32, 32), linear=True)

    kinds = _operators(fusion)
    # The shortcut is a convolution too: the one that runs later takes the addition.
    assert kinds["layer1.0.conv3"] == ("conv2d", "oneDNN")
    assert kinds["layer1.0.downsample.0"] == ("conv2d+add+relu", "oneDNN")
    assert kinds["layer1.0.conv1"] == ("conv2d+relu", "oneDNN")
    assert not any("relu" in kind.lower() for kind, where in kinds.values() if where == "ATen")


@needs_onednn
def test_relu6_is_fused_and_linear_bottlenecks_add() -> None:
    kinds = _operators(
        fuse(fold_batch_norm(build("mobilenet-tiny")), _images(1, 3, 32, 32), linear=True)
    ).values()

    assert ("conv2d+relu6", "oneDNN") in kinds
    assert ("conv2d+add", "oneDNN") in kinds


@needs_onednn
def test_the_sum_is_written_over_a_tensor_that_nobody_reads_again() -> None:
    assert "pointwise_.binary" in _adding(_check(Block(), _images(2, 3, 9, 9)))


@needs_onednn
def test_the_sum_is_not_written_over_what_its_own_convolution_reads() -> None:
    class Direct(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.activation(self.first(x))
            return self.activation(self.second(x) + x)

    assert "pointwise.binary" in _adding(_check(Direct(), _images(2, 3, 9, 9)))


@needs_onednn
def test_the_sum_is_not_written_over_a_tensor_that_is_read_again() -> None:
    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.activation(self.first(x))
            return torch.cat([self.activation(self.third(self.second(x)) + x), x], 1)

    assert "pointwise.binary" in _adding(_check(Reading(), _images(2, 3, 9, 9)))


@needs_onednn
def test_the_sum_is_not_written_over_the_caller_s_images() -> None:
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.conv(x) + x)

    images = _images(2, 4, 9, 9).contiguous(memory_format=torch.channels_last)
    kept = images.clone()

    _check(Around(), images)

    assert torch.equal(images, kept)


@needs_onednn
def test_a_view_of_what_is_added_to_keeps_its_numbers() -> None:
    class Viewing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.activation(self.first(x))
            view = x.permute(0, 2, 3, 1)
            return (self.third(self.second(x)) + x).permute(0, 2, 3, 1) * view

    assert "pointwise.binary" in _adding(_check(Viewing(), _images(2, 3, 9, 9)))


@needs_onednn
def test_nothing_moves_across_an_operator_that_writes_in_place() -> None:
    class Crossing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 8, 3, padding=1)
            self.second = nn.Conv2d(8, 8, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            y = self.second(x)
            x.mul_(3.0)  # the convolution above has read it already
            return functional.relu(y + x)

    fusion = _check(Crossing(), _images(2, 3, 9, 9))

    assert _operators(fusion)["second"] == ("conv2d", "oneDNN")


@needs_onednn
def test_an_in_place_activation_whose_input_is_read_again_stays_where_it_is() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.relu = nn.ReLU(inplace=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            return self.relu(x) + 2 * x  # both sides are what relu wrote

    fusion = _check(Shared(), _images(2, 3, 9, 9))

    assert _operators(fusion)["conv"] == ("conv2d", "oneDNN")


@needs_onednn
def test_an_addition_in_place_changes_what_its_other_readers_see() -> None:
    class Accumulating(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.activation(self.first(x))
            return torch.cat([x.add_(self.second(x)), x], 1)

    assert _operators(_check(Accumulating(), _images(2, 3, 9, 9)))["second"][0] == "conv2d"


@needs_onednn
@pytest.mark.parametrize("other", [2.5, torch.full((1, 8, 1, 1), 2.5)])
def test_what_is_broadcast_is_not_fused(other: object) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.shift = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if isinstance(other, float):
                return functional.relu(self.conv(x) + other)
            pooled = functional.adaptive_avg_pool2d(self.shift(x), 1)
            return functional.relu(self.conv(x) + pooled)

    fusion = _check(Shifted(), _images(2, 3, 9, 9))

    assert _operators(fusion)["conv"] == ("conv2d", "oneDNN")


@needs_onednn
def test_a_layer_that_is_called_twice_is_fused_at_both_places() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(functional.relu6(self.conv(x)))

    fusion = _check(Twice(), _images(2, 4, 9, 9))

    assert [each.operator for each in fusion.layers] == ["conv2d+relu6", "conv2d"]


@needs_onednn
def test_what_cannot_be_fused_runs_as_it_was_and_says_why() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 8, 2),
        nn.Conv2d(8, 4, 3, padding="same"),
    )

    fusion = _check(model, _images(2, 3, 9, 9))

    assert {each.provider for each in fusion.layers} == {"ATen"}
    assert "reflect" in fusion.layers[0].kernel
    assert "same" in fusion.layers[3].kernel


@needs_onednn
def test_another_batch_than_that_packed_for_is_right_too() -> None:
    model = build("resnet18-tiny").eval()
    fusion = fuse(fold_batch_norm(model), _images(1, 3, 32, 32), linear=True)
    images = _images(5, 3, 32, 32)

    strict = _strict(model, images)

    assert float((_run(fusion, images).double() - strict).norm() / strict.norm()) < 1e-5


@needs_onednn
def test_the_probe_sees_fused_layers_in_their_precision() -> None:
    fusion = fuse(fold_batch_norm(build("resnet18-tiny")), _images(1, 3, 32, 32), linear=True)

    seen = observe(lambda: _run(fusion, _images(1, 3, 32, 32)))

    fused = sum(each.provider == "oneDNN" for each in fusion.layers)
    assert sum(each.calls for each in seen) == fused
    assert {(each.inputs, each.weight) for each in seen} == {("float32", "float32")}


def test_an_operator_that_gives_wrong_numbers_does_not_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def wrong(activation: object, dtype: torch.dtype) -> Tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(2, dtype=dtype), torch.ones(2, dtype=torch.float64) * 1.01

    monkeypatch.setitem(onednn._TRIALS, "wrong", wrong)

    assert "off by" in onednn.works("wrong", "none", torch.float32)


@pytest.mark.skipif(torch_version() >= (2, 0), reason="for torch without fused operators")
def test_without_fused_operators_everything_stays_with_torch() -> None:
    fusion = _check(fold_batch_norm(build("resnet18-tiny")), _images(1, 3, 32, 32))

    assert {each.provider for each in fusion.layers} == {"ATen"}
    assert "No such operator" in fusion.layers[0].kernel


@needs_onednn
def test_what_is_added_to_each_image_alike_is_not_taken_for_one_of_them() -> None:
    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)
            self.positions = nn.Parameter(torch.ones(1, 8, 7, 7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.conv(x) + self.positions)

    fusion = _check(Positioned(), _images(1, 3, 9, 9))
    assert _operators(fusion)["conv"] == ("conv2d", "oneDNN")


@needs_onednn
def test_a_model_that_makes_tensors_itself_is_run_for_its_shapes() -> None:
    class Making(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(self.conv(x) + torch.ones(8, 7, 7))

    assert _operators(_check(Making(), _images(2, 3, 9, 9)))["conv"] == ("conv2d", "oneDNN")
