"""Engines by name, what they are asked for, and what is refused before anything is built."""

from __future__ import annotations

import copy
import time

import pytest
import torch
from engine_cases import CLASSES, CPU, images, network
from torch import nn

from narrowgauge_contract.errors import (
    BadValueError,
    ExitCode,
    NotApplicableError,
    SkippedError,
    UnknownNameError,
)
from narrowgauge_lab import engines
from narrowgauge_lab.engines import Preparation, registry
from narrowgauge_lab.engines.errors import (
    EngineClosedError,
    EngineMissingError,
    ShapeOutsideProfileError,
)
from narrowgauge_lab.errors import CalibrationError, OutOfMemoryError, describe

FP32 = Preparation("fp32", CPU)
CUDA = torch.device("cuda")


def test_the_engines_are_those_of_the_design_and_each_answers() -> None:
    assert engines.ENGINES == (
        "eager", "channels_last", "torchscript", "cuda-graph", "compile", "onnxruntime",
        "openvino", "xla", "tensorrt", "torch2trt", "narrowgauge",
    )  # fmt: skip
    for name in engines.ENGINES:
        assert registry.engine(name).name == name
    for name in ("eager", "channels_last", "torchscript"):
        assert engines.missing(name, CPU) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a host without a GPU")
@pytest.mark.parametrize("name", ["eager", "cuda-graph", "torchscript", "torch2trt"])
def test_a_host_without_a_gpu_says_so(name: str) -> None:
    assert engines.missing(name, CUDA)


def test_a_missing_engine_skips_its_row_with_the_reason() -> None:
    with pytest.raises(EngineMissingError, match="no cuda-graph") as caught:
        engines.prepare("cuda-graph", network("residual"), images(1), FP32)
    assert caught.value.why == "CUDA graphs are of CUDA devices"
    assert isinstance(caught.value, SkippedError)
    assert caught.value.exit_code == ExitCode.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("name", "precision", "why"),
    [
        ("eager", "tf32", "8.0"),
        ("eager", "fp8", "no fp8"),
        ("torchscript", "int8", "engine=narrowgauge"),
        ("channels_last", "int8", "engine=eager"),
    ],
)
def test_a_precision_that_an_engine_has_not_is_refused(name, precision, why) -> None:
    wanted = Preparation(precision, CPU, (images(2),))
    with pytest.raises(NotApplicableError, match=f"{name} does not run {precision}") as caught:
        engines.prepare(name, network("residual"), images(1), wanted)
    assert why in caught.value.why
    assert not isinstance(caught.value, SkippedError)


def _half(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).half()


def _training(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model).train()


@pytest.mark.parametrize(
    ("change", "example", "wanted", "message"),
    [
        (_training, images(1), FP32, "training mode"),
        (_half, images(1), FP32, r"conv.weight is torch.float16 on cpu"),
        (nn.Module.eval, images(1).double(), FP32, "torch.float64, on cpu"),
        (nn.Module.eval, images(1)[0], FP32, r"the example is \(3, 17, 17\)"),
        (nn.Module.eval, images(1), Preparation("fp16", CPU), "the example is .* torch.float32"),
        (nn.Module.eval, images(1), Preparation("fp32", CPU, (), (4, 2, 8)), "are no profile"),
        (nn.Module.eval, images(0), FP32, "batches of 0, 0, 0 are no profile"),
        (
            nn.Module.eval,
            images(1),
            Preparation("fp32", CPU, options={"cudnn_benchmark": 1}),
            "cudnn_benchmark of eager is 1, not of type bool",
        ),
    ],
)
def test_what_is_asked_wrongly_is_refused(change, example, wanted, message) -> None:
    with pytest.raises(BadValueError, match=message):
        engines.prepare("eager", change(network("residual")), example, wanted)


def test_eight_bits_without_images_is_an_error() -> None:
    with pytest.raises(CalibrationError, match="nothing to calibrate on"):
        engines.prepare("eager", network("residual"), images(1), Preparation("int8", CPU))


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(UnknownNameError, match="unknown engine 'tensorflow'") as caught:
        engines.prepare("tensorflow", network("residual"), images(1), FP32)
    assert "onnxruntime" in caught.value.next_step
    wanted = Preparation("fp32", CPU, options={"benchmark": True})
    with pytest.raises(UnknownNameError, match="option 'benchmark' of the engine eager") as caught:
        engines.prepare("eager", network("residual"), images(1), wanted)
    assert "did you mean 'cudnn_benchmark'" in caught.value.next_step
    with pytest.raises(UnknownNameError, match="precision 'fp64'"):
        engines.prepare("eager", network("residual"), images(1), Preparation("fp64", CPU))


def test_shapes_outside_the_profile_are_named_with_it() -> None:
    wanted = Preparation("fp32", CPU, batches=(2, 3, 4))
    runner = engines.prepare("eager", network("residual"), images(3), wanted)
    assert runner(images(4)).shape == (4, CLASSES)
    expected = (
        "eager was given inputs of 1 x 3 x 17 x 17, and was prepared for 2 to 4 x 3 x 17 x 17"
    )
    with pytest.raises(ShapeOutsideProfileError, match=expected) as caught:
        runner(images(1))
    assert caught.value.exit_code == ExitCode.USAGE
    for wrong in (images(5), images(3)[..., 1:], images(3).double()):
        with pytest.raises(ShapeOutsideProfileError):
            runner(wrong)
    alone = engines.prepare("eager", network("residual"), images(3), FP32)
    with pytest.raises(ShapeOutsideProfileError, match="prepared for 3 x 3 x 17 x 17"):
        alone(images(4))


def test_a_runner_says_what_made_it_and_can_be_closed() -> None:
    began = time.perf_counter()
    runner = engines.prepare("eager", network("residual"), images(1), FP32)
    passed = time.perf_counter() - began
    assert runner.engine == "eager"
    assert 0 < runner.build_seconds < passed
    assert (runner.from_cache, runner.cache_note) == (False, "")
    runner.close()
    runner.close()
    with pytest.raises(EngineClosedError, match="eager is closed"):
        runner(images(1))


class _Huge(nn.Module):
    """Asks for more memory than there is: 4 EiB, which no allocator can promise."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.empty(1 << 60, dtype=torch.float32)


def test_a_model_that_does_not_fit_is_out_of_memory(tmp_path) -> None:
    """By the path that every row has: not wrapped into an error of the engine's own."""
    with pytest.raises(RuntimeError) as caught:
        engines.prepare("eager", _Huge().eval(), images(1), FP32)
    info, code = describe(caught.value, tmp_path)
    assert code == ExitCode.OUT_OF_MEMORY
    assert info.kind == OutOfMemoryError.__name__


def test_the_model_is_never_changed() -> None:
    model = network("concatenated")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    keys = {name: sorted(vars(module)) for name, module in model.named_modules()}
    for name in ("eager", "channels_last", "torchscript"):
        engines.prepare(name, model, images(1), FP32)
    engines.prepare("eager", model, images(1), Preparation("int8", CPU, (images(4),)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert keys == {name: sorted(vars(module)) for name, module in model.named_modules()}
    assert all(each.is_contiguous() and each.dtype == torch.float32 for each in model.parameters())
