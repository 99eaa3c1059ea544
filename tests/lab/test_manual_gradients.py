"""Manual layers, backward: straight-through and local gradients."""

from __future__ import annotations

import copy
from typing import Any, Tuple

import numpy as np
import pytest
import torch
from manual_layer_cases import (
    FLOATS,
    SHAPES,
    Shape,
    differences,
    filters,
    linear,
    unfolded,
)
from torch import nn
from torch.nn import functional

from narrowgauge_kernels.mac import reference
from narrowgauge_lab.layers.manual import dispatch, float_slopes
from narrowgauge_lab.layers.manual.gradients import slopes_of
from narrowgauge_lab.layers.manual.modules import ManualConv2d
from narrowgauge_lab.layers.manual.multiplier import multiplier_of
from narrowgauge_lab.layers.manual.policies import parse_policy
from narrowgauge_lab.layers.manual.quantise import Scales, coded_input, coded_weight
from narrowgauge_lab.multipliers.families import named
from narrowgauge_lab.quant.parameters import QuantParams

CPU = torch.device("cpu")
ALL = slice(0, 256)


def _close(result: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> bool:
    return bool(((result.double() - expected).abs() <= share * expected.abs().max()).all())


def _gradients(layer: Any, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """By input, weight and bias, of Σ grad · layer(x), and that grad."""
    x = x.clone().requires_grad_(True)
    result = layer(x)
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(5))
    wanted = [x, layer.weight, layer.bias]
    return (*torch.autograd.grad(result, wanted, grad.to(result.dtype)), grad)


def _gradients_of(layer: Any, x: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    with torch.enable_grad():
        return _gradients(layer, x)


def _plain(layer: Any, x: torch.Tensor, weight: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    """Of the exact layer in float64, at these values."""
    twin = copy.deepcopy(layer).double()
    twin.__class__ = nn.Conv2d if isinstance(layer, nn.Conv2d) else nn.Linear
    with torch.no_grad():
        twin.weight.copy_(weight)
    return _gradients(twin, x.double())[:3]


class TestStraightThrough:
    @pytest.mark.parametrize("policy", FLOATS)
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_a_float_layer_has_the_exact_layers(self, shape: Shape, policy: str) -> None:
        layer, x = shape.layer(policy), shape.batch()

        expected = _plain(layer, x, layer.weight)

        for ours, theirs in zip(_gradients(layer, x), expected):
            assert _close(ours, theirs)

    @pytest.mark.parametrize("policy", ["exact_int8", "lut8x8:ama5", "lut8x8:drum-4-signed"])
    @pytest.mark.parametrize("shape", SHAPES, ids=str)
    def test_a_layer_of_codes_has_that_of_what_they_stand_for(
        self, shape: Shape, policy: str
    ) -> None:
        layer, x = shape.layer(policy), shape.batch()
        form = multiplier_of(parse_policy(policy)).form(True)
        image = coded_input(x, form, None, differentiated=False).values()
        weight = coded_weight(layer.weight.detach(), form, None, differentiated=False).values()

        expected = _plain(layer, image, weight)

        for ours, theirs in zip(_gradients(layer, x), expected):
            assert _close(ours, theirs)

    @pytest.mark.filterwarnings("ignore:Input #")
    @pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[3]], ids=str)
    def test_gradcheck(self, shape: Shape) -> None:
        """The layer is linear in each operand: a wide step costs no precision."""
        layer, x = shape.layer("exact_fp32"), shape.batch()[:1, :, :5, :5].requires_grad_(True)

        def function(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            twin = copy.copy(layer)
            twin._parameters = {"weight": weight, "bias": bias}  # type: ignore[assignment]
            return twin(x)

        operands = (x, layer.weight, layer.bias)
        assert torch.autograd.gradcheck(function, operands, eps=0.25, atol=1e-4, rtol=1e-4)

    def test_a_linear_layer_of_many_rows(self) -> None:
        layer, x = linear("mitchell"), torch.randn(2, 3, 7)

        for ours, theirs in zip(_gradients(layer, x), _plain(layer, x, layer.weight)):
            assert _close(ours, theirs)

    def test_only_what_is_asked_for_is_computed_and_kept(self) -> None:
        layer, x = SHAPES[0].layer("exact_int8"), SHAPES[0].batch()
        for parameter in layer.parameters():
            parameter.requires_grad_(False)

        assert not layer(x).requires_grad
        (by_input,) = torch.autograd.grad(layer(x.requires_grad_(True)).sum(), [x])
        assert by_input.shape == x.shape

    def test_what_saturates_has_none(self) -> None:
        layer, x = SHAPES[0].layer("exact_int8"), SHAPES[0].batch()
        narrow = QuantParams(torch.tensor(0.004), torch.tensor(0), 8, None, True, False)
        layer.scales = Scales(narrow)

        by_input = _gradients(layer, x)[0]

        saturated = (x / 0.004).round().clamp(-128, 127) != (x / 0.004).round()
        assert 0 < int(saturated.sum()) < x.numel()
        assert not bool(by_input[saturated].any())
        assert bool(by_input[~saturated].all())

    def test_it_is_differentiable_once(self) -> None:
        layer, x = SHAPES[0].layer("mitchell"), SHAPES[0].batch().requires_grad_(True)
        (grad,) = torch.autograd.grad(layer(x).square().sum(), [x], create_graph=True)

        with pytest.raises(RuntimeError, match="once_differentiable"):
            grad.sum().backward()


def _whole(signed: bool, zero: int) -> QuantParams:
    """A scale of 1: values are codes."""
    return QuantParams(
        torch.tensor(1.0), torch.tensor(zero, dtype=torch.int32), 8, None, signed, False
    )


class TestLocalOfTables:
    """Where a scale is 1, a step of a value by 1 is a step of its code."""

    @pytest.mark.parametrize(
        ("name", "shape"),
        [("ama5", SHAPES[0]), ("drum-4-signed", SHAPES[3]),
         *(pytest.param(name, shape, marks=pytest.mark.slow) for name, shape in (
             ("ama5", SHAPES[3]), ("ama5-signed", SHAPES[1]), ("mitchell", SHAPES[1]),
             ("mitchell-signed", SHAPES[3]), ("exact", SHAPES[3]),
         ))],
        ids=str,
    )  # fmt: skip
    def test_it_is_the_finite_difference_of_the_layer(self, name: str, shape: Shape) -> None:
        signed, generator = name.endswith("signed"), torch.Generator().manual_seed(3)
        layer = shape.layer(f"lut8x8:{name}", gradient="local")
        zeros = (0, 0) if signed else (60, 128)
        layer.scales = Scales(_whole(signed, zeros[0]), _whole(signed, zeros[1]))
        x = torch.randint(-59, 60, (1, shape.image[1], 4, 4), generator=generator).float()
        with torch.no_grad():
            layer.weight.copy_(
                torch.randint(-120, 120, layer.weight.shape, generator=generator).float()
            )
            by_input, by_weight, _, grad = _gradients_of(layer, x)

            every = range(x.numel())
            expected = differences(lambda many: layer(many.flatten(0, 1)), x, grad, every)
            assert _close(by_input.flatten(), expected, 1e-4)

            weight = layer.weight.clone()

            def of_weights(many: torch.Tensor) -> torch.Tensor:
                results = []
                for each in many:
                    layer.weight.copy_(each)
                    results.append(layer(x))
                return torch.stack(results)

            some = range(0, weight.numel(), 5)
            expected = differences(of_weights, weight, grad, some)
            assert _close(by_weight.flatten()[some], expected, 1e-4)

    @pytest.mark.parametrize("policy", ["exact_int8", "lut8x8:exact"])
    def test_an_exact_tables_is_straight_through(self, policy: str) -> None:
        for shape in (SHAPES[1], SHAPES[3]):
            local, straight = shape.layer(policy, gradient="local"), shape.layer(policy)
            x = shape.batch()

            for ours, theirs in zip(_gradients(local, x), _gradients(straight, x)):
                assert _close(ours, theirs.double(), 1e-4)

    def test_a_linear_layers_is_its_convolutions(self) -> None:
        layer, x = linear("lut8x8:mitchell", gradient="local(4)"), torch.randn(6, 7)
        twin = ManualConv2d(7, 5, 1, policy="lut8x8:mitchell", gradient="local(4)")
        twin.load_state_dict({"weight": layer.weight[..., None, None], "bias": layer.bias})

        pairs = zip(_gradients(layer, x)[:3], _gradients(twin, x[..., None, None])[:3])
        for ours, theirs in pairs:
            assert _close(ours, theirs.reshape(ours.shape).double(), 1e-4)

    @pytest.mark.parametrize("window", [1, 7])
    def test_slopes_are_differences_to_both_sides(self, window: int) -> None:
        table = named("mitchell").values
        slopes = slopes_of(table, window, (ALL, ALL))
        found = slopes.by_input.rows.T.astype(np.float64) @ slopes.by_input.columns

        for code in (0, 3, 100, 255):
            low, high = max(code - window, 0), min(code + window, 255)
            expected = (table[high].astype(float) - table[low]) / (high - low)
            assert np.abs(found[code] - expected).max() <= 1e-4

    def test_codes_that_operands_have_not_stay_out(self) -> None:
        table = np.arange(256)[:, None] * np.arange(256)[None] ** 2
        slopes = slopes_of(table, 2, (slice(0, 16), slice(0, 16)))

        found = slopes.by_weight.rows.T.astype(np.float64) @ slopes.by_weight.columns

        assert np.allclose(found[5, 15], 5 * (15**2 - 13**2) / 2, rtol=1e-5)
        assert not found[16:].any()
        assert not found[:, 16:].any()

    def test_as_many_products_as_the_table_has_terms(self) -> None:
        ranks = [
            slopes_of(named(name).values, 1, (ALL, ALL)).by_input.rank
            for name in ("exact", "ama5", "mitchell")
        ]

        assert ranks[:2] == [1, 2]
        assert ranks[2] > 8

    def test_a_table_of_zeros_has_no_slope(self) -> None:
        slopes = slopes_of(np.zeros((256, 256), np.int32), 1, (ALL, ALL))

        assert (slopes.by_input.rank, slopes.by_weight.rank) == (0, 0)


class TestLocalOfFloats:
    @pytest.mark.parametrize("policy", FLOATS[1:])
    @pytest.mark.parametrize("shape", SHAPES[:-1], ids=str)
    def test_it_is_the_slope_of_every_product(self, shape: Shape, policy: str) -> None:
        layer, x = shape.layer(policy, gradient="local"), shape.batch()
        mac = dispatch.layer_for(layer.settings, None, CPU, 1).mac
        by_input, by_weight, _, grad = _gradients(layer, x)
        columns = unfolded(x.numpy(), layer, 0.0)
        weight = filters(layer.weight.detach().numpy(), layer.groups)
        above = grad.numpy().reshape(len(x), layer.groups, -1, 1, columns.shape[-1])

        low, high = (each.numpy() for each in float_slopes.around(torch.from_numpy(columns)))
        rise = reference(mac, high, weight).astype(float) - reference(mac, low, weight)
        slopes = (rise / (high.astype(float) - low) * above).sum(2)
        expected = functional.fold(
            torch.from_numpy(slopes.reshape(len(x), -1, columns.shape[-1])), x.shape[2:],
            layer.kernel_size, layer.dilation, layer.padding, layer.stride,
        )  # fmt: skip
        assert _close(by_input, expected)

        low, high = (each.numpy() for each in float_slopes.around(torch.from_numpy(weight)))
        rise = reference(mac, columns, high).astype(float) - reference(mac, columns, low)
        expected = (rise / (high.astype(float) - low) * above).sum((0, 4))
        assert _close(by_weight, torch.from_numpy(expected).reshape(layer.weight.shape))

    def test_an_exact_layers_is_straight_through(self) -> None:
        shape = SHAPES[0]
        local, straight = shape.layer("exact_fp32", gradient="local"), shape.layer("exact_fp32")

        for ours, theirs in zip(
            _gradients(local, shape.batch()), _gradients(straight, shape.batch())
        ):
            assert torch.equal(ours, theirs)
        truncated = shape.layer("truncated(23)", gradient="local")
        for ours, theirs in zip(
            _gradients(truncated, shape.batch()), _gradients(straight, shape.batch())
        ):
            assert _close(ours, theirs.double(), 1e-4)

    def test_parts_of_the_work_add_up(self, monkeypatch: pytest.MonkeyPatch) -> None:
        layer, x = SHAPES[3].layer("mitchell", gradient="local"), SHAPES[3].batch()
        whole = _gradients(layer, x)
        monkeypatch.setattr(float_slopes, "_HELD", 500)

        for ours, theirs in zip(_gradients(layer, x), whole):
            assert _close(ours, theirs.double())

    def test_a_linear_layers_is_its_convolutions(self) -> None:
        layer, x = linear("axfpm", gradient="local"), torch.randn(6, 7)
        twin = ManualConv2d(7, 5, 1, policy="axfpm", gradient="local")
        twin.load_state_dict({"weight": layer.weight[..., None, None], "bias": layer.bias})

        pairs = zip(_gradients(layer, x)[:3], _gradients(twin, x[..., None, None])[:3])
        for ours, theirs in pairs:
            assert _close(ours, theirs.reshape(ours.shape).double())

    def test_a_zero_has_the_slope_next_to_it(self) -> None:
        layer = linear("truncated(7)", gradient="local")
        by_input = _gradients(layer, torch.zeros(2, 7))[0]

        assert bool(by_input.all())
        assert bool(torch.isfinite(by_input).all())
