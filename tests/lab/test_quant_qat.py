"""Quantisation-aware training: steps and weights together; and converted networks never train."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from quant_models import EXACT_BITS, images, small_network
from torch import nn
from torch.nn import functional as F

from narrowgauge_contract.errors import BadValueError, ExitCode, UsageError
from narrowgauge_lab.optim import Adam
from narrowgauge_lab.quant import qat
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.converted import (
    ConvertedModelError,
    converted_layers,
    require_trainable,
)
from narrowgauge_lab.quant.dynamic import dynamic_int8
from narrowgauge_lab.quant.fake import fake_quantize
from narrowgauge_lab.quant.layers import fake_quantized
from narrowgauge_lab.quant.parameters import choose
from narrowgauge_lab.quant.x86 import to_int8

FEW = QuantConfig(activation_bits=3, weight_bits=3)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(5)


def _params(axis, symmetric, bits=4):
    values = torch.randn(6, 5)
    low, high = (values.min(), values.max()) if axis is None else (values.amin(1), values.amax(1))
    return choose((low * 0.6, high * 0.6), bits, symmetric, symmetric, axis), values


@pytest.mark.parametrize("axis", [None, 0])
@pytest.mark.parametrize("symmetric", [True, False])
def test_it_rounds_as_fake_quantisation_does(axis, symmetric):
    params, values = _params(axis, symmetric)
    quantizer = qat.TrainedQuantizer(params)
    assert torch.equal(quantizer(values), fake_quantize(values, params))
    # And with a step that was trained.
    quantizer.log_step.data += 0.3
    assert torch.equal(quantizer(values), fake_quantize(values, quantizer.params))
    assert torch.allclose(quantizer.params.scale, params.scale * 2.718281828**0.3)
    assert int(quantizer.params.quant_max) == params.quant_max


def test_gradients_are_those_of_the_papers():
    """Of the step: round(v) - v inside, the end of the range outside (arXiv 1902.08153, eq. 3); of
    its logarithm that times the step. Of the values: 1 inside, 0 outside."""
    params, values = _params(None, symmetric=True)
    quantizer = qat.TrainedQuantizer(params)
    values.requires_grad_()
    seed = torch.randn(6, 5)
    quantizer(values).backward(seed)
    scaled = values.detach().double() / params.scale.double()
    inside = (scaled >= params.quant_min) & (scaled <= params.quant_max)
    ends = scaled.clamp(params.quant_min, params.quant_max)
    slope = torch.where(inside, scaled.round() - scaled, ends)
    wanted = (slope * seed.double()).sum() * params.scale.double()
    assert 0 < int(inside.sum()) < inside.numel()
    assert float(quantizer.log_step.grad) == pytest.approx(float(wanted), rel=1e-4)
    assert torch.allclose(values.grad, torch.where(inside, seed, torch.zeros(())))


@pytest.mark.parametrize("axis", [None, 0])
def test_the_gradient_by_a_step_is_torchs_own(axis):
    """torch has the same rule, for a symmetric range without scaling of gradients."""
    params, values = _params(axis, symmetric=True)
    scale = params.scale.reshape(-1).clone().requires_grad_()
    zero = torch.zeros_like(scale)
    ends = (params.quant_min, params.quant_max)
    if axis is None:
        theirs = torch._fake_quantize_learnable_per_tensor_affine(values, scale, zero, *ends, 1.0)
    else:
        theirs = torch._fake_quantize_learnable_per_channel_affine(
            values, scale, zero, axis, *ends, 1.0
        )
    quantizer = qat.TrainedQuantizer(params)
    ours = quantizer(values)
    seed = torch.randn(6, 5)
    theirs.backward(seed)
    ours.backward(seed)
    assert torch.allclose(ours, theirs)
    wanted = scale.grad * params.scale.reshape(-1)
    assert torch.allclose(quantizer.log_step.grad.reshape(-1), wanted, rtol=1e-4, atol=1e-6)


def test_nan_stays_nan():
    params, values = _params(0, symmetric=False)
    values[2, 3] = float("nan")
    found = qat.TrainedQuantizer(params)(values)
    assert torch.isnan(found).nonzero().tolist() == [[2, 3]]


def _train(net, x, labels, steps=25):
    optimiser = torch.optim.Adam(net.parameters(), 0.02)
    losses = []
    for _ in range(steps):
        loss = F.cross_entropy(net(x), labels)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    return losses


def test_training_moves_steps_and_weights_and_lowers_the_loss():
    model, x, labels = small_network(), images(), torch.arange(8)
    before = copy.deepcopy(model.state_dict())
    net = qat.trainable(model, calibrate(model, [x], FEW))
    assert net.training
    floating = {name for name, _ in model.named_parameters()}
    steps = {name for name, _ in net.named_parameters()} - floating
    assert len(steps) == 12
    losses = _train(net, x, labels)
    assert losses[-1] < 0.9 * losses[0]
    trained = dict(net.named_parameters())
    assert all(bool((trained[name] != 0).any()) for name in steps)
    assert not torch.equal(trained["8.weight"], before["8.weight"])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_fixed_steps_stay():
    model, x = small_network(), images()
    scales = calibrate(model, [x], FEW)
    net = qat.trainable(model, scales, steps=False)
    assert {n for n, _ in net.named_parameters()} == {n for n, _ in model.named_parameters()}
    _train(net, x, torch.arange(8), 2)
    for name, found in qat.scales_of(net).items():
        assert torch.equal(found.weight.scale, scales[name].weight.scale)


@pytest.mark.parametrize("outputs", [True, False])
def test_what_was_trained_is_what_is_converted(outputs):
    model, x = small_network(), images()
    config = QuantConfig(activation_bits=EXACT_BITS, weight_bits=4, outputs=outputs)
    net = qat.trainable(model, calibrate(model, [x], config))
    _train(net, x, torch.arange(8), 3)
    floating, scales = qat.float_of(net), qat.scales_of(net)
    assert [type(m) for m in floating] == [type(m) for m in model]
    assert not floating.training
    assert set(floating.state_dict()) == set(model.state_dict())
    with torch.no_grad():
        wanted = net.eval()(x)
        assert torch.equal(fake_quantized(floating, scales)(x), wanted)
        if outputs:
            off = (to_int8(floating, scales)(x) - wanted).abs()
            # Next to a tie, sums in int32 and in float32 may fall apart by a step or two.
            assert float(off.max()) <= 3.001 * float(scales["8"].output.scale)
    assert (scales["8"].output is None) != outputs
    # What is trained on does not change what was taken out.
    scale = scales["0"].weight.scale.clone()
    _train(net.train(), x, torch.arange(8), 2)
    assert torch.equal(scales["0"].weight.scale, scale)


class TestConvertedNetworks:
    def _static(self):
        model = small_network()
        return to_int8(model, calibrate(model, [images()], QuantConfig(activation_bits=EXACT_BITS)))

    def test_training_mode_is_refused(self):
        for net in (self._static(), dynamic_int8(small_network())):
            with pytest.raises(ConvertedModelError, match="cannot be trained") as caught:
                net.train()
            assert caught.value.exit_code == ExitCode.USAGE
            assert "qat.trainable" in caught.value.next_step
            net.eval()
            assert not any(module.training for module in net.modules())

    def test_a_model_in_training_mode_converts(self):
        model = small_network()
        scales = calibrate(model, [images()], QuantConfig(activation_bits=EXACT_BITS))
        for net in (to_int8(model.train(), scales), dynamic_int8(model)):
            assert not any(module.training for module in net.modules())
        assert model.training

    def test_half_a_converted_network_is_refused_too(self):
        """Its convolutions have parameters, so an optimiser alone would not see it."""
        net = dynamic_int8(small_network())
        assert list(net.parameters())
        with pytest.raises(ConvertedModelError, match="cannot be trained") as caught:
            require_trainable(net)
        assert "8 run integers" in caught.value.why
        with pytest.raises(ConvertedModelError):
            qat.trainable(self._static(), {})

    def test_an_optimiser_of_nothing_is_refused(self):
        with pytest.raises(UsageError, match="no parameter to train") as caught:
            Adam(self._static(), 0.01)
        assert "integers" in caught.value.why
        frozen = small_network().requires_grad_(False)
        for act in (require_trainable, lambda net: Adam(net, 0.01)):
            with pytest.raises(UsageError, match="no parameter to train"):
                act(frozen)

    def test_torchs_own_are_known(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # deprecated, and will be removed
            net = torch.quantization.quantize_dynamic(small_network(), {nn.Linear})
        assert converted_layers(net) == ["8"]
        with pytest.raises(ConvertedModelError):
            require_trainable(net)

    def test_float_networks_pass(self):
        require_trainable(small_network())
        assert converted_layers(small_network()) == []


def test_another_network_has_no_scales():
    for act in (qat.scales_of, qat.float_of):
        with pytest.raises(BadValueError, match="no fake-quantised layer"):
            act(small_network())
