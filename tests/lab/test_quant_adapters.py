"""Int8 execution agrees with the fake-quantised model, by torch's engine and by ONNX Runtime.

The bound, stated: a layer on the same input differs by at most one step of its output's scale, and
only where float32 sums and int32 sums (with a bias rounded to their step) fall on different sides
of a tie. A difference that came in grows by at most the L1 norm of a layer's rounded weights.
"""

from __future__ import annotations

import pytest
import torch
from quant_models import EXACT_BITS, images, small_network
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.quant import cpu, x86
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.fake import fake_quantize
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.torch_compat import torch_version

#: ONNX Runtime for the Python of torch 1.8 is not maintained; the images of that age lack it.
needs_onnx = pytest.mark.skipif(torch_version() < (2, 0), reason="onnx is for current images")
CONFIGS = {
    "affine": QuantConfig(activation_bits=EXACT_BITS),
    "symmetric": QuantConfig(activation_bits=EXACT_BITS, activation_symmetric=True),
    "4 bits": QuantConfig(activation_bits=4, weight_bits=4),
    "per tensor": QuantConfig(activation_bits=EXACT_BITS, per_channel=False),
}


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(11)


def bound(model, scales):
    """The most that int8 and fake quantisation may differ at the end of a sequence of layers."""
    difference = 0.0
    for name, each in scales.items():
        weight = fake_quantize(dict(model.named_modules())[name].weight.detach(), each.weight)
        # What comes in may be rounded the other way too: one step more.
        entering = difference + float(each.input.scale) if difference else 0.0
        grown = entering * float(weight.abs().flatten(1).sum(1).max())
        difference = grown + float(each.output.scale)
    return difference * 1.0001


def ends(model, scales, run):
    """The int8 result and the fake-quantised one, on data other than that of the calibration."""
    x = images(32, seed=5) * 1.3
    with torch.no_grad():
        return run(x), fake_quantized(model, scales)(x)


def assert_agree(got, wanted, model, scales):
    step = float(scales["8"].output.scale)
    assert float((got - wanted).abs().max()) <= bound(model, scales)
    # Far below the bound in fact: most results are equal, none is many steps away. The fewer the
    # bits, the larger the step that ONNX Runtime's biases are rounded to.
    share = 0.05 if scales["8"].input.bits >= EXACT_BITS else 0.2
    assert float(((got - wanted).abs() > step / 2).float().mean()) <= share
    assert float((got - wanted).abs().max()) <= 3.001 * step
    assert float(wanted.std()) > 0


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_torchs_engine_agrees_layer_by_layer_and_as_a_whole(config):
    model = small_network()
    scales = calibrate(model, [images()], config)
    int8 = x86.to_int8(model, scales)
    x = images(seed=5) * 1.3
    with torch.no_grad():
        for name, module in fake_quantized(model, scales).named_children():
            wanted = module(x)
            if name in scales:
                step = float(scales[name].output.scale)
                difference = (int8[int(name)](x) - wanted).abs()
                assert float(difference.max()) <= 1.0001 * step
                assert float((difference > step / 2).float().mean()) <= 0.01
            x = wanted
    assert_agree(*ends(model, scales, int8), model, scales)
    assert f"engine={x86.choose_engine()}" in repr(int8)


def test_other_dimensions_by_torchs_engine():
    for layer, shape in ((nn.Conv1d(4, 6, 3), (2, 4, 20)), (nn.Conv3d(2, 4, 3), (1, 2, 6, 6, 6))):
        x = torch.randn(shape)
        scales = calibrate(layer, [x], CONFIGS["affine"])
        with torch.no_grad():
            difference = (x86.to_int8(layer, scales)(x) - fake_quantized(layer, scales)(x)).abs()
        assert float(difference.max()) <= 1.0001 * float(scales[""].output.scale)


def test_the_products_are_integers():
    """Not a float network under another name: the operator gets and gives quantised tensors."""
    model = small_network()
    int8 = x86.to_int8(model, calibrate(model, [images()], CONFIGS["affine"]))
    seen = []
    run = int8[0]._run
    int8[0]._run = lambda x, *rest: seen.append(x.dtype) or run(x, *rest)
    int8(images())
    assert seen == [torch.quint8]
    assert list(int8.parameters()) == []


