"""Calibration, the fake-quantised model, and the table of sensitivities."""

from __future__ import annotations

import copy

import pytest
import torch
from quant_models import images, small_network
from torch import nn
from torch.nn import functional as F

from narrowgauge_contract.errors import BadValueError, ExitCode
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.fake import fake_quantize
from narrowgauge_lab.quant.layers import FakeQuantizedLayer, fake_quantized
from narrowgauge_lab.quant.parameters import choose
from narrowgauge_lab.quant.sensitivity import sensitivity


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(3)


def test_scales_are_those_of_what_went_through():
    model = small_network()
    batches = [images(seed=1), (images(seed=2), torch.arange(8))]
    scales = calibrate(model, batches)
    assert list(scales) == ["0", "2", "4", "8"]
    everything = torch.cat([images(seed=1), images(seed=2)])
    middle = model[1](model[0](everything)).detach()
    for params, values in ((scales["0"].input, everything), (scales["2"].input, middle)):
        wanted = choose((values.min(), values.max()), 8, False)
        assert torch.equal(params.scale, wanted.scale)
        assert int(params.zero_point) == int(wanted.zero_point)
    weight = scales["2"].weight
    assert (weight.axis, weight.symmetric, weight.narrow) == (0, True, True)
    assert torch.equal(weight.scale, (model[2].weight.abs().amax((1, 2, 3)).double() / 127).float())
    # Linear behind a convolution: the output of the last ReLU is never negative.
    assert int(scales["4"].input.zero_point) == 0


def test_the_model_is_left_as_it_was():
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout()).train()
    model[1].eval()
    before = copy.deepcopy(model.state_dict())
    calibrate(model, [images()])
    assert [m.training for m in model] == [True, False, True]
    assert not model[0]._forward_hooks
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("bits", [8, 6, 4, 2])
def test_fewer_bits_lose_more(bits):
    model, x = small_network(), images()
    errors = []
    for width in (bits, bits + 1 if bits < 8 else 4):
        scales = calibrate(model, [x], QuantConfig(activation_bits=width, weight_bits=width))
        errors.append(float((fake_quantized(model, scales)(x) - model(x)).detach().pow(2).mean()))
    more, fewer = (errors[1], errors[0]) if bits == 8 else errors
    assert 0 < fewer < more


def test_a_layer_rounds_its_input_weight_and_output():
    layer = nn.Conv2d(3, 4, 3, padding=1, padding_mode="circular")
    (scales,) = calibrate(layer, [images()]).values()
    wanted = fake_quantize(images(), scales.input)
    bare = copy.deepcopy(layer)
    bare.weight.data = fake_quantize(layer.weight.detach(), scales.weight)
    wanted = fake_quantize(bare(wanted), scales.output)
    model = fake_quantized(layer, {"": scales})
    assert isinstance(model, FakeQuantizedLayer)
    assert torch.equal(model(images()), wanted)


