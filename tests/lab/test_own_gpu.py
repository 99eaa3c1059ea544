"""Our GPU engine without a GPU: steps, memory, packing, ranges, the reference of its kernels."""

from __future__ import annotations

import copy
import dataclasses
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from network_cases import everything, images, tiny
from own_cases import distance
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.own.gpu.arena import ALIGNMENT, Need, assign
from narrowgauge_lab.engines.own.gpu.formats import FORMATS, decode, encode, for_products
from narrowgauge_lab.engines.own.gpu.libraries import torch_step
from narrowgauge_lab.engines.own.gpu.lowered import Lowered, lowered
from narrowgauge_lab.engines.own.gpu.lowering import lower, trace
from narrowgauge_lab.engines.own.gpu.packing import pack_conv, pack_depthwise, pack_linear
from narrowgauge_lab.engines.own.gpu.placement import Placement, place
from narrowgauge_lab.engines.own.gpu.reference import Reference
from narrowgauge_lab.engines.own.gpu.steps import (
    AffineStep,
    ConcatStep,
    ConvStep,
    LinearStep,
    Plan,
    PoolStep,
    Prologue,
    Step,
    TorchStep,
    sources,
)
from narrowgauge_lab.engines.own.gpu.tiles import ProductShape, candidates
from narrowgauge_lab.errors import CalibrationError

CPU = torch.device("cpu")
INT8, FP32 = FORMATS["int8"], FORMATS["fp32"]
SIZE = 8


def made(model: nn.Module, form: Any = FP32, **wanted: Any) -> Lowered:
    """`model` lowered for images of 8 × 8."""
    few = wanted.pop("calibration", [images(2, height=SIZE, width=SIZE)])
    channels = wanted.pop("channels", 3)
    return lowered(model.eval(), (channels, SIZE, SIZE), form, few, CPU)


def chain(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *layers)


