"""Manual layers, forward: what they compute, and what they refuse."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import numpy as np
import pytest
import torch
from manual_layer_cases import (
    EXACT,
    FLOATS,
    SHAPES,
    TABLES,
    Shape,
    by_float_products,
    by_table,
    linear,
)
from torch import nn
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError, UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.manual import dispatch
from narrowgauge_lab.layers.manual.modules import ManualConv2d, ManualLinear
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.layers.manual.quantise import Scales, coded_input, coded_weight
from narrowgauge_lab.layers.manual.settings import PATHS
from narrowgauge_lab.quant.parameters import QuantParams

CPU = torch.device("cpu")
ONCE = SHAPES[0]
NEEDS_META = pytest.mark.skipif(
    torch_compat.torch_version() < (1, 9), reason="tensors on meta came with torch 1.9"
)


def _double(layer: Any, x: torch.Tensor) -> torch.Tensor:
    plain = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    twin = copy.deepcopy(layer).double()
    twin.__class__ = plain
    return twin(x.double()).detach()


def _close(result: torch.Tensor, expected: torch.Tensor, share: float) -> bool:
    """Everywhere, by the largest of what is expected; NaN is not."""
    return bool(((result.double() - expected).abs() <= share * expected.abs().max()).all())


class TestExactPolicies:
    @pytest.mark.parametrize("policy", EXACT)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_a_convolution_is_float64s(self, shape: Shape, policy: str) -> None:
        layer, x = shape.layer(policy), shape.batch()

        assert _close(layer(x).detach(), _double(layer, x), 1e-5)

    @pytest.mark.parametrize("leading", [(3,), (2, 3), ()])
    def test_a_linear_layer_is_float64s(self, leading: Any) -> None:
        layer, x = linear("exact_fp32"), torch.randn(*leading, 7)

        assert _close(layer(x).detach(), _double(layer, x), 1e-5)

    def test_channels_last_and_views_give_the_same(self) -> None:
        layer, x = ONCE.layer("mitchell"), ONCE.batch()
        wide = torch.randn(2, 4, 6, 10)
        wide[..., ::2] = x

        expected = layer(x)

        assert torch.equal(layer(x.contiguous(memory_format=torch.channels_last)), expected)
        assert torch.equal(layer(wide[..., ::2]), expected)

    def test_an_image_without_a_batch(self) -> None:
        layer, x = ONCE.layer("exact_fp32"), ONCE.batch()

        assert torch.equal(layer(x[0]), layer(x[:1])[0])

    @pytest.mark.skipif(
        torch_compat.torch_version() < (1, 9), reason="padding by name came with torch 1.9"
    )
    @pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
    @pytest.mark.parametrize("padding", ["same", "valid"])
    def test_padding_by_name(self, padding: str) -> None:
        plain = nn.Conv2d(2, 3, (2, 3), padding=padding, dilation=(1, 2))
        layer = ManualConv2d(2, 3, (2, 3), padding=padding, dilation=(1, 2))
        layer.load_state_dict(plain.state_dict())
        x = torch.randn(1, 2, 5, 6)

        assert _close(layer(x).detach(), plain(x).double().detach(), 1e-5)


class TestFloatPolicies:
    @pytest.mark.parametrize("policy", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
    def test_products_are_the_policys(self, shape: Shape, policy: str) -> None:
        layer, x = shape.layer(policy), shape.batch()
        mac = dispatch.layer_for(layer.settings, None, CPU, 1).mac

        result = layer(x).detach() - layer.bias.detach().reshape(1, -1, 1, 1)

        expected = torch.from_numpy(by_float_products(layer, x, mac))
        assert _close(result.flatten(2), expected, 1e-5)

    def test_the_activation_comes_first(self) -> None:
        layer = ManualLinear(1, 1, bias=False, policy="axfpm")
        a, b = (torch.from_numpy(np.array([bits], np.uint32).view(np.float32))
                for bits in (0x3F5B22D1, 0x3EF126E9))  # fmt: skip
        with torch.no_grad():
            layer.weight.copy_(b.reshape(1, 1))

        # The golden vectors of the two orders.
        assert layer(a).detach().numpy().view(np.uint32)[0] == 0x3EDA273C
        with torch.no_grad():
            layer.weight.copy_(a.reshape(1, 1))
        assert layer(b).detach().numpy().view(np.uint32)[0] == 0x3EFCB787


class TestTables:
    @pytest.mark.parametrize("policy", TABLES)
    @pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
    def test_sums_are_the_tables(self, shape: Shape, policy: str) -> None:
        """To the bit before the scale: by codes and table, with the zero points taken out."""
        layer, x = shape.layer(policy), shape.batch() + 0.5
        multiplier = multiplier_of(parse_policy(policy))
        table, form = multiplier.table, multiplier.form(True)
        image = coded_input(x, form, None, differentiated=False)
        kernel = coded_weight(layer.weight.detach(), form, None, differentiated=False)
        offsets = (128 * table.a_signed, 128 * table.b_signed)
        a, w = image.codes.numpy(), kernel.codes.numpy()
        za, zw = int(image.zero), kernel.zero.numpy().astype(np.int64)

        sums = by_table(layer, a, w, table.values, offsets, za)
        sums -= za * w.reshape(len(w), -1).astype(np.int64).sum(1).reshape(1, -1, 1)
        ones = np.ones((256, 256), np.int64) * (np.arange(256) - offsets[0])[:, None]
        taps = w[0].size
        sums -= zw.reshape(1, -1, 1) * (by_table(layer, a, w, ones, offsets, za) - taps * za)

        scale = (image.scale * kernel.scale).reshape(1, -1, 1)
        expected = torch.from_numpy(sums).float() * scale + layer.bias.detach().reshape(1, -1, 1)
        assert torch.equal(layer(x).detach().flatten(2), expected)

    @pytest.mark.parametrize("policy", TABLES)
    def test_every_path_gives_the_same(self, policy: str) -> None:
        x, results = SHAPES[1].batch(), {}
        for path in PATHS:
            layer = SHAPES[1].layer(policy, path=path)
            with contextlib.suppress(NotApplicableError):
                results[path] = layer(x)

        assert len(results) == (1 if policy == "lut8x8:mitchell" else 2)
        for result in results.values():
            assert torch.equal(result, results["table"])

    @pytest.mark.parametrize("policy", TABLES)
    def test_a_linear_layer_is_a_convolution_of_one_pixel(self, policy: str) -> None:
        layer, x = linear(policy), torch.randn(3, 2, 7)
        twin = ManualConv2d(7, 5, 1, policy=policy)
        twin.load_state_dict({"weight": layer.weight[..., None, None], "bias": layer.bias})

        assert torch.equal(layer(x), twin(x.reshape(6, 7, 1, 1)).reshape(3, 2, 5))

    def test_eight_exact_bits_are_near_float(self) -> None:
        for policy in ("exact_int8", "lut8x8:exact"):
            layer, x = ONCE.layer(policy), ONCE.batch()

            assert _close(layer(x).detach(), _double(layer, x), 0.02)

    def test_padding_by_hand_is_padding(self) -> None:
        """What a GPU does so as not to wait for the padding's code."""
        layer, x = ONCE.layer("lut8x8:ama5"), ONCE.batch()
        bare = ManualConv2d(4, 3, 3, policy="lut8x8:ama5")
        bare.load_state_dict(layer.state_dict())

        assert torch.equal(layer(x), bare(functional.pad(x, [1, 1, 1, 1])))

    def test_one_scale_for_all_weights(self) -> None:
        per_channel, per_tensor = (ONCE.layer("exact_int8", per_channel=each) for each in (1, 0))
        x = ONCE.batch()
        with torch.no_grad():
            for layer in (per_channel, per_tensor):
                layer.weight[0] *= 0.01
        expected = _double(per_channel, x)[:, 0]

        errors = [(layer(x)[:, 0].double() - expected).abs().max()
                  for layer in (per_channel, per_tensor)]  # fmt: skip

        assert 10 * errors[0] < errors[1]