@pytest.mark.parametrize(
    ("layer", "function", "shape"),
    [
        (nn.Linear(5, 4), F.linear, (7, 2, 5)),
        (nn.Conv1d(4, 6, 3), F.conv1d, (2, 4, 9)),
        (nn.Conv3d(2, 3, 2), F.conv3d, (1, 2, 4, 4, 4)),
        (nn.ConvTranspose1d(4, 6, 3), F.conv_transpose1d, (2, 4, 5)),
        (nn.ConvTranspose2d(4, 6, 3), F.conv_transpose2d, (2, 4, 5, 5)),
        (nn.ConvTranspose3d(2, 3, 2), F.conv_transpose3d, (1, 2, 3, 3, 3)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else None,
)
def test_every_kind_of_layer(layer, function, shape):
    x = torch.randn(shape)
    (scales,) = calibrate(layer, [x], QuantConfig(outputs=False)).values()
    transposed = "Transpose" in type(layer).__name__
    assert scales.weight.axis == (1 if transposed else 0)
    assert scales.output is None
    weight = fake_quantize(layer.weight.detach(), scales.weight)
    wanted = function(fake_quantize(x, scales.input), weight, layer.bias)
    assert torch.equal(fake_quantized(layer, {"": scales})(x), wanted)


def test_settings_of_a_transposed_convolution_are_kept():
    layer = nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2)
    x = torch.randn(2, 4, 5, 5)
    (scales,) = calibrate(layer, [x]).values()
    assert torch.allclose(fake_quantized(layer, {"": scales})(x), layer(x), atol=0.05)


def test_training_goes_straight_through():
    """The names of the parameters stay; each gets a gradient; steps lower the loss."""
    model, x, labels = small_network(), images(), torch.arange(8)
    quantised = fake_quantized(model, calibrate(model, [x], QuantConfig(weight_bits=4))).train()
    assert {n for n, _ in quantised.named_parameters()} == {n for n, _ in model.named_parameters()}
    assert set(model.state_dict()) < set(quantised.state_dict())
    optimiser = torch.optim.Adam(quantised.parameters(), 0.01)
    losses = []
    for _ in range(25):
        optimiser.zero_grad()
        loss = F.cross_entropy(quantised(x), labels)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert all(bool((p.grad != 0).any()) for p in quantised.parameters())
    assert losses[-1] < 0.9 * losses[0]
    again = copy.deepcopy(quantised)
    assert torch.equal(again(x), quantised(x))


def test_hooks_of_a_layer_are_still_called():
    model, seen = small_network(), []
    scales = calibrate(model, [images()])
    model[0].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    fake_quantized(model, scales)(images())
    assert seen == [(8, 16, 12, 12)]


def test_partial_quantisation_by_name():
    model = small_network()
    scales = calibrate(model, [images()], QuantConfig(skip=("0", "8")))
    assert list(scales) == ["2", "4"]
    assert isinstance(fake_quantized(model, scales)[0], nn.Conv2d)


class TestBadInput:
    def test_no_batches(self):
        for nothing in ([], iter(())):
            with pytest.raises(CalibrationError, match="there is no calibration data") as caught:
                calibrate(small_network(), nothing)
            assert caught.value.exit_code == ExitCode.DATA_UNAVAILABLE
            assert "few hundred samples" in caught.value.next_step

    @pytest.mark.parametrize(
        ("spoil", "message"),
        [
            (lambda x: x[:0], r"input of layer 0: .*shape \(0, 3, 12, 12\)"),
            (lambda x: x * float("nan"), "input of layer 0: .*NaN"),
            (lambda x: x * float("inf"), "input of layer 0: .*infinity|input of layer 0: .*NaN"),
            (lambda x: x * 3e38, "layer 0: .*infinity|layer 0: .*NaN"),
        ],
        ids=["empty", "NaN", "infinity", "overflow"],
    )
    def test_a_bad_batch_names_the_layer(self, spoil, message):
        model = small_network()
        with pytest.raises(CalibrationError, match=message):
            calibrate(model, [images(), spoil(images())])
        assert not any(module._forward_hooks for module in model)

    def test_a_weight_that_is_not_finite(self):
        model = nn.Sequential(nn.Conv2d(3, 4, 3))
        model[0].weight.data[0] = float("nan")
        with pytest.raises(CalibrationError, match=r"weight of layer 0: .*NaN"):
            calibrate(model, [images()], QuantConfig(outputs=False))

    def test_a_layer_that_is_never_reached(self):
        with pytest.raises(CalibrationError, match=r"activation of layer unused: .*first batch"):
            calibrate(_Unreached(nn.Conv2d(3, 3, 1)), [images()])

    def test_names_that_do_not_fit(self):
        model = small_network()
        with pytest.raises(BadValueError, match="no layer to skip is called stem"):
            calibrate(model, [images()], QuantConfig(skip=("stem",)))
        with pytest.raises(BadValueError, match="no layer to quantise"):
            calibrate(nn.Sequential(nn.ReLU()), [images()])
        scales = calibrate(model, [images()])
        with pytest.raises(BadValueError, match="scales for 8, which are no layers"):
            fake_quantized(model[:4], {"8": scales["8"]})
        with pytest.raises(BadValueError, match="no scales"):
            fake_quantized(model, {})


class _Unreached(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.used, self.unused = nn.Conv2d(3, 3, 1), layer

    def forward(self, x):
        return self.used(x)


def test_sensitivity_quantises_one_layer_at_a_time():
    model, x = small_network(), images(32)
    wanted = model(x).detach()
    scales = calibrate(model, [x])
    # One layer at 2 bits must come out as the one that loses most.
    coarse = calibrate(model, [x], QuantConfig(weight_bits=2, activation_bits=2))
    scales["4"] = coarse["4"]
    seen = []

    def evaluate(candidate):
        seen.append([n for n, m in candidate.named_modules() if isinstance(m, FakeQuantizedLayer)])
        return -float((candidate(x) - wanted).detach().pow(2).mean())

    table = sensitivity(model, scales, evaluate)
    assert seen == [[], ["0", "2", "4", "8"], ["0"], ["2"], ["4"], ["8"]]
    assert table.floating == 0.0
    assert table.rows[0].layer == "4"
    losses = [row.loss for row in table.rows]
    assert losses == sorted(losses, reverse=True)
    assert losses[0] > 10 * losses[1]
    assert all(row.loss == table.floating - row.score for row in table.rows)
    assert table.quantized < -losses[1]
