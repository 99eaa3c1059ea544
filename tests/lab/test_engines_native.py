"""What torch runs itself: eager, channels_last, TorchScript; torch.compile in the slow tier."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from engine_cases import (
    CLASSES,
    CPU,
    NETWORKS,
    differently_laid,
    exact,
    images,
    network,
    relative_error,
)
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import engines, tf32_flags
from narrowgauge_lab.engines import Preparation
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.engines.native import MathFlags, of_batch
from narrowgauge_lab.measure.probe import precision_ran
from narrowgauge_lab.precision import available
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.torch_compat import torch_version
from narrowgauge_lab.transforms import fold_batch_norm

#: A few units in the last place per layer, relative to the largest logit.
BOUNDS = {"fp32": 2e-6, "fp16": 4e-3, "bf16": 4e-2}
FLOATS = [name for name in BOUNDS if name in available(CPU)]
#: torch 1.8 pools no empty batch.
COUNTS = (0, 1, 3) if torch_version() >= (1, 9) else (1, 3)


def hold(engine: str, name: str, precision: str) -> Any:
    """Prepare and hold against float64 for every batch and layout; the runner."""
    model = network(name)
    dtype = DTYPES[precision]
    wanted = Preparation(precision, CPU, batches=(0, 1, 4))
    runner = engines.prepare(engine, model, images(2).to(dtype), wanted)
    for count in COUNTS:
        x = images(count, seed=5).to(dtype)
        right = exact(model, x)
        for laid in differently_laid(x).values():
            got = runner(laid)
            assert got.shape == (count, CLASSES)
            if count:
                assert relative_error(got, right) <= BOUNDS[precision]
    assert precision_ran(runner.observations(), {}) == precision
    return runner


@pytest.mark.parametrize("precision", FLOATS)
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("engine", ["eager", "channels_last", "torchscript"])
def test_agrees_with_float64(engine: str, name: str, precision: str) -> None:
    runner = hold(engine, name, precision)
    facts = {fact.layer: fact for fact in runner.layers()}
    layers = [n for n, m in network(name).named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    assert list(facts) == layers
    assert {(f.provider, f.precision, f.is_product) for f in facts.values()} == {
        ("torch", precision, True)
    }
    assert sum(each.calls for each in runner.observations()) == len(layers)
    size = torch.finfo(DTYPES[precision]).bits // 8
    assert runner.memory_bytes() >= size * sum(p.numel() for p in network(name).parameters())


@pytest.mark.parametrize("engine", ["eager", "channels_last", "torchscript"])
def test_nan_comes_out_where_it_went_in(engine: str) -> None:
    wanted = Preparation("fp32", CPU)
    runner = engines.prepare(engine, network("concatenated"), images(3), wanted)
    x = images(3)
    x[1, 0, 8, 8] = math.nan
    finite = torch.isfinite(runner(x)).all(1)
    assert finite.tolist() == [True, False, True]


@pytest.mark.parametrize("engine", ["eager", "channels_last", "torchscript"])
def test_what_stands_in_a_layout_runs_in_it(engine: str) -> None:
    """Weights too; only TorchScript, as graphs and compiled code, has a choice."""
    options = {"layout": "channels_last"} if engine == "torchscript" else {}
    wanted = Preparation("fp32", CPU, options=options)
    runner = engines.prepare(engine, network("residual"), images(2), wanted)
    weight = runner._module.block.conv1.weight
    assert weight.is_contiguous(memory_format=torch.channels_last) == (engine != "eager")


class TestInt8:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_is_what_fake_quantisation_computes(self, name: str) -> None:
        """Within a step of the last layer's output per product that fell on the other side."""
        model = fold_batch_norm(network(name))
        calibration = (images(16, seed=1), images(16, seed=2))
        scales = calibrate(model, calibration, QuantConfig(activation_bits=exact_activation_bits()))
        wanted = Preparation("int8", CPU, calibration, (1, 2, 8))
        runner = engines.prepare("eager", network(name), images(2), wanted)
        x = images(8, seed=5)
        with torch.no_grad():
            right = fake_quantized(model, scales)(x)
        difference = (runner(x) - right).abs()
        step = float(scales["fc"].output.scale)
        assert float(difference.max()) <= 3.001 * step
        assert float((difference > step / 2).float().mean()) <= 0.2
        assert float(right.std()) > 5 * step
        for laid in differently_laid(x).values():
            assert torch.equal(runner(laid), runner(x))
        assert precision_ran(runner.observations(), {}) == "int8"
        assert {fact.precision for fact in runner.layers()} == {"int8"}
        assert runner.memory_bytes() is None

    def test_has_no_nan(self) -> None:
        """There is no integer for it: torch's rounding gives 0. So it cannot be looked for."""
        wanted = Preparation("int8", CPU, (images(16),))
        runner = engines.prepare("eager", network("residual"), images(1), wanted)
        x = images(1)
        x[0, 0, 8, 8] = math.nan
        assert bool(torch.isfinite(runner(x)).all())


def test_torchscript_options_change_the_program_and_not_its_result() -> None:
    model, x = network("residual"), images(2)
    right = exact(model, x)
    for optimize in (True, False):
        for layout in ("contiguous", "channels_last"):
            options = {"optimize": optimize, "layout": layout}
            wanted = Preparation("fp32", CPU, options=options)
            runner = engines.prepare("torchscript", model, x, wanted)
            assert relative_error(runner(x), right) <= BOUNDS["fp32"]
    wanted = Preparation("fp32", CPU, options={"layout": "nhwc"})
    with pytest.raises(BadValueError, match="layout 'nhwc' is none"):
        engines.prepare("torchscript", model, x, wanted)