def _params(scale: float, zero: int, signed: bool) -> QuantParams:
    return QuantParams(
        torch.tensor(scale), torch.tensor(zero, dtype=torch.int32), 8, None, signed, False
    )


class TestValuesThatAreNone:
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    def test_an_operand_without_a_finite_range_gives_nan(self, value: float) -> None:
        layer, x = ONCE.layer("exact_int8"), ONCE.batch()
        x[0, 0, 0, 0] = value

        assert bool(torch.isnan(layer(x)).all())

    def test_a_weight_loses_its_own_channel_only(self) -> None:
        layer, x = ONCE.layer("lut8x8:ama5"), ONCE.batch()
        with torch.no_grad():
            layer.weight[1, 0, 0, 0] = float("nan")

        lost = torch.isnan(layer(x)).flatten(2)

        assert bool(lost[:, 1].all())
        assert not bool(lost[:, [0, 2]].any())

    def test_with_calibrated_scales_an_infinity_saturates(self) -> None:
        layer, x = ONCE.layer("exact_int8"), ONCE.batch()
        layer.scales = Scales(_params(0.05, 0, True))
        x[0, 0, 0, 0] = float("inf")
        finite = x.clone()
        finite[0, 0, 0, 0] = 1e30

        assert torch.equal(layer(x), layer(finite))
        x[0, 0, 0, 0] = float("nan")
        assert bool(torch.isnan(layer(x)).all())

    def test_zeros_have_a_scale(self) -> None:
        layer = ONCE.layer("lut8x8:exact")
        with torch.no_grad():
            layer.weight.zero_()

        result = layer(torch.zeros(ONCE.image)).detach()

        assert torch.equal(result, layer.bias.detach().reshape(1, -1, 1, 1).expand_as(result))


