"""The TensorRT adapter against NVIDIA's own software, as far as that runs without a GPU.

- TensorRT 8.4.1 with its libraries (Python 3.8), cuBLAS and cuDNN being stubs: neither is called.
- The bindings of 8.6, 10 and 11.4 (Python 3.11) over stubs of the libraries.
- TensorRT-RTX 1.7 (Python 3.11): NVIDIA's ONNX parser and builder, which make engines for GPUs that
  are not there.

The wheels are where NARROWGAUGE_TEST_TENSORRT says; `nox -s slow` fetches them.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

import numpy as np
import pytest
import torch
import trt_dump
import trt_fake
from hetero_cases import CASES, Case
from torch import nn
from trt_stubs import make_stubs
from trt_world import World

from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_lab import networks
from narrowgauge_lab.engines import Preparation
from narrowgauge_lab.engines.errors import EngineBuildError, OperatorNotTakenError
from narrowgauge_lab.engines.tensorrt import ENGINE, ConvolutionSpec, library
from narrowgauge_lab.engines.tensorrt import engine as engine_module
from narrowgauge_lab.engines.tensorrt.build import Kept, build
from narrowgauge_lab.engines.tensorrt.bundle import Built
from narrowgauge_lab.engines.tensorrt.calibrator import make_calibrator
from narrowgauge_lab.engines.tensorrt.features import Features, detect
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.network import define_convolution, parse, weights_of
from narrowgauge_lab.engines.tensorrt.settings import OPTIONS, settings_for
from narrowgauge_lab.layers.hetero.backends.shapes import convolution_of, image_shape
from narrowgauge_lab.layers.hetero.backends.tensorrt_networks import (
    forward_spec,
    input_gradient,
    weight_gradient,
)

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
WHEELS = Path(os.environ.get("NARROWGAUGE_TEST_TENSORRT", ".test/tensorrt"))
#: Each is for one Python.
PYTHON = ".".join(map(str, sys.version_info[:2]))
REAL = "8.4"
BINDINGS = [version for version in trt_fake.versions() if version != REAL]


def wheel(name: str, python: str) -> Path:
    """The folder of a wheel, or skip."""
    if python != PYTHON:
        pytest.skip(f"the wheel of TensorRT {name} is for Python {python}")
    if not (WHEELS / name).is_dir():
        pytest.skip(f"no TensorRT {name} in {WHEELS}: nox -s slow fetches it")
    return (WHEELS / name).resolve()


# Bindings


@pytest.fixture(scope="module", params=[REAL, *BINDINGS])
def answered(request: Any, tmp_path_factory: Any) -> Tuple[str, Dict[str, Any]]:
    """A version, and what its real bindings answer."""
    version: str = request.param
    folder = wheel(version, "3.8" if version == REAL else "3.11")
    return version, ask(folder, tmp_path_factory.mktemp(version))


Answered = Tuple[str, Dict[str, Any]]


def test_real_bindings_are_as_the_stand_in_has_them(answered: Answered) -> None:
    version, found = answered

    dump = trt_fake.load_dump(version)
    assert found["dump"]["version"] == dump["version"]
    for kind in ("classes", "enums"):
        for name, members in dump[kind].items():
            assert (name, found["dump"][kind][name]) == (name, members)
    assert found["features"] == _listed(detect(World(version).trt))


def test_without_a_gpu_there_is_no_builder_and_that_is_said(answered: Answered) -> None:
    version, found = answered

    assert found["build"]["kind"] == "EngineBuildError"
    assert found["build"]["what"] == "TensorRT gives no builder"
    if version == REAL:  # its own words, by way of our logger
        assert "CUDA initialization failure" in found["build"]["why"]
    else:
        assert "factory function returned nullptr" in found["build"]["why"]


def test_classes_of_ours_are_taken_by_the_real_ones(answered: Answered) -> None:
    version, found = answered

    calibrators = [] if version.startswith("11") else ["entropy", "minmax"]
    assert found["calibrators"] == dict.fromkeys(calibrators, 2)
    assert found["weights"] == {"torch.float32": 24, "torch.float16": 24}


def ask(folder: Path, scratch: Path) -> Dict[str, Any]:
    """What a process of its own finds in the wheel: one process can import one TensorRT."""
    stubs = scratch / "stubs"
    make_stubs([path for path in folder.glob("tensorrt*/*.so*") if path.is_file()], stubs)
    here = Path(__file__).resolve()
    libraries = [str(stubs), str(folder / "tensorrt")]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(here), str(folder)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": os.pathsep.join(libraries),
            "PYTHONPATH": os.pathsep.join([*sys.path, str(here.parent)]),
        },
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answer: Dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def _answer(folder: str) -> Dict[str, Any]:
    """Runs in that process."""
    sys.path.insert(0, folder)
    if not (Path(folder) / "tensorrt").is_dir():  # a package of that name comes by another wheel
        sys.modules["tensorrt"] = importlib.import_module("tensorrt_bindings")
    trt = library.load()
    kinds = ["entropy", "minmax"] if detect(trt).calibrators else []
    batches = [torch.rand(2, 3, 4, 4)]
    made = [make_calibrator(trt, kind, batches, CPU, b"table", lambda _: None) for kind in kinds]
    bases = (trt.IInt8EntropyCalibrator2, trt.IInt8MinMaxCalibrator) if kinds else ()
    assert all(isinstance(each, base) for each, base in zip(made, bases))
    weights = {}
    for dtype in (torch.float32, torch.float16):
        value, _ = weights_of(trt, torch.ones(2, 3, 4, dtype=dtype))
        weights[str(dtype)] = value.size
    return {
        "dump": trt_dump.dump(trt),
        "features": _listed(detect(trt)),
        "build": _build_error(),
        "calibrators": {kind: each.get_batch_size() for kind, each in zip(kinds, made)},
        "weights": weights,
    }


def _listed(features: Features) -> Dict[str, Any]:
    """As JSON can have it."""
    return {**dataclasses.asdict(features), "weak": sorted(features.weak)}


def _build_error() -> Dict[str, str]:
    try:
        ENGINE.prepare(nn.Conv2d(3, 4, 3).eval(), torch.zeros(1, 3, 8, 8), Preparation("fp32", CPU))
    except NarrowgaugeError as error:
        return {"kind": type(error).__name__, "what": error.what, "why": error.why}
    raise AssertionError("an engine was built without a GPU")


# NVIDIA's parser and builder

#: Sizes of inputs, by network.
NETWORKS = {"resnet18-tiny": 32, "mobilenet-tiny": 32, "resnet18": 224, "mobilenet_v2": 224}


class Ahead:
    """TensorRT-RTX with a builder for a GPU that is not here."""

    def __init__(self, rtx: Any, capability: str) -> None:
        self._rtx = rtx

        class Builder(rtx.Builder):  # type: ignore[misc]
            def create_builder_config(self) -> Any:
                config = super().create_builder_config()
                config.num_compute_capabilities = 1
                wanted = getattr(rtx.ComputeCapability, capability)
                assert config.set_compute_capability(wanted, 0)
                return config

            def __del__(self) -> None:  # NVIDIA's warns that one should write `del`
                pass

        self.Builder = Builder

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rtx, name)


@pytest.fixture(scope="module")
def rtx() -> Iterator[Any]:
    folder = wheel("rtx", "3.11")
    sys.path.insert(0, str(folder))
    yield importlib.import_module("tensorrt_rtx_bindings")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def ahead(rtx: Any) -> Library:
    return library.opened(Ahead(rtx, "SM80"))


def test_rtx_is_as_it_was_written_down(rtx: Any) -> None:
    """By JSON, as the file has it."""
    assert json.loads(json.dumps(trt_dump.dump(rtx))) == trt_fake.load_dump("rtx-1.7")


def built(
    library: Library, model: nn.Module, size: int, precision: str, batches: Tuple[int, int, int]
) -> Tuple[Built, bytes]:
    """The engine that the adapter's own path builds of a network, and the ONNX file."""
    dtype = torch.float16 if precision == "fp16" else torch.float32
    example = torch.rand(2, 3, size, size, dtype=dtype)
    calibration = (torch.rand(4, 3, size, size),)
    wanted = Preparation(precision, CPU, calibration, batches)
    profile = wanted.profile(example)
    settings = settings_for(library.features, precision, OPTIONS, profile)
    file = engine_module._onnx(model, example, wanted, settings)

    def define(builder: Any) -> Any:
        return parse(library, builder, file, settings.strong)

    return build(library, define, settings, profile, calibration, CPU, Kept()), file


