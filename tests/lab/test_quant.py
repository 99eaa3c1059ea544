"""Ranges, parameters, observers and the preset: against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from narrowgauge_contract.errors import BadValueError, ExitCode, UnknownNameError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.fake import FakeQuantizer, fake_quantize
from narrowgauge_lab.quant.histogram import Histogram
from narrowgauge_lab.quant.observers import OBSERVERS, make_observer
from narrowgauge_lab.quant.parameters import LEAST_SCALE, choose, integer_range
from narrowgauge_lab.quant.presets import narrow_range, narrow_range_weights


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(7)


def extent(low, high):
    return torch.as_tensor(low, dtype=torch.float32), torch.as_tensor(high, dtype=torch.float32)


class TestParameters:
    def test_integers(self):
        assert integer_range(8, True, False) == (-128, 127)
        assert integer_range(8, True, True) == (-127, 127)
        assert integer_range(8, False, False) == (0, 255)
        assert integer_range(4, False, True) == (1, 15)
        assert integer_range(2, True, True) == (-1, 1)
        for bits in (1, 9):
            with pytest.raises(BadValueError):
                integer_range(bits, True, False)

    @pytest.mark.parametrize("bits", [8, 6, 4, 2])
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("narrow", [True, False])
    def test_ends_zero_and_steps(self, bits, symmetric, narrow):
        params = choose(extent(-1.5, 4.0), bits, symmetric, narrow)
        values = torch.tensor([0.0, 4.0, -1.5, 100.0, -100.0])
        q = params.quantize(values)
        assert int(q[0]) == int(params.zero_point)
        assert int(q[1]) == int(q[3]) == params.quant_max
        assert int(q[4]) == params.quant_min
        back = params.dequantize(q)
        assert back[0] == 0
        assert bool(((back - values)[:3].abs() <= params.scale / 2 * (1 + 1e-6)).all()) or symmetric
        assert abs(float(back[1]) - 4.0) <= float(params.scale) / 2 * (1 + 1e-6)
        # And the fused operator gives the very values that the integers stand for.
        x = torch.randn(400) * 3
        assert torch.equal(fake_quantize(x, params), params.dequantize(params.quantize(x)))

    def test_per_channel(self):
        x = torch.randn(3, 5, 4) * torch.tensor([0.1, 1.0, 10.0, 1e3, 0.0]).reshape(1, 5, 1)
        observer = make_observer("min-max", axis=1)
        observer.update(x)
        for symmetric in (True, False):
            params = choose(observer.range(), 8, symmetric, True, axis=1)
            assert params.scale.shape == params.zero_point.shape == (5,)
            assert torch.equal(fake_quantize(x, params), params.dequantize(params.quantize(x)))
            error = (fake_quantize(x, params) - x).abs().amax(dim=(0, 2))
            assert bool((error <= params.scale / 2 * (1 + 1e-5)).all())

    def test_ranges_without_length(self):
        """Zeros stay zeros; one value is told apart from zero."""
        for symmetric in (True, False):
            params = choose(extent(0.0, 0.0), 8, symmetric)
            assert float(params.scale) == 1.0
            assert torch.equal(fake_quantize(torch.zeros(3), params), torch.zeros(3))
            for value in (5.0, -5.0):
                params = choose(extent(value, value), 8, symmetric)
                result = fake_quantize(torch.tensor([value, 0.0]), params)
                assert torch.allclose(result, torch.tensor([value, 0.0]), rtol=0.01)
                assert result[1] == 0

    @pytest.mark.parametrize("size", [1e-45, 1e-38, 1e-30, 1e30, 3e38])
    def test_ranges_of_any_size(self, size):
        params = choose(extent(-size, size), 8, False)
        assert float(params.scale) >= LEAST_SCALE
        assert math.isfinite(1.0 / float(params.scale))
        assert bool(torch.isfinite(fake_quantize(torch.tensor([size, -size]), params)).all())

    @pytest.mark.parametrize("bad", [float("nan"), float("inf")])
    def test_ends_that_are_not_finite(self, bad):
        with pytest.raises(CalibrationError, match="not finite"):
            choose(extent(0.0, bad))

    def test_ends_in_the_wrong_order(self):
        with pytest.raises(BadValueError, match="ends before it begins"):
            choose(extent(1.0, -1.0))

    def test_nan_has_no_integer(self):
        with pytest.raises(CalibrationError, match="NaN"):
            choose(extent(0.0, 1.0)).quantize(torch.tensor([float("nan")]))


def test_straight_through():
    params = choose(extent(-1.0, 1.0), 4)
    x = torch.tensor([0.1, 0.93, 1.5, -1.3, float("nan")], requires_grad=True)
    (grad,) = torch.autograd.grad(fake_quantize(x, params).sum(), x)
    assert grad.tolist() == [1.0, 1.0, 0.0, 0.0, 1.0]


def test_a_quantizer_moves_but_stays_float32():
    module = FakeQuantizer(choose(extent(-0.3, 1.1), 8, False))
    model = nn.Sequential(module).half()
    assert module.scale.dtype == torch.float32
    x = torch.randn(50).half()
    assert torch.equal(model(x), fake_quantize(x, choose(extent(-0.3, 1.1), 8, False)))
    assert set(model.state_dict()) == {"0.scale", "0.zero_point"}
    assert "8 bits, affine, per tensor" in repr(module)


class TestObservers:
    def batches(self):
        return [torch.randn(4, 3, 50) * size for size in (1.0, 3.0, 0.5)]

    @pytest.mark.parametrize("axis", [None, 0, 1])
    def test_min_max(self, axis):
        observer = make_observer("min-max", axis=axis)
        for batch in self.batches():
            observer.update(batch)
        torch.manual_seed(7)
        everything = torch.cat(self.batches(), dim=2)
        rows = everything.reshape(1, -1) if axis is None else everything.transpose(0, axis)
        rows = rows.reshape(rows.shape[0], -1)
        low, high = observer.range()
        assert torch.equal(low.reshape(-1), rows.min(dim=1).values)
        assert torch.equal(high.reshape(-1), rows.max(dim=1).values)
        assert low.dim() == (axis is not None)

    def test_moving_average(self):
        observer = make_observer("moving-average", averaging=0.25)
        for low, high in ((-1.0, 1.0), (-3.0, 2.0), (-1.0, 6.0)):
            observer.update(torch.tensor([low, high]))
        # By hand: -1, -1 + (-3 + 1) / 4 = -1.5, -1.375; 1, 1.25, 2.4375.
        assert [float(end) for end in observer.range()] == [-1.375, 2.4375]

    @pytest.mark.parametrize("percentile", [100.0, 99.5, 90.0])
    def test_percentile(self, percentile):
        observer = make_observer("percentile", percentile=percentile)
        batches = [torch.randn(20000) * size for size in (1.0, 4.0)]
        for batch in batches:
            observer.update(batch)
        values = np.sort(torch.cat(batches).double().numpy())
        width = 4 * np.abs(values).max() / 8192
        low, high = (float(end) for end in observer.range())
        cut = round((100 - percentile) / 100 * 40000)
        assert values[cut] - width <= low <= values[cut]
        assert values[-1 - cut] <= high <= values[-1 - cut] + width
        assert (values < low).sum() <= cut

    @pytest.mark.parametrize("axis", [None, 0])
    @pytest.mark.parametrize("symmetric", [True, False])
    @pytest.mark.parametrize("bits", [8, 4, 2])
    def test_mse_finds_less_error_than_everything_seen(self, axis, symmetric, bits):
        x = torch.randn(3, 4000).pow(3)
        if not symmetric:
            x = x.clamp(min=-0.5)
        errors = {}
        for name in ("min-max", "mse"):
            observer = make_observer(name, axis=axis, bits=bits, symmetric=symmetric)
            observer.update(x)
            params = choose(observer.range(), bits, symmetric, axis=axis)
            errors[name] = float((fake_quantize(x, params) - x).pow(2).mean())
        assert errors["mse"] < errors["min-max"] * (0.9 if bits < 8 else 1.0)

    def test_mse_is_the_best_of_all_symmetric_ends(self):
        x = torch.randn(5000)
        observer = make_observer("mse", bits=4)
        observer.update(x)
        _, best = observer.range()

        def error(end):
            params = choose((-end, end), 4)
            return float((fake_quantize(x, params) - x).pow(2).mean())

        least = min(error(x.abs().max() * share / 100) for share in range(1, 101))
        assert error(best) <= least * 1.001

    def test_entropy_cuts_off_an_outlier_and_keeps_a_uniform_whole(self):
        x = torch.randn(100000)
        x[0] = 30.0
        observer = make_observer("entropy")
        observer.update(x)
        low, high = (float(end) for end in observer.range())
        assert 2.5 < high < 6.0
        assert low == pytest.approx(-high, abs=1.0)
        uniform = make_observer("entropy")
        uniform.update(torch.rand(100000) * 2 - 1)
        assert float(uniform.range()[1]) > 0.97

    def test_entropy_is_not_drawn_to_zero_by_a_relu(self):
        x = torch.randn(100000)
        ends = []
        for values in (x.abs(), torch.where(torch.rand(100000) < 0.9, torch.zeros(()), x.abs())):
            observer = make_observer("entropy", symmetric=False)
            observer.update(values)
            ends.append(float(observer.range()[1]))
        assert ends[1] > 0.7 * ends[0]

    @pytest.mark.parametrize("name", OBSERVERS)
    def test_zeros_and_one_value(self, name):
        for value in (0.0, -2.5):
            observer = make_observer(name, symmetric=False)
            observer.update(torch.full((10,), value))
            low, high = (float(end) for end in observer.range())
            assert low <= value <= high
            assert (low, high) == (value, value) or value

    @pytest.mark.parametrize("name", OBSERVERS)
    @pytest.mark.parametrize(
        ("batch", "message"),
        [
            (torch.empty(0, 3), r"shape \(0, 3\) has no value"),
            (torch.tensor([1.0, float("nan")]), "contains NaN"),
            (torch.tensor([1.0, float("inf")]), "contains infinity"),
            (torch.tensor([float("-inf"), float("nan")]), "contains NaN"),
        ],
        ids=["empty", "NaN", "inf", "both"],
    )
    def test_bad_batches(self, name, batch, message):
        observer = make_observer(name)
        with pytest.raises(CalibrationError, match=message) as caught:
            observer.update(batch)
        assert caught.value.next_step
        assert caught.value.exit_code == ExitCode.DATA_UNAVAILABLE
        with pytest.raises(CalibrationError, match="before the first batch"):
            observer.range()

    def test_bad_arguments(self):
        with pytest.raises(UnknownNameError, match="unknown observer 'minmax'") as caught:
            make_observer("minmax")
        assert "min-max" in caught.value.next_step
        with pytest.raises(BadValueError, match="per tensor"):
            make_observer("entropy", axis=0)
        with pytest.raises(BadValueError):
            make_observer("percentile", percentile=101)
        with pytest.raises(BadValueError):
            make_observer("moving-average", averaging=0.0)
        observer = make_observer("min-max", axis=0)
        observer.update(torch.ones(3, 2))
        with pytest.raises(CalibrationError, match=r"4 channels in dimension 0.* had 3"):
            observer.update(torch.ones(4, 2))

    @settings(max_examples=30, deadline=None)
    @given(
        st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=40),
        st.integers(1, 5),
    )
    def test_a_histogram_that_grew_is_one_that_began_so_wide(self, values, pieces):
        """Whatever the order; no value is lost, and each lies in its bin."""
        x = torch.tensor(values, dtype=torch.float32)
        grown = Histogram(1, 64, x.device)
        for part in x.chunk(pieces):
            grown.add(part[None])
        assert int(grown.counts.sum()) == len(values)
        edges, wide = grown.edges()[0], x.double()
        slack = float(grown.width()) * 1e-9
        for index in range(64) if float(grown.limit) > 0 else ():
            inside = (wide >= edges[index] - slack) & (wide < edges[index + 1] + slack)
            assert int(grown.counts[0, index]) <= int(inside.sum())
        whole = Histogram(1, 64, x.device)
        whole.limit = grown.limit.clone()
        whole.add(x[None])
        assert torch.equal(whole.counts, grown.counts)


def published(x):
    """The formula in numpy, float32 throughout; see presets.py for the source."""
    amax = np.abs(x).max()
    with np.errstate(over="ignore"):
        scale = np.float32(127) / amax
    if amax <= np.float32(1) / np.float32(1 << 24):
        scale = np.float32(0)
    outputs = np.clip(np.rint(x * scale), np.float32(-127), np.float32(127))
    if scale == 0:
        scale = np.float32(1)
    return outputs / scale


#: Of the eight tensors of the published network (weights and biases in turn).
PUBLISHED_AMAX = (
    0.727054, 0.362104, 0.606140, 0.288827, 0.393977, 0.103239, 0.448275, 0.121397
)  # fmt: skip


class TestNarrowRange:
    @pytest.mark.parametrize(
        "amax", [*PUBLISHED_AMAX, 1.0, 3.3e38, 1e30, 1e-6, 2.0**-24, 1.001 * 2**-24, 1e-30, 1e-45]
    )
    def test_the_bits_of_the_published_formula(self, amax):
        generator = np.random.default_rng(int(amax * 1e6) if amax < 1e6 else 3)
        x = (generator.uniform(-1, 1, 20000) * amax).astype(np.float32)
        step = np.float32(amax) / np.float32(127)
        x[:300] = (np.arange(300, dtype=np.float32) - np.float32(150)) / 2 * step
        x = np.clip(x, -np.float32(amax), np.float32(amax))
        x[300:304] = [amax, -0.0, 0.0, -1e-45]
        got = narrow_range(torch.from_numpy(x)).numpy()
        assert np.array_equal(got.view(np.int32), published(x).view(np.int32))
        assert np.signbit(got[301])
        assert not np.signbit(got[302])

    def test_ties_go_to_even(self):
        x = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -126.5])
        assert narrow_range(x).tolist() == [127.0, 0.0, 2.0, 2.0, 0.0, -126.0]

    def test_a_network_biases_included(self):
        model = nn.Sequential(nn.Conv2d(1, 4, 5), nn.BatchNorm2d(4), nn.Linear(4, 3, bias=False))
        new = narrow_range_weights(model)
        for name, tensor in model.state_dict().items():
            other = new.state_dict()[name]
            quantised = name in ("0.weight", "0.bias", "2.weight")
            wanted = narrow_range(tensor) if quantised else tensor
            assert torch.equal(other, wanted)
            assert torch.equal(other, tensor) != quantised

    def test_zeros_empty_and_refusals(self):
        assert torch.equal(narrow_range(torch.zeros(3)), torch.zeros(3))
        assert narrow_range(torch.empty(0)).numel() == 0
        for bad in (float("nan"), float("inf")):
            with pytest.raises(CalibrationError):
                narrow_range(torch.tensor([1.0, bad]))
        with pytest.raises(BadValueError, match="float16"):
            narrow_range(torch.ones(1).half())