class TestEmpty:
    @pytest.mark.parametrize("policy", ["mitchell", "exact_int8", "lut8x8:ama5"])
    def test_no_image(self, policy: str) -> None:
        layer = ONCE.layer(policy)
        x = torch.zeros(0, *ONCE.image[1:], requires_grad=True)

        result = layer(x)
        result.sum().backward()

        assert result.shape == (0, 3, 6, 5)
        assert x.grad is not None
        assert x.grad.shape == x.shape
        assert layer.weight.grad is not None
        assert not bool(layer.weight.grad.any())
        assert not bool(layer.bias.grad.any())

    @pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
    @pytest.mark.parametrize("policy", ["mitchell", "exact_int8", "lut8x8:ama5"])
    def test_no_feature_leaves_the_bias(self, policy: str) -> None:
        layer = ManualLinear(4, 3, policy=policy)
        layer.in_features, layer.weight = 0, nn.Parameter(torch.zeros(3, 0))

        result = layer(torch.zeros(2, 0))
        result.sum().backward()

        assert torch.equal(result.detach(), layer.bias.detach().expand(2, 3))
        assert torch.equal(layer.bias.grad, torch.full((3,), 2.0))


class TestDropIn:
    def test_state_dicts_are_torchs(self) -> None:
        plain, layer = ONCE.plain(), ONCE.layer("lut8x8:ama5")

        assert list(layer.state_dict()) == list(plain.state_dict())
        plain.load_state_dict(layer.state_dict())
        assert list(linear("mitchell").state_dict()) == ["weight", "bias"]

    def test_the_constructors_first_arguments_are_torchs(self) -> None:
        layer = ManualConv2d(4, 6, (3, 2), (2, 1), (1, 0), (1, 2), 2, False, "reflect", "cpu")

        assert (layer.stride, layer.padding, layer.groups) == ((2, 1), (1, 0), 2)
        assert layer.bias is None
        assert layer.padding_mode == "reflect"
        assert ManualLinear(2, 3, False, "cpu", torch.float64).weight.dtype == torch.float64

    def test_copies_and_files_keep_the_settings(self) -> None:
        layer, x = ONCE.layer("lut8x8:drum-4-signed", gradient="local(2)"), ONCE.batch()
        stream = io.BytesIO()
        torch.save(layer, stream)
        stream.seek(0)
        trusted = {"weights_only": False} if torch_compat.torch_version() >= (1, 13) else {}

        for twin in (copy.deepcopy(layer), torch.load(stream, **trusted)):
            assert torch.equal(twin(x), layer(x))
            assert twin.settings == layer.settings

    def test_it_says_what_it_is(self) -> None:
        assert "policy=truncated(5), gradient=local" in repr(
            linear("truncated(5)", gradient="local")
        )