class Written(nn.Module):
    """Some layers, put together by a function."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.one = nn.Conv2d(8, 8, 3, padding=1)
        self.other = nn.Conv2d(8, 8, 1)
        self.relu_ = nn.ReLU(inplace=True)
        self.dropout = nn.Dropout()
        self.identity = nn.Identity()
        self.norm = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 4)
        self.register_buffer("shift", torch.ones(1, 3, 1, 1))
        self._forward = forward

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._forward(self, x)


def kinds(network: Lowered) -> List[str]:
    return [type(step).__name__[: -len("Step")] for step in network.plan.steps]


# ---- lowering


def test_everything_that_can_ride_in_a_convolution_does() -> None:
    plan = lowered(tiny(), (3, 37, 33), FP32, [], CPU).plan
    by_module = {step.module: step for step in plan.steps if isinstance(step, ConvStep)}
    third = by_module["layers.0.conv3"]
    assert third.residual == by_module["layers.0.downsample.0"].output
    assert third.activation == "relu"
    assert by_module["layers.0.downsample.0"].activation == "none"
    assert by_module["layers.2.conv3"].residual == by_module["layers.1.conv3"].output
    others = [type(step) for step in plan.steps if not isinstance(step, ConvStep)]
    assert others == [PoolStep, PoolStep, LinearStep]
    assert len(plan.steps) == len(by_module) + len(others) == 12 + 3


def by_module(network: Lowered) -> Dict[str, Any]:
    return {str(getattr(step, "module", "")): step for step in network.plan.steps}


def of_kind(network: Lowered, kind: Any) -> List[Any]:
    return [step for step in network.plan.steps if isinstance(step, kind)]


def test_every_kind_of_step_comes_of_its_layers() -> None:
    network = lowered(everything(12, 10, torch_step=True), (3, 12, 10), FP32, [], CPU)
    steps = by_module(network)
    pool, same, average = of_kind(network, PoolStep)
    cat, other = of_kind(network, ConcatStep)
    (between,) = of_kind(network, TorchStep)

    assert network.stem is steps["stem"]
    assert steps["narrow"].residual == steps["shortcut"].output
    assert (steps["deep"].depthwise, steps["deep"].activation) == (True, "relu6")
    prologue = steps["squeeze"].prologue
    assert prologue == Prologue("norm2", "relu", prologue.value)
    assert steps["norm4"] == AffineStep("norm4", cat.output, steps["mix"].source, "relu")
    assert pool == PoolStep("max", steps["stem"].output, steps["wide"].source, 3, 2, 1)
    assert (average.kind, average.window, average.source) == ("mean", 2, other.output)
    assert (average.prologue.module, average.prologue.activation) == ("norm5", "relu")
    assert cat.sources == (steps["deep"].output, steps["grow"].output, steps["deep"].output)
    assert other.sources == (steps["mix"].output, same.output)
    assert between.operator == "Sigmoid"
    assert steps["hidden"].activation == "relu"
    assert network.plan.is_result(steps["last"])
    assert not network.plan.is_result(steps["hidden"])


@pytest.mark.parametrize(
    ("layers", "steps"),
    [
        ((nn.MaxPool2d(2), nn.ReLU()), ["Conv", "Pool", "Affine"]),
        ((nn.MaxPool2d((2, 1)),), ["Conv", "Torch"]),
        ((nn.MaxPool2d(2, dilation=2),), ["Conv", "Torch"]),
        ((nn.AvgPool2d(3, 1, 1),), ["Conv", "Pool"]),
        ((nn.AvgPool2d(3, 1, 1, count_include_pad=False),), ["Conv", "Torch"]),
        ((nn.AvgPool2d(3, ceil_mode=True),), ["Conv", "Torch"]),
        ((nn.AdaptiveAvgPool2d(1),), ["Conv", "Pool"]),
        ((nn.AdaptiveAvgPool2d(SIZE),), ["Conv"]),
        ((nn.AdaptiveAvgPool2d(3),), ["Conv", "Torch"]),
        ((nn.Identity(), nn.Dropout(), nn.ReLU6()), ["Conv"]),
        ((nn.Hardtanh(-1, 1),), ["Conv", "Torch"]),
        ((nn.Conv2d(8, 8, 3, groups=8),), ["Conv", "Conv"]),
        ((nn.Conv2d(8, 8, 3, groups=2),), ["Conv", "Torch"]),
        ((nn.Conv2d(8, 8, 3, dilation=2),), ["Conv", "Torch"]),
        ((nn.Conv2d(8, 8, (3, 1)),), ["Conv", "Torch"]),
        ((nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),), ["Conv", "Torch"]),
        ((nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1)),
         ["Conv", "Pool", "Conv"]),
        ((nn.MaxPool2d(2), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3, padding=1)),
         ["Conv", "Pool", "Affine", "Conv"]),
        ((nn.MaxPool2d(2), nn.BatchNorm2d(8, track_running_stats=False)),
         ["Conv", "Pool", "Torch"]),
        ((nn.Flatten(), nn.Linear(8 * SIZE * SIZE, 4), nn.ReLU()), ["Conv", "Linear"]),
        ((nn.Flatten(), nn.Softmax(1)), ["Conv", "Torch"]),
        ((nn.Linear(SIZE, 3),), ["Conv", "Torch"]),
    ],
)  # fmt: skip
def test_what_no_kernel_of_ours_says_is_left_to_torch(
    layers: Tuple[nn.Module, ...], steps: List[str]
) -> None:
    network = made(chain(*layers))

    assert kinds(network) == steps


@pytest.mark.parametrize(
    ("forward", "steps"),
    [
        (lambda m, x: m.fc(m.stem(x).mean([2, 3])), ["Conv", "Pool", "Linear"]),
        (lambda m, x: torch.relu(m.one(m.stem(x)) + 1.0), ["Conv", "Conv", "Torch", "Affine"]),
        (lambda m, x: torch.add(m.stem(x), m.stem(x), alpha=2), ["Conv", "Conv", "Torch"]),
        (lambda m, x: m.stem(x) * 2, ["Conv", "Torch"]),
        (lambda m, x: m.stem(x) * m.stem(x).mean((2, 3), keepdim=True),
         ["Conv", "Conv", "Pool", "Torch"]),
        (lambda m, x: torch.cat([m.stem(x), x], 1), ["Conv", "Concat"]),
        (lambda m, x: torch.cat([m.stem(x), m.stem(x)], 2), ["Conv", "Conv", "Torch"]),
        (lambda m, x: torch.flatten(x, 1), []),
        (lambda m, x: m.fc(torch.flatten(x, 1)[:, :8]), ["Torch", "Linear"]),
    ],
)  # fmt: skip
def test_functions_become_steps_too(forward: Any, steps: List[str]) -> None:
    network = made(Written(forward))

    assert kinds(network) == steps


def test_pixels_of_the_images_are_no_row_of_features() -> None:
    """Between them in memory there is room, which only torch steps over."""
    network = made(nn.Sequential(nn.Flatten(), nn.Linear(3 * SIZE * SIZE, 4), nn.ReLU()))

    assert kinds(network)[0] == "Torch"


def test_of_two_added_convolutions_the_later_adds() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        return torch.relu(m.identity(m.other(x)) + m.dropout(m.one(x)))

    network = made(Written(forward))
    adding = [step for step in network.plan.steps if getattr(step, "residual", None)]

    assert len(adding) == 1
    assert adding[0].activation == "relu"
    assert kinds(network) == ["Conv", "Conv", "Conv"]


def reads_again(write: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    """Something is written over, and what it was is read afterwards."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        before = m.stem(x)
        return write(m, before) + m.one(before)

    return Written(forward)