class _Untraceable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        self.conv(x)
        return object()


def test_what_torchscript_fails_to_fold_is_frozen_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    freeze, asked = torch.jit.freeze, []

    def fails(trace: Any, *, optimize_numerics: bool = True) -> Any:
        asked.append(optimize_numerics)
        if optimize_numerics:
            raise RuntimeError("stack_out && stack_out->size() == 1 INTERNAL ASSERT FAILED at …")
        return freeze(trace, optimize_numerics=False)

    monkeypatch.setattr(torch.jit, "freeze", fails)
    model, x = network("residual"), images(2)

    runner = engines.prepare("torchscript", model, x, Preparation("fp32", CPU))

    assert asked[:2] == [True, False]
    assert torch.allclose(runner(x), model(x), rtol=1e-4, atol=1e-5)


def test_what_torchscript_cannot_trace_is_said() -> None:
    with pytest.raises(EngineBuildError, match="could not trace this _Untraceable") as caught:
        engines.prepare("torchscript", _Untraceable().eval(), images(1), Preparation("fp32", CPU))
    assert caught.value.why
    assert "eager" in caught.value.next_step


class _Affine(nn.Module):
    """Numbers behind a layer: a pass of TorchScript asks whether they are neutral."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x.mean((2, 3)) * 2 + 0.5) * 3 + 1


def test_numbers_beside_layers_can_be_traced_and_watched() -> None:
    model, x = _Affine().eval(), images(2)
    runner = engines.prepare("torchscript", model, x, Preparation("fp32", CPU))
    assert relative_error(runner(x), exact(model, x)) <= BOUNDS["fp32"]
    assert precision_ran(runner.observations(), {}) == "fp32"


def test_batches_are_made_of_the_examples_images() -> None:
    x = images(2)
    assert of_batch(x, 2) is x
    assert torch.equal(of_batch(x, 5), torch.cat([x, x, x[:1]]))
    assert of_batch(images(0), 3).shape == images(3).shape


def test_the_process_keeps_its_flags() -> None:
    """TF32 is the process's: a preparation sets it, and puts it back."""
    before = tf32_flags.tf32_allowed(), torch.backends.cudnn.benchmark
    engines.prepare("eager", network("residual"), images(1), Preparation("fp32", CPU))
    assert (tf32_flags.tf32_allowed(), torch.backends.cudnn.benchmark) == before


@pytest.mark.parametrize(("precision", "tf32"), [("fp32", False), ("tf32", True), ("fp16", None)])
def test_flags_are_held_at_each_call_and_given_back(precision: str, tf32: Any) -> None:
    """The flags can be set without a GPU; what they do there, tests marked gpu see."""
    flags = MathFlags(Preparation(precision, torch.device("cuda")), benchmark=True)
    cudnn, before = torch.backends.cudnn, tf32_flags.tf32_allowed()
    given = cudnn.benchmark
    try:
        for other in (True, False):
            tf32_flags.allow_tf32(other)
            cudnn.benchmark = False
            outside = tf32_flags.tf32_allowed()
            assert not flags.hold()
            with flags.in_force():
                assert flags.hold()
                assert cudnn.benchmark
                wanted = outside["conv"] if tf32 is None else tf32
                assert tf32_flags.tf32_allowed()["conv"] == wanted
            assert tf32_flags.tf32_allowed() == outside
            assert not cudnn.benchmark
    finally:
        tf32_flags.allow_tf32(before["matmul"])
        cudnn.benchmark = given
        if not before["matmul"] and before["conv"]:
            _conv_only()
    assert tf32_flags.tf32_allowed() == before


def _conv_only() -> None:
    """As a process begins: TF32 for convolutions alone."""
    cudnn = torch.backends.cudnn
    if hasattr(cudnn, "conv"):
        cudnn.conv.fp32_precision = "tf32"
        cudnn.rnn.fp32_precision = "tf32"
    else:
        cudnn.allow_tf32 = True


needs_compiler = pytest.mark.skipif(torch_version() < (2, 0), reason="torch.compile came with 2.0")


@pytest.mark.slow
@needs_compiler
@pytest.mark.filterwarnings("ignore:::torch")
class TestCompiled:
    @pytest.mark.parametrize("precision", ["fp32", "bf16"])
    @pytest.mark.parametrize("name", NETWORKS)
    def test_agrees_with_float64(self, name: str, precision: str) -> None:
        hold("compile", name, precision)

    def test_networks_of_one_class_do_not_use_up_each_others_compilations(self) -> None:
        """torch.compile runs eagerly after eight for one piece of code, and only warns. More than
        that are made here of one class: each one's compiler must be seen to be given its graph."""
        for _ in range(10):
            model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(4 * 15 * 15, 2))
            runner = engines.prepare("compile", model.eval(), images(1), Preparation("fp32", CPU))
            assert sum(each.calls for each in runner.observations()) == 2

    def test_modes_are_checked(self) -> None:
        wanted = Preparation("fp32", CPU, options={"compile_mode": "fast"})
        with pytest.raises(BadValueError, match="compile_mode 'fast' is none"):
            engines.prepare("compile", network("residual"), images(1), wanted)