@pytest.mark.parametrize("name", NETWORKS)
def test_the_real_builder_makes_engines_of_what_we_export(name: str, ahead: Library) -> None:
    torch.manual_seed(1)
    model = networks.build(name)
    layers: List[nn.Module] = [m for m in model.modules() if isinstance(m, nn.Conv2d)]

    sizes = {}
    for precision in ("fp32", "tf32", "fp16", "int8"):
        engine, file = built(ahead, model, NETWORKS[name], precision, (1, 8, 16))
        kinds = [kind for _, kind in engine.network]
        assert kinds.count("CONVOLUTION") == len(layers)
        # Inputs of convolutions and of the linear layer; weights are stored as integers.
        quantised = len(layers) + 1 if precision == "int8" else 0
        assert kinds.count("QUANTIZE") == quantised
        assert kinds.count("DEQUANTIZE") == 2 * quantised
        assert len(engine.plan) > 0.5 * len(file)
        sizes[precision] = len(file), len(engine.plan)
    print(f"\n{name}: {sizes}")
    weights = sum(each.numel() for each in model.parameters())
    # An engine is about as large as its weights, where they outweigh its kernels.
    if weights > 10 << 20:
        for precision, size in (("fp32", 4), ("tf32", 4), ("fp16", 2), ("int8", 1)):
            assert 0.9 <= sizes[precision][1] / (weights * size) <= 1.8