def reads_before(write: Callable[[Any, torch.Tensor], torch.Tensor]) -> nn.Module:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        before = m.stem(x)
        read = m.one(before)
        return write(m, before) + read

    return Written(forward)


def added_to(m: Any, x: torch.Tensor) -> torch.Tensor:
    x += m.other(x)
    return x


WRITES = {
    "+=": added_to,
    "module": lambda m, x: m.relu_(x),
    "behind a dropout": lambda m, x: m.relu_(m.dropout(x)),
    "inplace=True": lambda m, x: nn.functional.relu(x, inplace=True),
    "inplace in its place": lambda m, x: nn.functional.relu6(x, True),
    "relu_": lambda m, x: torch.relu_(x),
    "method": lambda m, x: x.mul_(2.0),
}


@pytest.mark.parametrize("name", WRITES)
def test_what_is_written_over_must_not_be_read_afterwards(name: str) -> None:
    with pytest.raises(NotApplicableError, match="writes over"):
        made(reads_again(WRITES[name]))


def test_no_convolution_is_moved_before_what_changes_its_input() -> None:
    """Of two that are added the one on the shorter way runs early, but here it has to wait."""

    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        x = m.stem(x)
        return m.one(torch.sigmoid(m.relu_(x))) + m.other(x)

    with pytest.raises(NotApplicableError, match="writes over"):
        made(Written(forward))


@pytest.mark.parametrize("name", ["+=", "module", "behind a dropout", "inplace=True"])
def test_what_was_read_before_may_be_written_over(name: str) -> None:
    model = reads_before(WRITES[name]).eval()
    x = images(2, seed=5, height=SIZE, width=SIZE)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())

    assert distance(Reference(made(model))(x), exact) <= 1e-6


def test_torch_may_not_write_over_what_others_read() -> None:
    """It would write over what has been put together of it, too."""
    with pytest.raises(NotApplicableError, match="what others read"):
        made(reads_before(WRITES["method"]))


@pytest.mark.parametrize(
    ("forward", "named"),
    [
        (lambda m, x: (m.stem(x), x), "more than one output"),
        (lambda m, x: m.stem(x - m.shift), "reads more than values"),
        (lambda m, x: m.stem(x).view(x.size(0), -1), "no tensor"),
        (lambda m, x: torch.chunk(m.stem(x), 2, 1)[0], "no tensor"),
    ],
)
def test_networks_of_other_shapes_are_refused(forward: Any, named: str) -> None:
    with pytest.raises(NotApplicableError) as caught:
        made(Written(forward))
    assert named in str(caught.value)