class TestProcessors:
    def test_bits_that_are_exact(self, tmp_path):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("flags : fpu avx2 avx512f\n")
        assert cpu.exact_activation_bits(cpuinfo, "x86_64") == 7
        cpuinfo.write_text("flags : fpu avx2 avx512_vnni avx512f\n")
        assert cpu.exact_activation_bits(cpuinfo, "x86_64") == 8
        assert cpu.exact_activation_bits(tmp_path / "none", "aarch64") == 8

    def test_bits_that_would_saturate_are_refused(self, monkeypatch):
        monkeypatch.setattr(x86, "exact_activation_bits", lambda: 7)
        model = small_network()
        with pytest.raises(BadValueError, match="8 bits would saturate inside 0") as caught:
            x86.to_int8(model, calibrate(model, [images()]))
        assert "activation_bits=7" in caught.value.next_step

    def test_engines(self, monkeypatch):
        there = torch.backends.quantized.supported_engines
        assert x86.choose_engine("x86_64") == ("x86" if "x86" in there else "fbgemm")
        assert x86.choose_engine("aarch64") == "qnnpack"
        with pytest.raises(NotApplicableError, match="no int8 engine for riscv64"):
            x86.choose_engine("riscv64")

    def test_the_process_keeps_its_engine(self):
        before = torch.backends.quantized.engine
        model = small_network()
        x86.to_int8(model, calibrate(model, [images()], CONFIGS["affine"]), "qnnpack")
        assert torch.backends.quantized.engine == before


@pytest.mark.parametrize(
    ("layer", "config", "error", "message"),
    [
        (nn.ConvTranspose2d(3, 4, 3), CONFIGS["affine"], NotApplicableError, "no ConvTranspose2d"),
        (
            nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular"),
            CONFIGS["affine"],
            NotApplicableError,
            "by .*circular",
        ),
        (
            nn.Conv2d(3, 4, 3),
            QuantConfig(activation_bits=7, outputs=False),
            BadValueError,
            "the output of layer .* has no scale",
        ),
        (
            nn.Conv2d(3, 4, 3),
            QuantConfig(activation_bits=7, weight_symmetric=False),
            BadValueError,
            "the weight of layer .* is affine",
        ),
    ],
    ids=["transposed", "padding", "output", "affine weight"],
)
def test_what_the_engine_cannot_do_is_refused(layer, config, error, message):
    with pytest.raises(error, match=message) as caught:
        x86.to_int8(layer, calibrate(layer, [images()], config))
    assert caught.value.next_step


def test_scales_of_another_model_are_refused():
    model = small_network()
    scales = calibrate(model, [images()], CONFIGS["affine"])
    with pytest.raises(BadValueError, match="scales for 8"):
        x86.to_int8(model[:4], {"8": scales["8"]})


