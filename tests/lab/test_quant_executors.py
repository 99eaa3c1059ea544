"""Dynamic quantisation, executors by name, and what is counted on the float network."""

from __future__ import annotations

import pytest
import torch
from quant_models import EXACT_BITS, images, small_network
from torch import nn

from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    SkippedError,
    UnknownNameError,
)
from narrowgauge_kernels import library
from narrowgauge_kernels.errors import KernelsNotBuiltError
from narrowgauge_lab.measure.cost import UncountableError, count
from narrowgauge_lab.quant import cpu, dynamic, executors
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.energy import bit_operations, layer_work, stored_bytes
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.quant.parameters import choose
from narrowgauge_lab.torch_compat import torch_version

CPU = torch.device("cpu")
needs_onnx = pytest.mark.skipif(torch_version() < (2, 0), reason="onnx is for current images")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


class TestDynamic:
    def test_only_linear_layers_change(self):
        model = small_network()
        for net in (dynamic.dynamic(model), dynamic.dynamic_int8(model)):
            changed = [n for n, m in net.named_children() if type(m) is not type(model[int(n)])]
            assert changed == ["8"]
            assert torch.equal(net[0].weight, model[0].weight)

    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_the_range_is_that_of_each_batch(self, bits):
        layer = nn.Linear(12, 5)
        net = dynamic.dynamic(layer, QuantConfig(activation_bits=bits, weight_bits=bits))
        weight = QuantConfig(weight_bits=bits).weight(layer)
        for scale in (1.0, 50.0):
            x = scale * torch.randn(7, 3, 12)
            params = choose((x.min(), x.max()), bits, symmetric=False)
            rounded = params.dequantize(params.quantize(x))
            wanted = rounded @ weight.dequantize(weight.quantize(layer.weight)).t() + layer.bias
            assert torch.allclose(net(x), wanted, atol=1e-5 * scale)

    def test_int8_gives_what_the_float_reference_gives(self):
        bits = cpu.exact_activation_bits()
        for layer in (nn.Linear(12, 5), nn.Linear(12, 5, bias=False)):
            reference = dynamic.dynamic(layer, QuantConfig(activation_bits=bits))
            int8 = dynamic.dynamic_int8(layer)
            for scale in (1.0, 50.0):
                x = scale * torch.randn(33, 12)
                with torch.no_grad():
                    exact, wanted, got = layer(x), reference(x), int8(x)
                assert torch.allclose(got, wanted, atol=2e-6 * scale, rtol=1e-5)
                assert 0 < float((got - exact).abs().max()) < 0.1 * scale
        assert "engine=" in repr(int8)

    def test_no_rows_are_no_error(self):
        net = dynamic.dynamic(nn.Linear(12, 5))
        assert net(torch.zeros(0, 12)).shape == (0, 5)

    def test_a_network_without_linear_layers(self):
        convolutions = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU())
        for act in (dynamic.dynamic, dynamic.dynamic_int8):
            with pytest.raises(NotApplicableError, match="no linear layer") as caught:
                act(convolutions)
            assert "convolutions are not" in caught.value.why

    def test_other_bits_than_the_engines(self):
        with pytest.raises(BadValueError, match="inputs of 4 bits") as caught:
            dynamic.dynamic_int8(nn.Linear(3, 4), QuantConfig(activation_bits=4))
        assert "simulate" in caught.value.next_step


