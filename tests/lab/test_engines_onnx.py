"""Networks as ONNX files, and ONNX Runtime on them."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from engine_cases import (
    CPU,
    NETWORKS,
    Unknown,
    check_float32,
    check_int8,
    exact,
    images,
    network,
    relative_error,
)
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab import engines
from narrowgauge_lab.engines import EngineCache, Preparation, ort
from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.onnx_export import (
    TENSORRT_INT8,
    export,
    export_int8,
    node_layers,
)
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.torch_compat import torch_version
from narrowgauge_lab.transforms import fold_batch_norm

#: ONNX Runtime for the Python of torch 1.8 is not maintained; the images of that age lack it.
pytestmark = pytest.mark.skipif(torch_version() < (2, 0), reason="onnx is for current images")
FOR_TENSORRT = QuantConfig(activation_symmetric=True, outputs=False)


@pytest.mark.parametrize("name", NETWORKS)
def test_float32_agrees_with_float64(name: str) -> None:
    model, runner = check_float32("onnxruntime", name)
    x = images(3)
    x[1, 0, 8, 8] = math.nan
    assert torch.isfinite(runner(x)).all(1).tolist() == [True, False, True]
    layers = {n for n, m in model.named_modules() if isinstance(m, (nn.Conv2d, nn.Linear))}
    products = [fact for fact in runner.layers() if fact.is_product]
    assert {fact.layer for fact in products} == layers
    assert len(products) == len(layers)
    assert {(fact.provider, fact.precision) for fact in products} == {
        ("CPUExecutionProvider", "fp32")
    }
    assert runner.observations() is None


@pytest.mark.parametrize("name", NETWORKS)
def test_int8_is_what_fake_quantisation_computes(name: str) -> None:
    check_int8("onnxruntime", name)


def test_options_reach_the_session() -> None:
    for options in ({"threads": 1}, {"threads": 2, "spinning": False}):
        wanted = Preparation("fp32", CPU, options=options)
        runner = engines.prepare("onnxruntime", network("residual"), images(1), wanted)
        settings = runner._session.get_session_options()
        assert settings.intra_op_num_threads == options["threads"]
        spins = settings.get_session_config_entry("session.intra_op.allow_spinning")
        assert spins == str(int(options.get("spinning", True)))


def test_float16_is_refused_where_it_would_run_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What this processor does is found out; both answers are followed."""
    there = ort._float16_runs_as()
    assert there in ("fp16", "fp32")
    wanted = Preparation("fp16", CPU)
    monkeypatch.setattr(ort, "_float16_runs_as", lambda: "fp32")
    with pytest.raises(NotApplicableError, match="onnxruntime does not run fp16") as caught:
        engines.prepare("onnxruntime", network("residual"), images(1).half(), wanted)
    assert caught.value.why == "on this CPU it runs float16 networks in fp32"
    monkeypatch.setattr(ort, "_float16_runs_as", lambda: "fp16")
    model = network("residual")
    runner = engines.prepare("onnxruntime", model, images(2).half(), wanted)
    got = runner(images(2).half())
    assert got.dtype == torch.float16
    assert relative_error(got, exact(model, images(2).half())) <= 4e-3
    assert there in {fact.precision for fact in runner.layers() if fact.is_product}


def test_the_exported_file_comes_from_the_cache(tmp_path: Path) -> None:
    cache = EngineCache(tmp_path / "engines")
    wanted = Preparation("int8", CPU, (images(8, seed=1),), cache=cache)
    model, x = network("residual"), images(2)
    first = engines.prepare("onnxruntime", model, x, wanted)
    again = engines.prepare("onnxruntime", model, x, wanted)
    assert (first.from_cache, again.from_cache) == (False, True)
    assert first.cache_key == again.cache_key != ""
    assert torch.equal(first(x), again(x))
    (path,) = cache.folder.glob("onnxruntime-*.engine")
    path.write_bytes(path.read_bytes()[:-3])
    rebuilt = engines.prepare("onnxruntime", model, x, wanted)
    assert not rebuilt.from_cache
    assert "was damaged" in rebuilt.cache_note