class TwoInputs(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y


def test_a_second_input_is_refused() -> None:
    graph, size = trace(TwoInputs().eval()), (3, SIZE, SIZE)
    with pytest.raises(NotApplicableError, match="second input"):
        lower(graph, {"x": size, "y": size, "add": size})


def test_torch_runs_no_step_of_an_8_bit_network() -> None:
    network = made(chain(nn.AdaptiveAvgPool2d(1), nn.Sigmoid()), FORMATS["fp16"])
    eight = dataclasses.replace(network, form=INT8)
    (step,) = of_kind(network, TorchStep)
    with pytest.raises(OperatorNotTakenError) as caught:
        torch_step(eight.memory(1), step, network.modules)
    assert "Sigmoid" in str(caught.value)


# ---- memory


def lies(where: Placement, name: str) -> Tuple[str, int]:
    return where.places[name].buffer, where.places[name].offset


def test_a_dense_block_grows_in_one_buffer() -> None:
    steps = (
        ConvStep("m0", "x", "a"),
        ConvStep("m1", "a", "b"),
        ConcatStep(("a", "b"), "ab"),
        ConvStep("m2", "ab", "c"),
        ConcatStep(("a", "b", "c"), "abc"),
        PoolStep("mean", "abc", "out", 0, 1, 0),
    )
    channels = {"x": 3, "a": 8, "b": 12, "ab": 20, "c": 4, "abc": 24}
    sizes: Dict[str, Tuple[int, ...]] = {name: (n, 5, 5) for name, n in channels.items()}
    where = place(Plan("x", "out", "out", steps), {**sizes, "out": (24, 1, 1)}, INT8, 2)

    assert {name: lies(where, name) for name in ("a", "b", "c", "ab", "abc")} == {
        "a": ("abc", 0), "b": ("abc", 8), "c": ("abc", 20), "ab": ("abc", 0), "abc": ("abc", 0)
    }  # fmt: skip
    assert where.copies == {"ab": (), "abc": ()}
    assert {where.places[name].pixel for name in sizes if name != "x"} == {32}  # whole 16 bytes
    assert where.sizes == {"abc": 2 * 25 * 32, "out": 2 * 32}


def test_what_comes_twice_or_lies_elsewhere_is_copied() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a, b = m.stem(x), m.stem(x)
        return torch.cat([x, a, a, torch.cat([a, b], 1)], 1)

    network = made(Written(forward))
    inner, outer = of_kind(network, ConcatStep)
    where = network.memory(1).placement
    a = inner.sources[0]

    assert where.copies[outer.output] == (("x", 0), (a, 3), (a, 11))
    assert lies(where, inner.output) == (outer.output, 19)
    assert where.copies[inner.output] == ()


def test_nothing_lies_between_the_pixels_that_a_linear_layer_reads() -> None:
    layers = (nn.Conv2d(8, 5, 1), nn.Flatten(), nn.Linear(5 * SIZE * SIZE, 4))
    network = made(chain(*layers), FORMATS["fp16"])
    where = network.memory(3).place(network.plan.steps[1].output)

    assert (where.channels, where.pixel) == (5, 5)


def test_concatenations_before_a_linear_layer_are_dense_too() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        a = m.stem(x)
        both = torch.cat([a, m.other(a)], 1)
        wide = torch.cat([both, m.one(a)], 1)
        return wide.mean([2, 3])[:, :4] + m.fc(torch.flatten(both, 1))

    model = Written(forward)
    model.fc = nn.Linear(16 * SIZE * SIZE, 4)
    network = made(model, FORMATS["fp16"])
    both, wide = (step.output for step in of_kind(network, ConcatStep))
    where = network.memory(1).placement

    assert lies(where, both) == (both, 0)
    assert where.places[both].pixel == 16
    assert where.copies[wide] == ((both, 0),)


@pytest.mark.parametrize(("kernel", "stride", "padding"), [(7, 2, 3), (3, 1, 0), (11, 4, 2)])
@pytest.mark.parametrize("name", ["int8", "fp32"])
def test_a_stem_never_reads_beyond_a_row(name: str, kernel: int, stride: int, padding: int) -> None:
    form = FORMATS[name]
    conv = nn.Conv2d(3, 8, kernel, stride, padding)
    network = lowered(
        nn.Sequential(conv, nn.ReLU()).eval(), (3, 23, 19), form, [images(1, 0, 23, 19)], CPU
    )
    memory, packed = network.memory(2), network.weights["0"]
    out = memory.size(network.plan.output)
    last = (out[2] - 1) * stride * 4 + packed.depth
    rows = (out[1] - 1) * stride + kernel

    assert packed.stem
    assert last <= memory.input_place.width * memory.input_place.pixel
    assert rows <= memory.input_place.height == 23 + 2 * padding
    source = network.plan.source
    view = memory.view(source)
    view.copy_(torch.arange(2 * 3 * 23 * 19).view(2, 3, 23, 19).remainder(100))
    image = memory.buffers[source].view(2, memory.input_place.height, -1, 4)
    inside = image[:, padding : padding + 23, padding : padding + 19, :3].permute(0, 3, 1, 2)
    assert torch.equal(inside, view)
    assert int((image != 0).sum()) == int((view != 0).sum())


@st.composite
def _needs(draw: st.DrawFn) -> List[Need]:
    needs = []
    for number in range(draw(st.integers(1, 12))):
        first = draw(st.integers(0, 10))
        last = first + draw(st.integers(0, 5))
        needs.append(Need(f"b{number}", draw(st.integers(1, 5000)), first, last))
    return needs


@given(_needs())
def test_buffers_that_live_together_never_overlap(needs: List[Need]) -> None:
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
    in_a_row = [Need(str(i), 1000, i, i + 1) for i in range(10)]
    assert assign(in_a_row)[1] <= 3 * 1024


@st.composite
def _plans(draw: st.DrawFn) -> Tuple[Plan, Dict[str, Tuple[int, ...]]]:
    """Steps on 2 × 2 pixels, among them concatenations of anything, some of it several times."""
    sizes: Dict[str, Tuple[int, ...]] = {"x": (draw(st.integers(1, 5)), 2, 2)}
    steps: List[Step] = []
    names = ["x"]
    for number in range(draw(st.integers(1, 10))):
        output = f"v{number}"
        with_pixels = [name for name in names if len(sizes[name]) == 3]
        source = draw(st.sampled_from(with_pixels))
        kind = draw(st.sampled_from(("conv", "add", "affine", "concat", "linear")))
        if kind == "concat":
            several = draw(st.lists(st.sampled_from(with_pixels), min_size=1, max_size=4))
            steps.append(ConcatStep(tuple(several), output))
            sizes[output] = (sum(sizes[each][0] for each in several), 2, 2)
        elif kind == "linear":
            steps.append(LinearStep(f"m{number}", source, output))
            sizes[output] = (draw(st.integers(1, 9)),)
        elif kind == "affine":
            steps.append(AffineStep("", source, output, "relu"))
            sizes[output] = sizes[source]
        else:
            residual = draw(st.sampled_from(with_pixels)) if kind == "add" else None
            steps.append(ConvStep(f"m{number}", source, output, residual))
            channels = sizes[residual][0] if residual else draw(st.integers(1, 20))
            sizes[output] = (channels, 2, 2)
        names.append(output)
    return Plan("x", names[-1], names[-1], tuple(steps)), sizes


class _Simulated:
    """Memory as numbers that say which element of which value lies there."""

    def __init__(self, plan: Plan, sizes: Dict[str, Tuple[int, ...]], batch: int) -> None:
        self.plan, self.sizes, self.batch = plan, sizes, batch
        self.where = place(plan, sizes, INT8, batch)
        self.memory = torch.full((self.where.total,), -1, dtype=torch.int64)
        self._count = 0
        self.content = {plan.source: self._fresh(plan.source)}
        for step in plan.steps:
            self.content[step.output] = (
                torch.cat([self.content[name] for name in step.sources], 1)
                if isinstance(step, ConcatStep)
                else self._fresh(step.output)
            )

    def view(self, name: str) -> torch.Tensor:
        """[pixels, channels] of a value in memory."""
        each = self.where.places[name]
        begin = self.where.begins[each.buffer] + each.offset
        pixels = self.batch * each.height * each.width
        end = begin + (pixels - 1) * each.pixel + each.channels
        assert end <= self.where.begins[each.buffer] + self.where.sizes[each.buffer]
        return self.memory.as_strided((pixels, each.channels), (each.pixel, 1), begin)

    def _fresh(self, name: str) -> torch.Tensor:
        size = self.sizes[name]
        pixels = self.batch * (size[1] * size[2] if len(size) == 3 else 1)
        values = torch.arange(pixels * size[0]).view(pixels, size[0]) + self._count
        self._count += values.numel()
        return values

    def read(self, name: str) -> torch.Tensor:
        if name != self.plan.source:
            assert torch.equal(self.view(name), self.content[name]), f"{name} is not there"
        return self.content[name]

    def run(self, step: Step) -> None:
        if isinstance(step, ConcatStep):
            for name, channel in self.where.copies[step.output]:
                value = self.read(name)
                self.view(step.output)[:, channel : channel + value.shape[1]] = value
            return
        for name in sources(step):
            self.read(name)
        self.view(step.output).copy_(self.content[step.output])


@given(_plans(), st.integers(1, 2), st.booleans())
@settings(max_examples=200, deadline=None)
def test_every_step_finds_what_it_reads(
    case: Tuple[Plan, Dict[str, Tuple[int, ...]]], batch: int, late: bool
) -> None:
    """In order, and with those that may run beside others as late as they may."""
    plan, sizes = case
    simulated = _Simulated(plan, sizes, batch)
    waiting = simulated.where.waits if late else {}
    held: List[Tuple[int, Step]] = []
    for at, step in enumerate(plan.steps):
        if any(until == at for until, _ in held):
            for _, each in held:
                simulated.run(each)
            held = []
        if at in waiting:
            held.append((waiting[at], step))
        else:
            simulated.run(step)
    for _, each in held:
        simulated.run(each)
    if plan.output != "x":
        simulated.read(plan.output)


# ---- numbers


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_packed_weights_unpack_to_the_weights(name: str) -> None:
    form = FORMATS[name]
    module = nn.Conv2d(72, 40, 3, stride=2, padding=1)
    packed = pack_conv(module, form, stem=False)
    assert (packed.rows, packed.columns, packed.channels, packed.depth) == (3, 3, 72, 128)
    assert packed.values.shape == (40, 9 * 128)
    values = decode(packed.values, packed.scale.view(-1, 1)).view(40, 3, 3, 128)
    back = values[..., :72].permute(0, 3, 1, 2)
    near(back, module.weight.detach(), name)
    assert values[..., 72:].abs().sum() == 0
    assert torch.equal(packed.bias, module.bias.detach())


def near(back: torch.Tensor, weight: torch.Tensor, name: str) -> None:
    """Within half a unit of the format, per output channel where it is a scaled one."""
    largest = weight.flatten(1).abs().amax(1).view(-1, *[1] * (weight.dim() - 1))
    step = {"int8": largest * 0.5 / 127, "fp8": largest / 16, "fp16": weight.abs() * 2**-11 + 1e-7,
            "bf16": weight.abs() * 2**-8, "tf32": weight.abs() * 2**-11}  # fmt: skip
    difference = (back - weight).abs()
    assert (difference <= step.get(name, torch.zeros(1)) * 1.001).all()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_depthwise_weights_are_position_by_position(name: str) -> None:
    module = nn.Conv2d(24, 24, 3, groups=24, bias=False)
    packed = pack_depthwise(module, FORMATS[name])
    back = decode(packed.values, packed.scale.view(1, -1)).t().view(24, 1, 3, 3)
    near(back, module.weight.detach(), name)
    assert packed.bias.abs().sum() == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_linear_weights_are_in_the_order_of_pixels(name: str) -> None:
    module = nn.Linear(5 * 2 * 3, 4)
    packed = pack_linear(module, FORMATS[name], (5, 2, 3))
    values = decode(packed.values, packed.scale.view(-1, 1))
    back = values[:, :30].view(4, 2, 3, 5).permute(0, 3, 1, 2).reshape(4, 30)
    near(back, module.weight.detach(), name)
    assert values.shape == (4, 64)
    assert values[:, 30:].abs().sum() == 0


@pytest.mark.parametrize(("name", "run"), [("int8", 32), ("fp16", 32), ("fp32", 32)])
def test_the_stem_reads_whole_pixels(name: str, run: int) -> None:
    module = nn.Conv2d(3, 64, 7, 2, 3)
    packed = pack_conv(module, FORMATS[name], stem=True)
    assert packed.stem
    assert (packed.rows, packed.columns, packed.channels, packed.depth) == (7, 1, run, run)
    values = decode(packed.values, packed.scale.view(-1, 1)).view(64, 7, run // 4, 4)
    near(values[:, :, :7, :3].permute(0, 3, 1, 2), module.weight.detach(), name)
    assert values[:, :, 7:].abs().sum() == 0  # the eighth pixel is not of the window
    assert values[..., 3].abs().sum() == 0  # nor is the fourth channel of the image


def test_encoding_saturates_and_rounds_half_to_even() -> None:
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, 1e9, -1e9])
    assert encode(x, torch.tensor(1.0), INT8).tolist() == [0, 2, 2, 0, 127, -127]