@pytest.mark.parametrize("capability", ["SM75", "SM86", "SM89", "SM120"])
def test_the_real_builder_knows_other_capabilities(capability: str, rtx: Any) -> None:
    model = networks.build("resnet18-tiny")

    engine, _ = built(library.opened(Ahead(rtx, capability)), model, 32, "fp16", (1, 1, 1))

    assert engine.plan


def test_an_operator_that_nvidias_parser_refuses_is_named(ahead: Library) -> None:
    class Determinant(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            determinant: torch.Tensor = torch.det(self.layer(x))
            return determinant

    with pytest.raises(OperatorNotTakenError) as caught:
        built(ahead, Determinant().eval(), 8, "fp32", (1, 1, 1))
    assert (caught.value.operator, caught.value.layer) == ("Det", "/Det")


def test_a_file_that_is_none_is_refused(ahead: Library) -> None:
    builder = ahead.trt.Builder(ahead.said)

    with pytest.raises(EngineBuildError, match="cannot read the network"):
        parse(ahead, builder, b"no network", strong=True)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize(
    "spec",
    [
        ConvolutionSpec(16, 32, (32, 32), (3, 3), (2, 2), (1, 1), (1, 1)),
        ConvolutionSpec(32, 16, (16, 16), (3, 3), (2, 2), (1, 1), (0, 0), transposed=True),
        ConvolutionSpec(16, 16, (8, 8), (3, 3), pre=(1, 1), post=(1, 1), groups=16, bias=True),
        ConvolutionSpec(4, 8, (8, 8), (4, 4), dilation=(2, 2)),
    ],
)
def test_the_real_builder_makes_engines_of_single_convolutions(
    spec: ConvolutionSpec, precision: str, ahead: Library
) -> None:
    weights, shape = built_convolution(ahead, spec, precision)

    assert shape == (-1, *reference(spec, weights).shape[1:])


def built_convolution(
    library: Library, spec: ConvolutionSpec, precision: str
) -> Tuple[Dict[str, torch.Tensor], Tuple[int, ...]]:
    """Its weights, and the shape that the real network says its output has."""
    dtype = torch.float16 if precision == "fp16" else torch.float32
    weights = {"kernel": torch.rand(spec.weight_shape(), dtype=dtype)}
    if spec.bias:
        weights["bias"] = torch.rand(spec.outputs, dtype=dtype)

    def define(library: Library, builder: Any, strong: bool) -> Any:
        return define_convolution(library, builder, spec, weights, strong)

    return weights, built_network(library, define, (spec.inputs, *spec.image), precision)


def built_network(
    library: Library, define: Any, image: Tuple[int, ...], precision: str
) -> Tuple[int, ...]:
    """The output's shape. Not for refits: this builder compiles for those, which takes a driver."""
    dtype = torch.float16 if precision == "fp16" else torch.float32
    wanted = Preparation(precision, CPU, batches=(1, 4, 8))
    profile = wanted.profile(torch.empty(4, *image, dtype=dtype))
    settings = settings_for(library.features, precision, OPTIONS, profile)
    shapes: List[Tuple[int, ...]] = []

    def made(builder: Any) -> Any:
        definition = define(library, builder, settings.strong)
        shapes.append(tuple(definition.network.get_output(0).shape))
        return definition

    assert build(library, made, settings, profile, (), CPU, Kept()).plan
    return shapes[0]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_real_builder_makes_engines_of_the_passes_of_a_layer(
    case: Case, precision: str, ahead: Library
) -> None:
    like, problem = convolution_of(case.problem), case.problem
    image, window, above = (
        image_shape(each.shape, problem) for each in (case.x, case.weight, case.grad)
    )
    dtype = torch.float16 if precision == "fp16" else torch.float32
    backward, product = input_gradient(like, image, window), weight_gradient(like, image, window)

    _, forward = built_convolution(ahead, forward_spec(like, image, window), precision)
    _, by_input = built_convolution(ahead, backward.spec, precision)
    by_weight = built_network(ahead, product.definition(dtype), product.image, precision)

    assert forward == (-1, *above[1:])
    assert by_input == (-1, *image[1:])
    outputs, inputs = window[0] // like.groups, window[1] * window[2] * window[3]
    assert by_weight == (like.groups, outputs, inputs)


# What tensorrt_networks goes around, as long as it has to.
def test_the_real_builder_refuses_what_is_gone_around(ahead: Library) -> None:
    both = ConvolutionSpec(4, 3, (6, 5), (3, 3), (2, 2), (2, 2), (2, 1), (2, 2), transposed=True)
    with pytest.raises(EngineBuildError, match="Strided & Dilated Deconv"):
        built_convolution(ahead, both, "fp32")
    # Negative padding it only complains of, and goes on without: the output lacks a row.
    adding = ConvolutionSpec(4, 3, (4, 4), (1, 1), (2, 2), (0, 0), (-1, -1), transposed=True)
    assert built_convolution(ahead, adding, "fp32")[1] == (-1, 3, 7, 7)


def reference(spec: ConvolutionSpec, weights: Dict[str, torch.Tensor]) -> torch.Tensor:
    """torch's convolution; padding that differs at the two ends is put on, or cut off, apart."""
    x = torch.rand(1, spec.inputs, *spec.image)
    kernel = weights["kernel"].float()
    ends = np.array([spec.pre, spec.post])
    if not spec.transposed:
        (top, left), (bottom, right) = ends.tolist()
        x = nn.functional.pad(x, (left, right, top, bottom))
        return nn.functional.conv2d(
            x, kernel, stride=spec.stride, dilation=spec.dilation, groups=spec.groups
        )
    y = nn.functional.conv_transpose2d(x, kernel, stride=spec.stride, groups=spec.groups)
    height, width = y.shape[2:]
    (top, left), (bottom, right) = ends.tolist()
    return y[:, :, top : height - bottom, left : width - right]


if __name__ == "__main__":
    print(json.dumps(_answer(sys.argv[1])))