@needs_onnx
class TestOnnx:
    @pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
    def test_onnx_runtime_agrees_and_runs_integers(self, config, tmp_path):
        from narrowgauge_lab.quant.ort import OrtModel
        from narrowgauge_lab.quant.qdq import export_qdq

        model = small_network()
        scales = calibrate(model, [images()], config)
        export_qdq(model, scales, images(2), tmp_path / "model.onnx")
        session = OrtModel(tmp_path / "model.onnx")
        assert session.operators["QLinearConv"] == 3
        assert session.operators["QGemm"] == 1
        assert not {"Conv", "FusedConv", "Gemm"} & set(session.operators)
        # A batch of another size than the exported one.
        assert_agree(*ends(model, scales, session), model, scales)

    def test_the_file_is_what_others_read(self, tmp_path):
        """Weights stored as int8, biases as int32 in steps of the products, all per channel."""
        import onnx
        from onnx import numpy_helper

        from narrowgauge_lab.quant.qdq import OPSET, export_qdq, operator_counts

        model = small_network()
        scales = calibrate(model, [images()])
        export_qdq(model, scales, images(2), tmp_path / "model.onnx")
        loaded = onnx.load(str(tmp_path / "model.onnx"))
        assert loaded.opset_import[0].version == OPSET
        stored = {each.name: numpy_helper.to_array(each) for each in loaded.graph.initializer}
        weight = torch.from_numpy(stored["0.weight.integers"].copy())
        assert weight.dtype == torch.int8
        assert torch.equal(weight.int(), scales["0"].weight.quantize(model[0].weight))
        steps = stored["0.bias.scale"] * stored["0.bias.integers"]
        assert abs(steps - model[0].bias.detach().numpy()).max() <= stored["0.bias.scale"].max()
        assert "0.weight" not in stored
        counts = operator_counts(tmp_path / "model.onnx")
        # Two per layer for activations; 4 weights and 3 biases. 8 bits need no Clip.
        assert counts["QuantizeLinear"] == 8
        assert counts["DequantizeLinear"] == 15
        assert "Clip" not in counts

    def test_a_layer_used_twice_and_float_outputs(self, tmp_path):
        from narrowgauge_lab.quant.ort import OrtModel
        from narrowgauge_lab.quant.qdq import export_qdq

        class Twice(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.up = nn.Conv2d(3, 3, 3, padding=1), nn.ConvTranspose2d(3, 4, 2)

            def forward(self, x):
                return self.up(torch.relu(self.conv(self.conv(x))))

        model = Twice().eval()
        config = QuantConfig(activation_bits=7, outputs=False)
        scales = calibrate(model, [images()], config)
        export_qdq(model, scales, images(2), tmp_path / "model.onnx")
        x = images(seed=5)
        with torch.no_grad():
            wanted = fake_quantized(model, scales)(x)
        # Biases are rounded, so a middle value may fall on the other side of a tie.
        difference = (OrtModel(tmp_path / "model.onnx")(x) - wanted).abs()
        assert float(difference.max()) <= 3 * float(scales["up"].input.scale)
        assert float(difference.mean()) <= 0.02 * float(scales["up"].input.scale)

    def test_refusals(self, tmp_path):
        from narrowgauge_lab.quant.qdq import export_qdq

        path = tmp_path / "model.onnx"
        with pytest.raises(BadValueError, match="training mode"):
            export_qdq(small_network().train(), {}, images(2), path)
        model = small_network()
        scales = calibrate(model, [images()])
        with pytest.raises(BadValueError, match=r"has no 8\.weight as it was calibrated") as caught:
            export_qdq(model[:4].eval(), {"8": scales["8"]}, images(2), path)
        assert "fold_batch_norm" in caught.value.next_step
        odd = nn.Sequential(model[0], nn.AdaptiveAvgPool2d(5)).eval()
        with pytest.raises(NotApplicableError, match="cannot export this Sequential") as refused:
            export_qdq(odd, {"0": scales["0"]}, images(2), path)
        assert "adaptive_avg_pool2d" in refused.value.why
        linear = nn.Linear(12, 4).eval()
        with pytest.raises(NotApplicableError, match="exported as Transpose"):
            export_qdq(linear, calibrate(linear, [images()]), images(2), path)
        affine = calibrate(linear, [images()[:, 0, 0]], QuantConfig(weight_symmetric=False))
        with pytest.raises(BadValueError, match="weight is affine"):
            export_qdq(linear, affine, images(2)[:, 0, 0], path)
        assert not path.exists()


@pytest.mark.parametrize("library", ["onnx", "onnxruntime"])
def test_a_missing_library_says_what_to_install(library, monkeypatch, tmp_path):
    from narrowgauge_lab.quant import ort, qdq

    monkeypatch.setitem(__import__("sys").modules, library, None)
    act = {
        "onnx": lambda: qdq.export_qdq(small_network(), {}, images(2), tmp_path / "model.onnx"),
        "onnxruntime": lambda: ort.OrtModel(tmp_path / "model.onnx"),
    }[library]
    with pytest.raises(NotApplicableError, match="this Python has no") as caught:
        act()
    assert caught.value.next_step == f"pip install {library}"