class TestFiles:
    @pytest.mark.parametrize("name", NETWORKS)
    def test_float16_throughout(self, name: str, tmp_path: Path) -> None:
        import onnx
        from onnx import numpy_helper

        export(network(name), images(2), tmp_path / "half.onnx", "fp16")
        loaded = onnx.load(str(tmp_path / "half.onnx"))
        half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
        assert single not in {each.data_type for each in loaded.graph.initializer}
        ends = (*loaded.graph.input, *loaded.graph.output)
        assert {each.type.tensor_type.elem_type for each in ends} == {half}
        for end in ends:
            assert end.type.tensor_type.shape.dim[0].dim_param == "batch"
        inferred = onnx.shape_inference.infer_shapes(loaded, strict_mode=True, check_type=True)
        assert single not in {v.type.tensor_type.elem_type for v in inferred.graph.value_info}
        weight = next(w for w in loaded.graph.initializer if w.name == "fc.weight")
        assert torch.equal(
            torch.from_numpy(numpy_helper.to_array(weight).copy()), network(name).fc.weight.half()
        )

    def test_a_weight_beyond_float16_is_refused(self, tmp_path: Path) -> None:
        model = network("residual")
        with torch.no_grad():
            model.fc.weight[2, 3] = 1e5
        with pytest.raises(BadValueError, match=r"fc\.weight holds 100000"):
            export(model, images(1), tmp_path / "half.onnx", "fp16")
        with pytest.raises(BadValueError, match="in bf16"):
            export(model, images(1), tmp_path / "half.onnx", "bf16")
        assert not list(tmp_path.iterdir())

    def test_what_tensorrt_reads_is_signed_and_has_float_biases(self, tmp_path: Path) -> None:
        import numpy as np
        import onnx
        from onnx import numpy_helper

        path = tmp_path / "int8.onnx"
        model = network("residual")
        export_int8(model, images(2), [images(16, 1)], path, FOR_TENSORRT, TENSORRT_INT8)
        loaded = onnx.load(str(path))
        stored = {each.name: numpy_helper.to_array(each) for each in loaded.graph.initializer}
        rounding = [n for n in loaded.graph.node if n.op_type.endswith("quantizeLinear")]
        rounding += [n for n in loaded.graph.node if n.op_type == "QuantizeLinear"]
        assert len(rounding) >= 10
        for node in rounding:
            point = stored[node.input[2]]
            assert point.dtype == np.int8
            assert not point.any()
        for node in loaded.graph.node:
            if node.op_type in ("Conv", "Gemm"):
                assert stored[node.input[2]].dtype == np.float32
        # Weights are quantised per output channel, and activations per tensor.
        assert stored["conv.weight.scale"].shape == (8,)
        with pytest.raises(BadValueError, match="is affine, and is to be written as signed"):
            export_int8(model, images(2), [images(2)], path, QuantConfig(), TENSORRT_INT8)

    def test_what_tensorrt_reads_computes_the_same(self, tmp_path: Path) -> None:
        model = fold_batch_norm(network("residual"))
        calibration = [images(16, seed=1)]
        path = tmp_path / "int8.onnx"
        export_int8(model, images(2), calibration, path, FOR_TENSORRT, TENSORRT_INT8)
        import onnxruntime

        options = onnxruntime.SessionOptions()
        # As it stands, in float: integer operators for pairs that are signed may saturate here.
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        session = onnxruntime.InferenceSession(
            str(path), options, providers=["CPUExecutionProvider"]
        )
        x = images(8, seed=5)
        with torch.no_grad():
            right = fake_quantized(model, calibrate(model, calibration, FOR_TENSORRT))(x)
        got = torch.from_numpy(session.run(None, {"input": x.numpy()})[0])
        assert relative_error(got, right.double()) <= 0.02

    def test_nodes_know_their_layers(self, tmp_path: Path) -> None:
        export(network("residual"), images(1), tmp_path / "net.onnx")
        layers = node_layers(tmp_path / "net.onnx")
        assert layers["/block/conv1/Conv"] == "block.conv1"
        assert layers["/block/down/down.0/Conv"] == "block.down.0"
        assert layers["/Relu"] == "conv"
        assert layers["output"] == "fc"
        assert "/block/Add" not in layers


def test_an_operator_that_onnx_has_not_is_named(capsys: pytest.CaptureFixture) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.pool = nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.conv(x)).flatten(1)

    wanted = Preparation("fp32", CPU)
    with pytest.raises(OperatorNotTakenError) as layer:
        engines.prepare("onnxruntime", Odd().eval(), images(1), wanted)
    assert (layer.value.operator, layer.value.layer) == ("AdaptiveAvgPool2d", "pool")
    assert layer.value.next_step
    with pytest.raises(OperatorNotTakenError) as function:
        engines.prepare("onnxruntime", Unknown().eval(), images(1), wanted)
    assert function.value.operator in ("aten::i0", "aten::special_i0")
    assert capsys.readouterr().out == ""  # torch prints the whole graph where it fails


@pytest.mark.parametrize("library", ["onnx", "onnxruntime"])
def test_without_a_library_the_engine_is_missing(
    library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    assert (
        engines.missing("onnxruntime", CPU) == f"{library} is not installed: pip install {library}"
    )


def test_a_gpu_needs_a_build_with_a_provider_for_it() -> None:
    import onnxruntime

    reason = engines.missing("onnxruntime", torch.device("cuda"))
    if "CUDAExecutionProvider" in onnxruntime.get_available_providers():
        assert reason == ""
    else:
        assert "has no CUDA provider, only" in reason


@pytest.mark.slow
def test_engines_import_no_library_before_they_are_asked() -> None:
    """A registry that loads onnxruntime, openvino and jax to list names would take seconds."""
    code = (
        "import sys; from narrowgauge_lab.engines import registry; "
        "[registry.engine(n) for n in ('onnxruntime', 'openvino', 'xla', 'torch2trt')]; "
        "print([m for m in ('onnx', 'onnxruntime', 'openvino', 'jax', 'torch2trt', 'tensorrt') "
        "if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