class TestRefusals:
    @pytest.mark.parametrize("policy", ["exact_fp32", "exact_int8"])
    def test_other_dtypes(self, policy: str) -> None:
        layer = linear(policy)

        with pytest.raises(UsageError, match=r"input of torch\.float64, and takes float32"):
            layer(torch.randn(2, 7, dtype=torch.float64))
        with pytest.raises(UsageError, match=r"weight of torch\.float64"):
            layer.double()(torch.randn(2, 7))

    @NEEDS_META
    def test_another_device(self) -> None:
        with pytest.raises(UsageError, match="on cpu got a tensor on meta"):
            linear("exact_fp32")(torch.empty(2, 7, device="meta"))

    @NEEDS_META
    def test_a_device_without_kernels(self) -> None:
        layer = linear("exact_fp32")
        layer.weight = nn.Parameter(torch.empty(5, 7, device="meta"))

        with pytest.raises(NotApplicableError, match="cannot run on meta"):
            layer(torch.empty(2, 7, device="meta"))

    @pytest.mark.parametrize("shape", [(2, 3, 6, 5), (6, 5), (1, 2, 4, 6, 5)])
    def test_another_shape(self, shape: Any) -> None:
        with pytest.raises(UsageError, match=r"takes \[B, 4, H, W\]"):
            ONCE.layer("mitchell")(torch.zeros(shape))

    def test_another_width(self) -> None:
        with pytest.raises(UsageError, match=r"takes \[..., 7\]"):
            linear("mitchell")(torch.zeros(2, 6))

    def test_a_window_larger_than_the_image(self) -> None:
        layer = ManualConv2d(1, 1, 5, policy="mitchell")

        with pytest.raises(UsageError, match="does not fit"):
            layer(torch.zeros(1, 1, 4, 4))

    def test_sums_beyond_32_bits(self) -> None:
        """The largest product of AMA5 is 69,071."""
        layer = ManualLinear(31_092, 1, policy="lut8x8:ama5")

        with pytest.raises(UsageError, match="31092 products of up to 69071"):
            layer(torch.zeros(1, 31_092))

    def test_a_multiplier_that_is_not_there(self) -> None:
        with pytest.raises(UnknownNameError, match="unknown multiplier 'ama6'"):
            linear("lut8x8:ama6")(torch.zeros(1, 7))

    def test_a_path_that_is_not_there(self) -> None:
        with pytest.raises(UnknownNameError):
            linear("exact_int8", path="tables")
        with pytest.raises(NotApplicableError, match="no path 'structured' here"):
            linear("lut8x8:mitchell", path="structured")(torch.zeros(1, 7))

    def test_scales_of_another_format(self) -> None:
        layer = linear("exact_int8")
        layer.scales = Scales(_params(0.05, 3, False))

        with pytest.raises(UsageError, match="takes input codes of 8 bits, signed"):
            layer(torch.zeros(1, 7))