def test_a_channel_of_zeros_packs_to_zeros() -> None:
    module = nn.Linear(10, 3)
    nn.init.zeros_(module.weight)
    packed = pack_linear(module, INT8, (10, 1, 1))
    assert packed.scale.tolist() == [1.0, 1.0, 1.0]
    assert packed.values.abs().sum() == 0


def test_what_is_only_moved_has_one_scale() -> None:
    network = lowered(everything(12, 10), (3, 12, 10), INT8, [images(4, 7, 12, 10)], CPU)
    scales, steps = network.scales, by_module(network)
    pool, same, _ = of_kind(network, PoolStep)
    cat, other = of_kind(network, ConcatStep)
    apart = ("stem", "wide", "narrow", "deep", "norm4", "mix", "hidden")

    assert scales[pool.output] == scales[steps["stem"].output]
    for name in cat.sources:
        assert scales[name] == scales[cat.output]
    assert scales[steps["mix"].output] == scales[same.output] == scales[other.output]
    assert len({scales[steps[name].output] for name in apart}) == len(apart)


def test_the_largest_of_a_shared_scale_counts() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.stem(x), torch.relu(x)], 1)

    model = Written(forward).eval()
    few = images(4, seed=2, height=SIZE, width=SIZE)
    seen = [few[:2], 10 * few[2:]]
    network = made(model, INT8, calibration=seen)
    with torch.no_grad():
        widest = max(float(model(each).abs().max()) for each in seen)

    assert {network.scales[step.output] for step in network.plan.steps} == {widest / 127}
    assert network.scales[network.plan.source] == float(seen[1].abs().max()) / 127


