"""The TensorRT adapter over the API of each version: networks built, loaded, run, and refused."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from trt_cases import CPU, VERSIONS, WITHOUT_80, FakeQueue, images, network, prepare, put, sums
from trt_world import World

from narrowgauge_contract.errors import BadValueError, NotApplicableError, UnknownNameError
from narrowgauge_lab import engines
from narrowgauge_lab.engines.errors import (
    EngineBuildError,
    EngineClosedError,
    EngineMissingError,
    OperatorNotTakenError,
    ShapeOutsideProfileError,
)
from narrowgauge_lab.engines.tensorrt import library
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError
from narrowgauge_lab.errors import DeviceLostError, OutOfMemoryError

WEAK = [version for version in VERSIONS if not version.startswith("11")]
INDEXED = {"8.4"}


#: One of each kind: bindings by index, by name, either typing, strong typing only.
KINDS = ["8.4", "8.6", "10.3", "11.4"]


@pytest.fixture(params=KINDS)
def world(request: Any) -> World:
    return World(request.param)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("precision", ["fp32", "tf32", "fp16", "int8"])
def test_each_version_builds_and_runs(version: str, precision: str, monkeypatch: Any) -> None:
    world = World(version)
    engine = put(world, monkeypatch)
    strong = not hasattr(world.trt.BuilderFlag, "FP16")
    world.file_type = "HALF" if strong and precision == "fp16" else "FLOAT"
    assert engine.refuses(precision, CPU) == ""

    runner = prepare(engine, precision)

    for count in (1, 4, 3, 2):
        x = images(count, precision)
        assert torch.allclose(runner(x).double(), sums(x), rtol=1e-3)
    assert world.streams == [FakeQueue.handle] * 4
    flags = {"tf32": {"TF32"}, "fp16": {"FP16"}, "int8": {"INT8"}}.get(precision, set())
    assert world.flags() == ({each for each in flags if each == "TF32"} if strong else flags)
    assert [fact.layer for fact in runner.layers()] == ["conv1", "relu1", "fc"]


@pytest.mark.parametrize("version", VERSIONS)
def test_each_version_is_called_by_its_own_way_to_say_where_tensors_are(
    version: str, monkeypatch: Any
) -> None:
    world = World(version)

    prepare(put(world, monkeypatch))(images(2))

    names = {call.name for call in world.calls}
    assert ("IExecutionContext.execute_async_v2" in names) == (version in INDEXED)
    assert ("IExecutionContext.execute_async_v3" in names) == (version not in INDEXED)


def test_the_profile_and_the_workspace_are_as_asked(world: World, monkeypatch: Any) -> None:
    prepare(put(world, monkeypatch), batches=(1, 2, 4), workspace_mb=64)

    (shape,) = world.made("IOptimizationProfile.set_shape")
    assert (shape["min"], shape["opt"], shape["max"]) == ((1, 3, 8, 8), (2, 3, 8, 8), (4, 3, 8, 8))
    (limit,) = world.made("IBuilderConfig.set_memory_pool_limit")
    assert limit == {"pool": world.trt.MemoryPoolType.WORKSPACE, "pool_size": 64 << 20}


def test_without_batches_only_the_examples_is_taken(world: World, monkeypatch: Any) -> None:
    runner = prepare(put(world, monkeypatch), batches=(0, 0, 0))

    with pytest.raises(ShapeOutsideProfileError, match=r"3 x 3 x 8 x 8, and was prepared for 2 x"):
        runner(images(3))


def test_outside_of_the_profile_both_are_named(world: World, monkeypatch: Any) -> None:
    runner = prepare(put(world, monkeypatch), batches=(1, 2, 4))

    with pytest.raises(ShapeOutsideProfileError, match=r"5 x 3 x 8 x 8.*1 to 4 x 3 x 8 x 8"):
        runner(images(5))
    with pytest.raises(ShapeOutsideProfileError, match="float64"):
        runner(images(2).double())


def test_strides_are_any_and_no_image_is_an_answer(monkeypatch: Any) -> None:
    runner = prepare(put(World("10.3"), monkeypatch), batches=(0, 2, 4))

    x = images(2).contiguous(memory_format=torch.channels_last)
    assert torch.allclose(runner(x).double(), sums(x))
    assert runner(images(2)[:0]).shape == (0, 5)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tensorrt_80_is_asked_for_nothing_that_it_lacks(precision: str, monkeypatch: Any) -> None:
    world = World("8.4", **WITHOUT_80)

    runner = prepare(put(world, monkeypatch), precision, workspace_mb=32)

    assert torch.allclose(runner(images(2, precision)).double(), sums(images(2)), rtol=1e-2)
    assert world.made("IBuilderConfig.max_workspace_size=") == [{"value": 32 << 20}]
    assert runner.layers()[0].operator == "CONVOLUTION"
    assert {fact.precision for fact in runner.layers()} == {""}


@pytest.mark.parametrize("version", WEAK[2:])
def test_strong_typing_where_both_are_there(version: str, monkeypatch: Any) -> None:
    world = World(version)
    world.file_type = "HALF"

    runner = prepare(put(world, monkeypatch), "fp16", typing="strong")

    assert runner(images(2, "fp16")).dtype == torch.float16
    (made,) = world.made("Builder.create_network")
    kinds = world.trt.NetworkDefinitionCreationFlag
    assert made["flags"] & 1 << int(kinds.STRONGLY_TYPED)
    assert world.flags() == set()


def test_bf16_is_there_from_10_on_where_flags_are(world: World, monkeypatch: Any) -> None:
    engine = put(world, monkeypatch)

    refused = engine.refuses("bf16", CPU)

    assert (refused == "") == hasattr(world.trt.BuilderFlag, "BF16")
    assert "fp8" in engine.refuses("fp8", CPU)


def test_options_that_an_old_version_lacks_are_refused(monkeypatch: Any) -> None:
    engine = put(World("8.4"), monkeypatch)

    with pytest.raises(NotApplicableError, match=r"8\.4\.1\.5 has no option aux_streams"):
        prepare(engine, aux_streams=0)
    with pytest.raises(NotApplicableError, match="strongly typed"):
        prepare(engine, typing="strong")
    with pytest.raises(UnknownNameError, match="workspce_mb"):
        prepare(engine, workspce_mb=3)


def test_options_that_a_new_version_has_are_set(monkeypatch: Any) -> None:
    world = World("10.13")

    prepare(put(world, monkeypatch), aux_streams=2, level=5)

    assert world.made("IBuilderConfig.max_aux_streams=") == [{"value": 2}]
    assert world.made("IBuilderConfig.builder_optimization_level=") == [{"value": 5}]


# What goes wrong


def test_no_gpu_is_a_build_error_with_tensorrts_reason(world: World, monkeypatch: Any) -> None:
    world.gpu = False

    with pytest.raises(EngineBuildError) as caught:
        prepare(put(world, monkeypatch))

    assert caught.value.why == "CUDA initialization failure with error: 35"
    assert "GPU" in caught.value.next_step


def test_a_refused_operator_is_named_with_its_layer(world: World, monkeypatch: Any) -> None:
    world.refuses = [("UNSUPPORTED_NODE", "no importer", 1, "head/det", "Det")]
    engine = put(world, monkeypatch)
    # A file of two nodes; versions that tell a node's number only are to find its name there.
    file = _message(7, _message(1, _text(3, "conv") + _text(4, "Conv"))
                    + _message(1, _text(3, "head/det") + _text(4, "Det")))  # fmt: skip
    monkeypatch.setattr("narrowgauge_lab.engines.tensorrt.engine._onnx", lambda *_: file)

    with pytest.raises(OperatorNotTakenError) as caught:
        prepare(engine)

    assert (caught.value.operator, caught.value.layer) == ("Det", "head/det")
    assert caught.value.why == "no importer"


def test_a_file_that_cannot_be_read_is_a_build_error(monkeypatch: Any) -> None:
    world = World("8.4")
    world.refuses = [("MODEL_DESERIALIZE_FAILED", "Failed to parse", -1, "", "")]

    with pytest.raises(EngineBuildError, match="cannot read") as caught:
        prepare(put(world, monkeypatch))

    assert caught.value.why == "Failed to parse"


def test_what_the_builder_says_is_the_reason(world: World, monkeypatch: Any) -> None:
    world.build_says = "Error Code 10: Internal Error (Could not find any implementation)"

    with pytest.raises(EngineBuildError) as caught:
        prepare(put(world, monkeypatch))

    assert caught.value.why == world.build_says


@pytest.mark.parametrize(
    ("says", "kind"),
    [
        ("Error Code 2: OutOfMemory (Requested size was 8 bytes.)", OutOfMemoryError),
        ("Error Code 1: Cuda Runtime (out of memory)", OutOfMemoryError),
        ("Cuda Runtime (uncorrectable ECC error encountered)", DeviceLostError),
        ("Error Code 3: API Usage Error", EngineRunError),
    ],
)
def test_a_call_that_fails_raises_what_it_says(says: str, kind: Any, monkeypatch: Any) -> None:
    world = World("10.3")
    runner = prepare(put(world, monkeypatch))
    world.run_says = says

    with pytest.raises(kind) as caught:
        runner(images(2))

    assert says in caught.value.why


def test_a_model_that_does_not_fit_is_out_of_memory(monkeypatch: Any) -> None:
    world = World("8.6")
    world.build_says = "insufficient memory: Tried to allocate 3.00 GiB"

    with pytest.raises(OutOfMemoryError, match="asked for 3221225472 bytes"):
        prepare(put(world, monkeypatch))


def test_a_device_without_fast_kernels_refuses_the_precision(monkeypatch: Any) -> None:
    world = World("8.4")
    world.fast = False

    with pytest.raises(NotApplicableError, match="no int8 on this device"):
        prepare(put(world, monkeypatch), "int8")


def test_a_closed_runner_says_so(monkeypatch: Any) -> None:
    runner = prepare(put(World("10.3"), monkeypatch))
    runner.close()
    runner.close()

    with pytest.raises(EngineClosedError):
        runner(images(2))
    with pytest.raises(EngineClosedError):
        runner.layers()


def test_an_input_on_another_device_never_reaches_tensorrt(monkeypatch: Any) -> None:
    world = World("10.3")
    runner = prepare(put(world, monkeypatch))

    elsewhere: Any = types.SimpleNamespace(device=torch.device("cuda", 1), shape=(2, 3, 8, 8))
    with pytest.raises(BadValueError, match="the input is on cuda:1"):
        runner.run(elsewhere)
    assert world.streams == []


# The library itself


def test_only_gpus_have_tensorrt() -> None:
    with pytest.raises(EngineMissingError) as caught:
        engines.prepare("tensorrt", network(), images(2), engines.Preparation("fp32", CPU))

    assert caught.value.why == "TensorRT runs on NVIDIA GPUs, not on cpu"


def test_a_missing_library_is_said(monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    assert library.why_missing().startswith("tensorrt is not installed: it comes with")

    monkeypatch.setitem(sys.modules, "tensorrt", types.ModuleType("tensorrt"))
    assert "is not NVIDIA's" in library.why_missing()

    monkeypatch.setitem(sys.modules, "tensorrt", World("10.3").trt)
    assert library.why_missing() == ""
    assert engines.missing("tensorrt", torch.device("cuda", 0)) == ""


def test_bindings_without_their_libraries_are_missing(tmp_path: Path, monkeypatch: Any) -> None:
    says = "libnvinfer.so.8: cannot open shared object file"
    (tmp_path / "tensorrt.py").write_text(f"raise ImportError({says!r})\n")
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    assert library.why_missing().startswith(f"tensorrt cannot be imported ({says}): ")


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes(parts) + bytes([value])


def _message(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _text(field: int, text: str) -> bytes:
    return _message(field, text.encode())