class TestExecutors:
    @pytest.mark.parametrize(
        "name", ["fake", "torch", pytest.param("onnxruntime", marks=needs_onnx)]
    )
    def test_all_of_them_compute_the_same(self, name):
        model, x = small_network(), images()
        scales = calibrate(model, [x], QuantConfig(activation_bits=EXACT_BITS))
        executors.require_executor(name, 8, CPU)
        with torch.no_grad():
            done = executors.execute(name, model, scales, x[:1])
            twin = executors.float_twin(name, model, x[:1])
            wanted, got = fake_quantized(model, scales)(x), done.forward(x)
            assert torch.allclose(twin.forward(x), model(x), atol=1e-5)
        off = (got - wanted).abs()
        assert float(off.max()) <= 3.001 * float(scales["8"].output.scale)
        assert done.how
        assert (done.file_bytes is not None) == (name == "onnxruntime")
        if done.file_bytes:
            assert done.file_bytes < twin.file_bytes

    @pytest.mark.parametrize("bits", [1, 9, 16])
    def test_a_width_that_no_executor_has(self, bits):
        with pytest.raises(BadValueError, match=f"no executor has {bits} bits") as caught:
            executors.require_executor("torch", bits, CPU)
        assert "2 to 8" in caught.value.next_step

    def test_a_width_that_another_has(self):
        with pytest.raises(BadValueError, match="tensorrt has no integers of 4 bits") as caught:
            executors.require_executor("tensorrt", 4, CPU)
        assert "executor=fake" in caught.value.next_step
        assert "tensorrt has 8" in caught.value.why

    def test_rounding_needs_its_kernels_before_anything_is_trained(self, monkeypatch, tmp_path):
        monkeypatch.setattr(library, "_loaded", {"directory": None, "devices": ()})
        monkeypatch.setenv("NARROWGAUGE_KERNELS", str(tmp_path))
        with pytest.raises(KernelsNotBuiltError):
            executors.require_executor("fake", 8, CPU)

    def test_what_is_not_here_is_skipped(self, monkeypatch):
        with pytest.raises(SkippedError, match="tensorrt does not run here"):
            executors.require_executor("tensorrt", 8, CPU)
        with pytest.raises(SkippedError, match="torch does not run here") as caught:
            executors.require_executor("torch", 8, torch.device("cuda"))
        assert "this row is on cuda" in caught.value.why
        monkeypatch.setitem(__import__("sys").modules, "onnxruntime", None)
        monkeypatch.setitem(__import__("sys").modules, "onnx", None)
        with pytest.raises(SkippedError, match="onnxruntime does not run here") as caught:
            executors.require_executor("onnxruntime", 8, CPU)
        assert "no onnx" in caught.value.why

    def test_names(self):
        with pytest.raises(UnknownNameError):
            executors.require_executor("tensorflow", 8, CPU)
        model = small_network()
        with pytest.raises(BadValueError, match="takes no scales"):
            executors.execute("tensorrt", model, calibrate(model, [images()]), images(1))

    def test_bits_that_saturate_are_lowered(self, monkeypatch):
        monkeypatch.setattr(executors, "exact_activation_bits", lambda: 7)
        assert executors.activation_bits("torch", 8) == 7
        assert executors.activation_bits("torch", 4) == 4
        assert executors.activation_bits("fake", 8) == 8


class _Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.unused = nn.Conv2d(3, 3, 3, padding=1), nn.Linear(2, 2)

    def forward(self, x):
        return self.conv(self.conv(x))


class TestCounting:
    def test_layers_add_up_to_the_network(self):
        model = small_network()
        work = layer_work(model, images(5))
        assert list(work) == ["0", "2", "4", "8"]
        assert sum(each.macs for each in work.values()) == count(model, images(1)).macs
        assert work["0"].macs == 16 * 3 * 9 * 144
        assert (work["2"].weights, work["2"].channels) == (16 * 4 * 9, 16)

    def test_every_call_counts(self):
        work = layer_work(_Twice(), torch.zeros(2, 3, 4, 4))
        assert work["conv"].macs == 2 * 3 * 3 * 9 * 16
        assert work["unused"].macs == 0

    def test_bit_operations_are_the_sum_over_layers(self):
        work = layer_work(small_network(), images(1))
        total = sum(each.macs for each in work.values())
        assert bit_operations(work, {}) == total * 32 * 32
        assert bit_operations(work, dict.fromkeys(work, (8, 8))) == total * 64
        widths = {"0": (4, 8), "8": (2, 2)}
        rest = work["2"].macs + work["4"].macs
        wanted = work["0"].macs * 32 + work["8"].macs * 4 + rest * 1024
        assert bit_operations(work, widths) == wanted

    def test_bytes_of_packed_weights(self):
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 2, bias=False))
        work = layer_work(model, torch.zeros(1, 1, 4, 4))
        assert stored_bytes(model, work, {}) == 4 * (27 + 3 + 24)
        # 27 weights of 4 bits are 14 bytes; 3 biases; a scale for each of 3 channels.
        assert stored_bytes(model, work, {"0": (4, 8)}) == 14 + 12 + 12 + 4 * 24

    def test_a_converted_network_is_not_counted(self):
        model = small_network()
        int8 = executors.execute(
            "torch", model, calibrate(model, [images()], QuantConfig(activation_bits=EXACT_BITS)),
            images(1),
        ).forward  # fmt: skip
        for net in (int8, dynamic.dynamic_int8(model)):
            with pytest.raises(UncountableError, match="converted network") as caught:
                layer_work(net, images(1))
            assert "before it is converted" in caught.value.next_step
        rounded = fake_quantized(model, calibrate(model, [images()]))
        for net in (nn.ReLU(), rounded):
            with pytest.raises(BadValueError, match="no layer whose work"):
                layer_work(net, images(1))
