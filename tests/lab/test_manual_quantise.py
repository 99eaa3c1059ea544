"""Codes and scales of manual layers' operands."""

from __future__ import annotations

import pytest
import torch

from narrowgauge_lab.layers.manual.quantise import Format, coded_input, coded_weight
from narrowgauge_lab.quant.parameters import QuantParams, choose, parameters_of

SIGNED, UNSIGNED = Format(True, True), Format(False, False)
EVERY = [
    Format(signed, signed, per_channel, bits)
    for signed in (True, False)
    for per_channel in (True, False)
    for bits in (8, 4)
]


def _image() -> torch.Tensor:
    return torch.randn(3, 4, 5, 6, generator=torch.Generator().manual_seed(0)) + 0.3


class TestOfTheMoment:
    @pytest.mark.parametrize("form", EVERY, ids=str)
    def test_an_inputs_are_quants(self, form: Format) -> None:
        x = _image()
        params = choose((x.min(), x.max()), form.bits, form.input_signed)

        coded = coded_input(x, form, None, differentiated=True)

        assert torch.equal(coded.codes.int(), params.quantize(x))
        assert torch.equal(coded.scale, params.scale)
        assert torch.equal(coded.zero, params.zero_point)
        assert coded.inside is None
        assert bool(((coded.values() - x).abs() <= 0.5001 * coded.scale).all())

    @pytest.mark.parametrize("form", EVERY, ids=str)
    def test_a_weights_are_by_its_first_dimension(self, form: Format) -> None:
        weight = _image() * torch.tensor([1.0, 10.0, 0.1]).reshape(3, 1, 1, 1)
        coded = coded_weight(weight, form, None, differentiated=True)

        assert coded.scale.shape == ((3,) if form.per_channel else ())
        assert bool(((coded.values() - weight).abs() <= 0.5001 * coded.along(coded.scale)).all())
        lowest = {True: 1 - 2 ** (form.bits - 1), False: 0}[form.weight_signed]
        assert int(coded.codes.min()) >= lowest
        params = choose(
            (weight.min(), weight.max()), form.bits, form.weight_signed, form.weight_signed
        )
        if not form.per_channel:
            assert torch.equal(coded.codes.int(), params.quantize(weight))

    @pytest.mark.parametrize("form", [SIGNED, UNSIGNED], ids=str)
    def test_any_strides_give_the_same(self, form: Format) -> None:
        x, wide = _image(), torch.zeros(3, 4, 5, 12)
        wide[..., 1::2] = x
        expected = coded_input(x, form, None, differentiated=False)

        last = coded_input(
            x.contiguous(memory_format=torch.channels_last), form, None, differentiated=False
        )
        gaps = coded_input(wide[..., 1::2], form, None, differentiated=False)
        part = coded_input(torch.cat([x, x])[3:], form, None, differentiated=False)

        assert last.codes.is_contiguous(memory_format=torch.channels_last)
        for each in (last, gaps, part):
            assert torch.equal(each.codes, expected.codes)
            assert torch.equal(each.scale, expected.scale)

    def test_zero_has_a_code_of_its_own(self) -> None:
        x = _image()
        x[0, 0, 0, 0] = 0

        coded = coded_input(x, UNSIGNED, None, differentiated=False)

        assert int(coded.codes[0, 0, 0, 0]) == int(coded.zero) > 0

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
    @pytest.mark.parametrize("form", EVERY, ids=str)
    def test_what_is_not_finite_takes_its_channels_scale(self, form: Format, value: float) -> None:
        weight = _image()
        weight[1, 2, 3, 4] = value

        lost = torch.isnan(coded_weight(weight, form, None, differentiated=False).scale)

        assert lost.tolist() == ([False, True, False] if form.per_channel else True)
        scale = coded_input(weight, form, None, differentiated=False).scale
        assert bool(torch.isnan(scale))


class TestParametersOf:
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_finite_ranges_are_as_chosen(self, symmetric: bool) -> None:
        low, high = torch.tensor([-3.0, 0.0, 1.0, 0.0]), torch.tensor([2.0, 0.0, 4.0, 1e-45])

        ours = parameters_of((low, high), 8, symmetric, False, 0)
        theirs = choose((low, high), 8, symmetric, False, 0)

        assert torch.equal(ours.scale, theirs.scale)
        assert torch.equal(ours.zero_point, theirs.zero_point)

    def test_others_have_no_scale(self) -> None:
        low = torch.tensor([float("nan"), -float("inf"), -1.0])
        params = parameters_of((low, torch.ones(3)), 8, symmetric=False, narrow=False, axis=0)

        assert torch.isnan(params.scale).tolist() == [True, True, False]
        assert params.zero_point.tolist()[:2] == [0, 0]


class TestCodes:
    @pytest.mark.parametrize("symmetric", [True, False])
    def test_they_are_the_integers_in_a_byte(self, symmetric: bool) -> None:
        params = QuantParams(
            torch.tensor(0.05), torch.tensor(0 if symmetric else 77, dtype=torch.int32), 8, None,
            symmetric, False,
        )  # fmt: skip
        x = 20 * _image()

        codes = params.codes(x)

        assert codes.dtype == (torch.int8 if symmetric else torch.uint8)
        assert torch.equal(codes.int(), params.quantize(x))
        saturated = (codes.int() == params.quant_min) | (codes.int() == params.quant_max)
        assert not bool((~params.inside(x) & ~saturated).any())
        assert 0 < int(params.inside(x).sum()) < x.numel()