def test_no_calibration_images_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="no calibration images"):
        made(chain(nn.ReLU()), INT8, calibration=[])


def test_calibration_images_with_nan_are_an_error() -> None:
    bad = images(2, height=SIZE, width=SIZE)
    bad[0, 0, 0, 0] = float("nan")
    with pytest.raises(CalibrationError, match="NaN"):
        made(chain(nn.ReLU()), INT8, calibration=[bad])


@given(
    st.integers(1, 500_000),
    st.integers(1, 2048),
    st.integers(1, 40),
    st.sampled_from([1, 7, 9]),
    st.sampled_from([1, 2, 4]),
)
def test_every_shape_has_tiles_that_divide_its_depth(
    pixels: int, count: int, blocks: int, window: int, width: int
) -> None:
    for depth in (32, 64 * blocks):
        tiles = candidates(ProductShape(pixels, count, depth, window, width))
        assert tiles
        assert all(depth % tile.k == 0 and tile.k * width >= 32 for tile in tiles)
        assert all(tile.parts <= window * depth // tile.k for tile in tiles)
        assert len({dataclasses.astuple(tile) for tile in tiles}) == len(tiles)


# ---- what the kernels are held against


#: In norm, of what a network in float64 gives: what rounding every stored value makes of it.
NEAR = {"fp32": 1e-6, "tf32": 5e-3, "fp16": 8e-3, "bf16": 5e-2, "int8": 0.2, "fp8": 0.5}


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_the_reference_is_the_network(name: str) -> None:
    form = FORMATS[name]
    model = everything(20, 18, torch_step=not form.scaled)
    few, x = images(16, 7, 20, 18), images(3, 9, 20, 18)
    reference = Reference(lowered(model, (3, 20, 18), form, [few], CPU))
    found = reference(x)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())

    assert found.shape == exact.shape == (3, 10)
    assert found.dtype == torch.float32
    assert distance(found, exact) <= NEAR[name]
    assert {value.dtype for value in reference.stored.values()} == {form.dtype}


