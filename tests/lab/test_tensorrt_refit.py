"""Weights replaced in a built engine, and single convolutions for the passes of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import trt_cases
from torch import nn
from trt_cases import CPU, VERSIONS, images, network, prepare, put
from trt_world import World

from narrowgauge_contract.errors import BadValueError, NotApplicableError, UnknownNameError
from narrowgauge_lab.engines import EngineCache, Preparation
from narrowgauge_lab.engines.tensorrt import ConvolutionSpec
from narrowgauge_lab.engines.tensorrt.failures import EngineRunError
from narrowgauge_lab.engines.tensorrt.onnx_nodes import node_names
from narrowgauge_lab.quant.qdq import export_float

SET = "Refitter.set_named_weights"


@pytest.fixture(params=VERSIONS)
def world(request: Any) -> World:
    world = World(request.param)
    world.weights = ["0.weight", "0.bias", "3.weight", "3.bias"]
    return world


def test_only_what_changed_is_handed_over(world: World, monkeypatch: Any) -> None:
    runner = prepare(put(world, monkeypatch), refit=True)
    assert world.flags() == {"REFIT"}
    weights = {name: each.clone() for name, each in network().state_dict().items()}
    assert set(runner.weight_names) == set(weights)

    before = trt_cases.FakeQueue.settled
    assert set(runner.refit(weights)) == set(weights)
    assert runner.refit(weights) == ()
    weights["3.bias"][1] += 1
    assert runner.refit(weights) == ("3.bias",)

    assert len(world.made(SET)) == 5
    assert trt_cases.FakeQueue.settled - before == 2  # not where nothing had changed
    assert np.array_equal(world.refitted["3.bias"], weights["3.bias"].numpy())
    assert list(world.refitted) == ["3.bias"]


def test_a_model_is_refitted_as_it_was_exported(monkeypatch: Any) -> None:
    world = World("8.4")
    world.weights = ["0.weight", "0.bias"]
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)).eval()
    runner = prepare(put(world, monkeypatch), model=model, refit=True)
    with torch.no_grad():
        model[1].weight.mul_(2)

    runner.refit(model)

    factor = 2 / (1 + model[1].eps) ** 0.5
    expected = model[0].weight.detach().numpy() * factor
    assert np.allclose(world.refitted["0.weight"], expected, rtol=1e-6)


def test_what_was_merged_is_handed_over_too(monkeypatch: Any) -> None:
    world = World("10.3")
    world.weights = ["0.weight", "0.bias"]
    world.missing = {"0.weight": ["0.bias"]}
    runner = prepare(put(world, monkeypatch), refit=True)

    assert runner.refit({"0.weight": torch.ones(4, 3, 3, 3)}) == ("0.weight",)
    assert np.array_equal(world.refitted["0.bias"], network().state_dict()["0.bias"].numpy())

    world.missing = {"0.weight": ["norm.scale"]}
    with pytest.raises(EngineRunError, match=r"without norm\.scale"):
        runner.refit({"0.weight": torch.zeros(4, 3, 3, 3)})


def test_what_cannot_be_refitted_is_said(monkeypatch: Any) -> None:
    world = World("8.6")
    engine = put(world, monkeypatch)

    with pytest.raises(BadValueError, match="not built to be refitted"):
        prepare(engine).refit({})
    runner = prepare(engine, refit=True)
    with pytest.raises(UnknownNameError, match=r"conv1\.weigth"):
        runner.refit({"conv1.weigth": torch.ones(1)})
    with pytest.raises(NotApplicableError, match="Q/DQ"):
        prepare(engine, "int8", int8="qdq", refit=True)


def test_a_refused_weight_is_an_error(monkeypatch: Any) -> None:
    world = World("8.6")
    runner = prepare(put(world, monkeypatch), refit=True)
    world.Refitter_set_named_weights = lambda *_, **__: False  # type: ignore[method-assign]

    with pytest.raises(EngineRunError, match=r"does not take \(1,\) as conv1\.bias"):
        runner.refit({"conv1.bias": torch.ones(1)})


def test_a_twin_is_another_runner_of_the_same_engine(monkeypatch: Any) -> None:
    world = World("8.6")
    runner = prepare(put(world, monkeypatch))
    x = images(2)

    twin = runner.twin()

    assert torch.equal(twin(x), runner(x))
    assert twin(x).data_ptr() != runner(x).data_ptr()
    runner.close()
    assert twin(x).shape == (2, 5)
    assert len(world.made("Builder.build_serialized_network")) == 1


# Single convolutions

SPECS = [
    ConvolutionSpec(3, 4, (8, 8), (3, 3), (2, 2), (1, 1), (1, 0), (2, 2)),
    ConvolutionSpec(3, 4, (8, 8), (3, 3), (2, 2), (1, 1), (0, 0), transposed=True),
    ConvolutionSpec(3, 3, (8, 8), (1, 1), groups=3, bias=True),
]


def convolution(engine: Any, spec: ConvolutionSpec, precision: str = "fp32", **more: Any) -> Any:
    wanted = Preparation(precision, CPU, batches=(1, 2, 4), **more)
    weights = {"kernel": torch.rand(spec.weight_shape())}
    if spec.bias:
        weights["bias"] = torch.rand(spec.outputs)
    return engine.prepare_convolution(spec, weights, wanted), weights


@pytest.mark.parametrize("version", VERSIONS)
def test_a_convolution_is_defined_in_each_version(version: str, monkeypatch: Any) -> None:
    for spec, precision in zip(SPECS, ("fp32", "fp16", "tf32")):
        defined(World(version), spec, precision, monkeypatch)


def defined(world: World, spec: ConvolutionSpec, precision: str, monkeypatch: Any) -> None:
    world.file_type = "HALF" if precision == "fp16" else "FLOAT"

    runner, weights = convolution(put(world, monkeypatch), spec, precision)

    name = "add_deconvolution_nd" if spec.transposed else "add_convolution_nd"
    (made,) = world.made(f"INetworkDefinition.{name}")
    assert (made["num_output_maps"], made["kernel_shape"]) == (spec.outputs, spec.kernel)
    kind = "IDeconvolutionLayer" if spec.transposed else "IConvolutionLayer"
    set_to = {part: world.made(f"{kind}.{part}=")[0]["value"] for part in (
        "stride_nd", "dilation_nd", "pre_padding", "post_padding", "num_groups")}  # fmt: skip
    assert set_to == {
        "stride_nd": spec.stride, "dilation_nd": spec.dilation, "pre_padding": spec.pre,
        "post_padding": spec.post, "num_groups": spec.groups,
    }  # fmt: skip
    assert set(runner.weight_names) == set(weights)
    new = {each: tensor + 1 for each, tensor in weights.items()}
    assert set(runner.refit(new)) == set(weights)
    expected = new["kernel"].half() if precision == "fp16" else new["kernel"]
    assert np.array_equal(world.refitted["kernel"], expected.numpy())


def test_a_kept_convolution_gets_the_weights_of_today(tmp_path: Path, monkeypatch: Any) -> None:
    world = World("8.4")
    engine = put(world, monkeypatch)
    cache = EngineCache(tmp_path)
    convolution(engine, SPECS[0], cache=cache)

    runner, weights = convolution(engine, SPECS[0], cache=cache)

    assert runner.from_cache
    assert np.array_equal(world.refitted["kernel"], weights["kernel"].numpy())
    other, _ = convolution(engine, SPECS[1], cache=cache)
    assert not other.from_cache


def test_bf16_weights_are_handed_over_by_address(monkeypatch: Any) -> None:
    world = World("10.3")
    world.file_type = "BF16"

    runner, weights = convolution(put(world, monkeypatch), SPECS[0], "bf16")

    runner.refit({"kernel": weights["kernel"] + 1})
    expected = (weights["kernel"] + 1).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(world.refitted["kernel"].view(np.int16), expected.ravel())


def test_convolutions_that_make_no_sense_are_refused(monkeypatch: Any) -> None:
    engine = put(World("8.4"), monkeypatch)
    wanted = Preparation("fp32", CPU, batches=(1, 1, 1))

    with pytest.raises(BadValueError, match="the convolution's weights are"):
        engine.prepare_convolution(SPECS[0], {"kernel": torch.rand(4, 3, 1, 1)}, wanted)
    kernel = {"kernel": torch.rand(SPECS[0].weight_shape())}
    with pytest.raises(BadValueError, match="batches"):
        engine.prepare_convolution(SPECS[0], kernel, Preparation("fp32", CPU))
    with pytest.raises(NotApplicableError, match="no int8"):
        engine.prepare_convolution(SPECS[0], kernel, Preparation("int8", CPU, batches=(1, 1, 1)))


# The file itself


def test_nodes_are_named_as_in_what_torch_exports() -> None:
    names = node_names(export_float(network(), torch.zeros(1, 3, 8, 8)))

    assert [operator for _, operator in names] == ["Conv", "Relu", "Flatten", "Gemm"]
    assert len({name for name, _ in names}) == 4


@pytest.mark.parametrize("damaged", [b"\x3a\xff", b"\x3a\x05ab", b"\x3f", b"\x80"])
def test_bytes_that_are_no_file_are_refused(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="byte"):
        node_names(damaged)


def test_the_real_export_reaches_the_parser(monkeypatch: Any) -> None:
    pytest.importorskip("onnx")
    world = World("10.3")
    engine = put(world, monkeypatch)
    monkeypatch.undo()
    monkeypatch.setattr(trt_cases.runner, "make_queue", trt_cases.FakeQueue)

    prepare(engine)

    (parsed,) = world.made("OnnxParser.parse")
    assert [kind for _, kind in node_names(parsed["model"])] == ["Conv", "Relu", "Flatten", "Gemm"]
    assert b"0.weight" in parsed["model"]
