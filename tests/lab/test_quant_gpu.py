"""The 8-bit GPU network without a GPU: plan, packing, buffers, reference, refusals."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from network_cases import images, tiny
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.gpu import lower
from narrowgauge_lab.quant.gpu.arena import ALIGNMENT, Need, assign
from narrowgauge_lab.quant.gpu.launches import prepare
from narrowgauge_lab.quant.gpu.network import calibrate, pack, trace
from narrowgauge_lab.quant.gpu.number_format import FORMATS, decode, encode, pack_conv, pack_linear
from narrowgauge_lab.quant.gpu.plan import (
    AveragePoolStep,
    ConvStep,
    LinearStep,
    MaxPoolStep,
    make_plan,
)
from narrowgauge_lab.quant.gpu.reference import run_reference
from narrowgauge_lab.quant.gpu.tiles import ProductShape, candidates

CPU = torch.device("cpu")
INT8 = FORMATS["int8"]


def test_everything_that_can_ride_in_a_convolution_does() -> None:
    plan = make_plan(trace(tiny()))
    convs = [step for step in plan.steps if isinstance(step, ConvStep)]
    assert [step.module for step in convs][:5] == [
        "conv1",
        "layers.0.downsample.0",
        "layers.0.conv1",
        "layers.0.conv2",
        "layers.0.conv3",
    ]
    by_module = {step.module: step for step in convs}
    third = by_module["layers.0.conv3"]
    assert third.residual == by_module["layers.0.downsample.0"].output
    assert third.relu
    assert not by_module["layers.0.downsample.0"].relu
    assert by_module["layers.2.conv3"].residual == by_module["layers.1.conv3"].output
    others = [type(step) for step in plan.steps if not isinstance(step, ConvStep)]
    assert others == [MaxPoolStep, AveragePoolStep, LinearStep]
    assert len(plan.steps) == len(convs) + len(others) == 12 + 3


def test_steps_read_only_what_is_there_already() -> None:
    plan = make_plan(trace(tiny()))
    made = {plan.source}
    for step in plan.steps:
        assert step.source in made
        assert getattr(step, "residual", None) in {None, *made}
        made.add(step.output)


class _Odd(nn.Module):
    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.between = between
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.flatten(self.pool(self.between(self.conv(x))), 1))


class _TwiceAdded(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


@pytest.mark.parametrize(
    ("between", "named"),
    [
        (nn.Sigmoid(), "between"),
        (nn.Conv2d(8, 8, 3, groups=2), "one group"),
        (nn.Conv2d(8, 8, 3, dilation=2), "no dilation"),
        (nn.Conv2d(8, 8, (3, 1)), "square"),
        (nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"), "circular"),
        (nn.MaxPool2d(3, ceil_mode=True), "ceil_mode"),
        (_TwiceAdded(), "two different values"),
    ],
)
def test_what_no_step_can_say_is_refused_by_name(between: nn.Module, named: str) -> None:
    with pytest.raises(NotApplicableError) as caught:
        make_plan(trace(_Odd(between).eval()))
    assert named in str(caught.value)


def _chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(*layers).eval()


@pytest.mark.parametrize(
    ("model", "named"),
    [
        (_chain(nn.Conv2d(4, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)),
         "fewer than 4 channels"),
        (_chain(nn.Conv2d(3, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(0), nn.Linear(64, 2)),
         "no fused step"),
        (_chain(nn.Conv2d(3, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 8),
                nn.Linear(8, 2)), "only the last layer"),
        (_chain(nn.Conv2d(3, 64, 3), nn.Conv2d(64, 3, 1), nn.Conv2d(3, 64, 1),
                nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 2)), "and only it"),
    ],
)  # fmt: skip
def test_whole_networks_that_do_not_fit_are_refused(model: nn.Module, named: str) -> None:
    with pytest.raises(NotApplicableError) as caught:
        make_plan(trace(model))
    assert named in str(caught.value)


def _refused(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> str:
    """What preparing buffers for images of 8×8 says; the kernels are not needed for that."""
    monkeypatch.setitem(sys.modules, "narrowgauge_lab.quant.gpu.kernels", ModuleType("kernels"))
    graph = trace(model)
    plan = make_plan(graph)
    scales = calibrate(graph, plan, [images(2, height=8, width=8)], INT8, "min-max", CPU)
    weights = pack(graph, plan, INT8)
    with pytest.raises(NotApplicableError) as caught:
        prepare(plan, weights, scales, INT8, (2, 3, 8, 8), CPU)
    return str(caught.value)


def test_a_linear_layer_after_several_pixels_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are in the order of channels first; the kernel reads pixels first."""
    model = _chain(nn.Conv2d(3, 64, 3, padding=1), nn.MaxPool2d(4), nn.Flatten(), nn.Linear(256, 2))
    assert "2×2 pixels" in _refused(model, monkeypatch)


class _Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.conv = nn.Conv2d(64, 64, 1)
        self.last = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        small = self.pool(x)
        return self.fc(torch.flatten(self.last(self.conv(x) + small), 1))


def test_an_addition_that_broadcasts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "equal shapes" in _refused(_Broadcast().eval(), monkeypatch)