def test_int8_costs_little_accuracy() -> None:
    model, x = tiny(), images(4, seed=9)
    reference = Reference(lowered(model, (3, 37, 33), INT8, [images(16, seed=7)], CPU))
    with torch.no_grad():
        exact = model(x)

    assert distance(reference(x), exact.double()) <= 0.05


@pytest.mark.parametrize(
    "layers",
    [
        (nn.MaxPool2d(3, 2, 1, ceil_mode=True),),
        (nn.MaxPool2d(3, 3, ceil_mode=True),),
        (nn.AvgPool2d(3, 2, 1),),
        (nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        (nn.Conv2d(8, 8, 5, 2, 2, groups=8), nn.ReLU6()),
        (nn.Flatten(), nn.Linear(8 * SIZE * SIZE, 5), nn.ReLU(), nn.Linear(5, 4), nn.Softmax(1)),
        (nn.ReLU(), nn.ReLU6()),
        (nn.Conv2d(8, 6, 3, groups=2, dilation=2), nn.Flatten()),
    ],
)
def test_the_reference_of_single_steps(layers: Tuple[nn.Module, ...]) -> None:
    torch.manual_seed(1)
    model = chain(*layers).eval()
    x = 3 * images(2, seed=5, height=SIZE, width=SIZE)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())
    found = Reference(made(model))(x)

    assert found.shape == exact.shape
    assert distance(found, exact) <= 1e-6


def test_networks_that_read_images_elsewhere_than_in_a_stem() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([m.other(torch.relu(m.norm(m.stem(x)))), x], 1)

    model = Written(forward).eval()
    network = made(model)
    x = images(2, seed=5, height=SIZE, width=SIZE)
    with torch.no_grad():
        exact = copy.deepcopy(model).double()(x.double())

    assert network.stem is None
    assert not any(packed.stem for packed in network.weights.values())
    assert distance(Reference(network)(x), exact) <= 1e-6


def test_weights_of_tf32_are_the_nearest_it_has() -> None:
    """Against arithmetic in float64: ten bits behind the leading one, half to even."""
    x = torch.randn(4096, generator=torch.Generator().manual_seed(3)) * 10.0 ** torch.arange(
        -8, 8
    ).repeat(256)
    half = torch.tensor([1 + 2.0**-11, 1 + 3 * 2.0**-11, -1 - 2.0**-11, 0.0, -0.0])
    x = torch.cat([x, half])
    exponent = torch.floor(torch.log2(x.double().abs().clamp(min=1e-300)))
    unit = 2.0 ** (exponent - 10)
    wanted = torch.where(x == 0, x.double(), torch.round(x.double() / unit) * unit)

    assert torch.equal(for_products(x, FORMATS["tf32"]).double(), wanted)
    odd = torch.tensor([float("nan"), float("inf"), float("-inf")])
    assert torch.equal(for_products(odd, FORMATS["tf32"]).nan_to_num(5.0), odd.nan_to_num(5.0))
    assert for_products(x, FORMATS["fp32"]) is x


def test_lowering_changes_nothing_of_the_model() -> None:
    model = everything(12, 10)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lowered(model, (3, 12, 10), INT8, [images(4, 7, 12, 10)], CPU)

    assert not model.training
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 10), reason="Triton needs Python 3.10")
@pytest.mark.parametrize("name", ["fp32", "fp16", "int8"])
def test_the_kernels_do_by_the_interpreter_what_the_reference_does(name: str) -> None:
    here = Path(__file__).parent
    paths = [str(here.parents[1] / "src"), str(here)]
    done = subprocess.run(
        [sys.executable, str(here / "own_interpreted.py"), name],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{name}: ")
    assert int(done.stdout.split()[1]) > 25, done.stdout