def test_an_identity_and_a_dropout_are_no_obstacle() -> None:
    between = nn.Sequential(nn.Identity(), nn.Dropout(), nn.ReLU())
    plan = make_plan(trace(_Odd(between).eval()))
    assert isinstance(plan.steps[0], ConvStep)
    assert plan.steps[0].relu


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packed_weights_unpack_to_the_weights(name: str) -> None:
    form = FORMATS[name]
    module = nn.Conv2d(72, 40, 3, stride=2, padding=1)
    packed = pack_conv(module, form)
    assert (packed.rows, packed.columns, packed.channels) == (3, 3, 128)
    assert packed.values.shape == (64, 9 * 128)
    values = decode(packed.values, packed.scale.view(-1, 1)).view(64, 3, 3, 128)
    back = values[:40, :, :, :72].permute(0, 3, 1, 2)
    step = module.weight.detach().flatten(1).abs().amax(1).view(-1, 1, 1, 1)
    coarse = {"int8": 0.5 / 127, "fp8": 1 / 16}[name]
    assert ((back - module.weight.detach()).abs() <= step * coarse * 1.001).all()
    assert values[40:].abs().sum() == 0
    assert values[..., 72:].abs().sum() == 0
    assert packed.bias[40:].abs().sum() == 0


def test_the_stem_reads_whole_pixels() -> None:
    packed = pack_conv(nn.Conv2d(3, 64, 7, 2, 3), INT8)
    assert packed.stem
    assert (packed.rows, packed.columns, packed.channels) == (7, 1, 32)
    grid = packed.values.view(64, 7, 8, 4)
    assert grid[:, :, 7].abs().sum() == 0  # the eighth pixel is not of the window
    assert grid[..., 3].abs().sum() == 0  # nor is the fourth channel of the image


def test_encoding_saturates_and_rounds_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 1e9, -1e9])
    assert encode(x, torch.tensor(1.0), INT8).tolist() == [0, 2, 2, 0, 127, -127]


def test_a_channel_of_zeros_packs_to_zeros() -> None:
    module = nn.Linear(10, 3)
    nn.init.zeros_(module.weight)
    packed = pack_linear(module, INT8)
    assert packed.scale.tolist() == [1.0, 1.0, 1.0]
    assert packed.values.abs().sum() == 0


def test_int8_costs_little_accuracy() -> None:
    model = tiny()
    graph = trace(model)
    plan = make_plan(graph)
    scales = calibrate(graph, plan, [images(16, seed=7)], INT8, "min-max", CPU)
    modules = dict(graph.named_modules())
    x = images(4, seed=9)
    logits, stored = run_reference(plan, modules, pack(graph, plan, INT8), scales, INT8, x)
    with torch.no_grad():
        exact = model(x)
    assert float((logits - exact).norm() / exact.norm()) <= 0.05
    assert all(value.dtype == torch.int8 for value in stored.values())


def test_no_calibration_images_is_an_error() -> None:
    graph = trace(tiny())
    with pytest.raises(CalibrationError, match="no calibration images"):
        calibrate(graph, make_plan(graph), [], INT8, "min-max", CPU)


def test_calibration_images_with_nan_are_an_error() -> None:
    graph = trace(tiny())
    bad = images(2)
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="NaN"):
        calibrate(graph, make_plan(graph), [bad], INT8, "min-max", CPU)


def test_the_cpu_is_refused_with_a_way_out() -> None:
    with pytest.raises(NotApplicableError) as caught:
        lower(tiny(), [images(2)], "int8", CPU)
    assert "narrowgauge_lab.quant" in caught.value.next_step


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(NotApplicableError, match="int3"):
        lower(tiny(), [images(2)], "int3", CPU)


@st.composite
def _needs(draw: st.DrawFn) -> list:
    count = draw(st.integers(1, 12))
    needs = []
    for place in range(count):
        first = draw(st.integers(0, 10))
        last = first + draw(st.integers(0, 5))
        needs.append(Need(f"b{place}", draw(st.integers(1, 5000)), first, last))
    return needs


@given(_needs())
def test_buffers_that_live_together_never_overlap(needs: list) -> None:
    offsets, total = assign(needs)
    for one in needs:
        assert offsets[one.name] % ALIGNMENT == 0
        assert offsets[one.name] + one.size <= total
        for other in needs:
            together = one.last >= other.first and other.last >= one.first
            if one is not other and together:
                a, b = offsets[one.name], offsets[other.name]
                assert a + one.size <= b or b + other.size <= a


def test_places_are_used_again() -> None:
    chain = [Need(str(i), 1000, i, i + 1) for i in range(10)]
    assert assign(chain)[1] <= 3 * 1024


@given(
    st.integers(1, 500_000), st.integers(1, 2048), st.integers(1, 40), st.sampled_from([1, 7, 9])
)
def test_every_shape_has_tiles_that_divide_its_depth(
    pixels: int, count: int, blocks: int, window: int
) -> None:
    for depth in (32, 64 * blocks):
        tiles = candidates(ProductShape(pixels, count, depth, window))
        assert tiles
        assert all(depth % tile.k == 0 for tile in tiles)
        assert len({dataclasses.astuple(tile) for tile in tiles}) == len(tiles)
