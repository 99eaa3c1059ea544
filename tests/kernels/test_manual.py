"""The manual operators of float policies against their references, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import same_bits
from manual_cases import CONVOLUTIONS, EMPTY, MACS, SPECIALS, Case, operands, roundoff_of

from narrowgauge_kernels.mac import Mac, reference
from narrowgauge_kernels.manual import conv2d, conv2d_ref, linear, linear_ref

pytestmark = pytest.mark.usefixtures("kernels")
ops = torch.ops.narrowgauge

EXACT = Mac("exact_fp32")

#: Leading dimensions, depth and columns of linear layers; few rows have kernels of their own.
SHAPES = [
    *[((), 9, 4), ((1,), 300, 17), ((33,), 7, 20), ((2, 3), 261, 5)],
    *[((2,), 37, 33), ((3, 1), 131, 70), ((4,), 6, 65), ((7,), 131, 33)],
]


@pytest.fixture
def _restore_threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def by_isa(x, weight, bias, mac, isa, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    return ops.manual_conv2d(
        x, weight, bias, mac.name, mac.bits, mac.library, stride, padding, dilation, groups, isa=isa
    )


def check(case, mac, x=None):
    """`conv2d` within the rounding of its sums, and to the bit on every instruction set."""
    given_x, weight, bias = operands(case)
    x = given_x if x is None else x
    window = (case.stride, case.padding, case.dilation, case.groups)
    result = conv2d(x, weight, bias, mac, *window)
    wanted = conv2d_ref(x, weight, bias, mac, *window)
    assert result.dtype == torch.float32
    assert result.shape == wanted.shape
    bound = roundoff_of(x, weight, bias, mac, *window)
    assert bool(((result.double() - wanted).abs() <= bound).all())
    for isa in ops.cpu_instruction_sets():
        assert same_bits(by_isa(x, weight, bias, mac, isa, *window), result), isa
    return result


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("case", CONVOLUTIONS, ids=str)
def test_convolutions(case, mac):
    """Odd shapes, strides, paddings, dilations, groups, depthwise, and sums of several blocks."""
    check(case, mac)


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_every_product_of_special_operands(mac):
    """Sums of one term are the reference's products to the bit, save for the sign of zero."""
    values = torch.from_numpy(SPECIALS.copy()).reshape(-1, 1)
    wanted = torch.from_numpy(reference(mac, SPECIALS[:, None], SPECIALS[None, :]))
    for isa in ("auto", *ops.cpu_instruction_sets()):
        got = ops.manual_linear(values, values, None, mac.name, mac.bits, "", isa=isa)
        assert same_bits(got.abs(), wanted.abs()), isa
        nonzero = (wanted != 0) & ~torch.isnan(wanted)
        assert same_bits(got[nonzero], wanted[nonzero]), isa


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_random_products_of_all_exponents(mac):
    """Any 32 bits times any other 32."""
    words = np.random.default_rng(0).integers(0, 2**32, (2, 300), np.uint32).view(np.float32)
    a, b = (torch.from_numpy(each.copy()).reshape(-1, 1) for each in words)
    wanted = torch.from_numpy(reference(mac, words[0][:, None], words[1][None, :]))
    for isa in ops.cpu_instruction_sets():
        got = ops.manual_linear(a, b, None, mac.name, mac.bits, "", isa=isa)
        assert same_bits(got.abs(), wanted.abs()), isa


def layouts(shape):
    """(name, tensor, whether the result is channels_last)."""
    batch, channels, height, width = shape
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5))
    wide = torch.randn(
        (batch, channels, height, 2 * width), generator=torch.Generator().manual_seed(6)
    )
    turned = torch.randn(
        (width, batch, height, channels), generator=torch.Generator().manual_seed(7)
    )
    return (
        ("channels_last", x.contiguous(memory_format=torch.channels_last), True),
        ("sliced", wide[..., ::2], False),
        ("transposed", turned.permute(1, 3, 2, 0), None),
        ("expanded", x[:1].expand(shape), False),
    )


@pytest.mark.parametrize("mac", [EXACT, Mac("axfpm_faithful")], ids=str)
@pytest.mark.parametrize("layout", range(4))
def test_layouts(layout, mac):
    """Strided inputs give the bits of the contiguous one; channels_last stays."""
    case = Case((3, 6, 11, 13), (8, 3, 3, 3), (2, 1), (1, 1), (1, 1), 2)
    _, x, last = layouts(case.x)[layout]
    result = check(case, mac, x)
    _, weight, bias = operands(case)
    window = (case.stride, case.padding, case.dilation, case.groups)
    assert same_bits(conv2d(x.contiguous(), weight, bias, mac, *window), result)
    turned = weight.transpose(2, 3).contiguous().transpose(2, 3)
    assert same_bits(conv2d(x, turned, bias, mac, *window), result)
    if last is not None:
        memory_format = torch.channels_last if last else torch.contiguous_format
        assert result.is_contiguous(memory_format=memory_format)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty(case):
    """No image, no filter: nothing. No channel: sums of nothing, so the bias."""
    for mac in (EXACT, Mac("mitchell")):
        x, weight, bias = operands(case)
        result = conv2d(x, weight, bias, mac, case.stride, case.padding, case.dilation, case.groups)
        assert result.shape[0] == case.x[0]
        assert result.shape[1] == case.weight[0]
        assert torch.equal(result, bias.reshape(1, -1, 1, 1).expand_as(result))


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_linear(shape, mac):
    """Leading dimensions of every number, and depths of more than a block."""
    leading, depth, columns = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((*leading, depth), generator=generator)
    weight = torch.randn((depth, columns), generator=generator).t()
    bias = torch.randn((columns,), generator=generator)
    result = linear(x, weight, bias, mac)
    wanted = linear_ref(x, weight, bias, mac)
    scale = linear_ref(x.abs(), weight.abs(), bias.abs(), mac)
    assert result.shape == wanted.shape
    assert bool(((result.double() - wanted).abs() <= (depth + 2) * 2.0**-23 * scale).all())
    for isa in ops.cpu_instruction_sets():
        got = ops.manual_linear(x, weight, bias, mac.name, mac.bits, "", isa=isa)
        assert same_bits(got, result), isa


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_infinities_of_both_signs_are_nan_together(mac):
    """In the layer and in what it is held against, which says so without a warning."""
    x = torch.tensor([[float("inf"), 1.0], [float("inf"), float("-inf")]])
    weight = torch.tensor([[1.0, 1.0]])
    wanted = linear_ref(x, weight, None, mac)
    assert wanted[0] == float("inf")
    assert torch.isnan(wanted[1])
    assert torch.equal(torch.isnan(linear(x, weight, None, mac)), torch.isnan(wanted))


def test_linear_empty():
    """An empty sum is the bias."""
    bias = torch.randn(3)
    assert torch.equal(linear(torch.ones(4, 0), torch.ones(3, 0), bias, EXACT), bias.expand(4, 3))
    assert linear(torch.ones(0, 5), torch.ones(3, 5), bias, EXACT).shape == (0, 3)
    assert linear(torch.ones(4, 5), torch.ones(0, 5), None, EXACT).shape == (4, 0)


def test_linear_rows_that_no_stride_describes():
    """Transposed leading dimensions."""
    x = torch.randn(4, 6, 11).transpose(0, 1)
    weight = torch.randn(5, 11)
    result = linear(x, weight, None, Mac("axbf16"))
    assert same_bits(result, linear(x.contiguous(), weight, None, Mac("axbf16")))


@pytest.mark.parametrize("case", CONVOLUTIONS[:6], ids=str)
def test_exact_is_torchs_convolution(case):
    """Within 1e-5 of torch's own in float64."""
    x, weight, bias = operands(case)
    window = (case.stride, case.padding, case.dilation, case.groups)
    wanted = torch.nn.functional.conv2d(x.double(), weight.double(), bias.double(), *window)
    got = conv2d(x, weight, bias, EXACT, *window).double()
    assert torch.allclose(got, wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_special_pixels_touch_only_their_results(mac):
    """A NaN reaches the pixels whose kernel covers it, and no surplus lane leaks."""
    x = torch.randn((2, 3, 9, 10), generator=torch.Generator().manual_seed(3))
    weight = torch.randn((7, 3, 3, 3), generator=torch.Generator().manual_seed(4))
    x[1, 2, 4, 5] = float("nan")
    for isa in ops.cpu_instruction_sets():
        result = by_isa(x, weight, None, mac, isa, padding=(1, 1))
        touched = torch.zeros_like(result, dtype=torch.bool)
        touched[1, :, 3:6, 4:7] = True
        assert torch.equal(torch.isnan(result), touched), isa


@pytest.mark.usefixtures("_restore_threads")
@pytest.mark.parametrize("mac", MACS, ids=str)
def test_bits_do_not_depend_on_threads(mac):
    """Blocks change with their number; sums do not."""
    case = Case((2, 16, 20, 21), (40, 16, 3, 3), (1, 1), (1, 1), (1, 1), 1)
    x, weight, bias = operands(case)
    torch.set_num_threads(1)
    wanted = conv2d(x, weight, bias, mac, 1, 1)
    for threads in (2, 3, 7):
        torch.set_num_threads(threads)
        assert same_bits(conv2d(x, weight, bias, mac, 1, 1), wanted), threads


def test_weights_of_several_passes():
    """More packed weights than 32 MiB: filters by passes, then groups by passes."""
    generator = torch.Generator().manual_seed(8)
    x = torch.randn((2, 9000), generator=generator)
    weight = torch.randn((1000, 9000), generator=generator)
    got = linear(x, weight, None, EXACT).double()
    assert torch.allclose(got, x.double() @ weight.double().t(), rtol=1e-4, atol=1e-2)
    x, weight = x.reshape(1, 18000, 1, 1), weight.reshape(-1, 4500, 1, 1)[:1400]
    got = conv2d(x[:, :9000], weight[:700], None, Mac("axbf16"), groups=2)
    half = conv2d(x[:, 4500:9000], weight[350:700], None, Mac("axbf16"))
    assert same_bits(got[:, 350:], half)


def test_results_require_no_gradient():
    """The layers have their own backward passes."""
    x, weight = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    assert not linear(x, weight, None, EXACT).requires_grad


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_any_small_convolution(data):
    """Shapes nobody thought of."""
    draw = data.draw
    groups = draw(st.integers(1, 3))
    channels, filters = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    stride = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    size = [
        draw(st.integers(max(1, dilation[i] * (kernel[i] - 1) + 1 - 2 * padding[i]), 14))
        for i in (0, 1)
    ]
    x = (draw(st.integers(1, 3)), groups * channels, *size)
    case = Case(x, (groups * filters, channels, *kernel), stride, padding, dilation, groups)
    check(case, draw(st.sampled_from(MACS)))


X, W = torch.ones(1, 4, 5, 5), torch.ones(6, 4, 3, 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: conv2d(X, W[:, :3], None, EXACT), r"\[1, 4, 5, 5\].*\[6, 3, 3, 3\].*groups is 1"),
        (lambda: conv2d(X, W[:5, :2], None, EXACT, groups=2), "divide into groups"),
        (lambda: conv2d(X[0], W, None, EXACT), "x has shape .*needs 4 dimensions"),
        (lambda: conv2d(X.double(), W, None, EXACT), "x is Double; it must be float32"),
        (lambda: conv2d(X, W.half(), None, EXACT), "weight is Half; it must be float32"),
        (lambda: conv2d(X, W, torch.ones(5), EXACT), r"bias has shape \[5\] but there are 6"),
        (lambda: conv2d(X, W, None, EXACT, stride=0), "stride is 0; it must be from 1"),
        (lambda: conv2d(X, W, None, EXACT, padding=-1), "padding is -1"),
        (lambda: conv2d(X, W, None, EXACT, dilation=3), "covers 7 pixels of the padded 5"),
        (lambda: conv2d(X, W, None, EXACT, padding=2**40), "must be from 0 to 2147483647"),
        (lambda: conv2d(X, W, None, EXACT, groups=0), "groups is 0"),
        (lambda: conv2d(X, W, None, Mac("exact_int8")), "no MAC policy 'exact_int8' for float32"),
        (lambda: by_isa(X, W, None, EXACT, "mmx"), "no instruction set 'mmx'"),
        (lambda: linear(torch.ones(2, 3), torch.ones(4, 5), None, EXACT), "agree in K"),
        (lambda: linear(torch.ones(()), torch.ones(4, 5), None, EXACT), "x has no dimension"),
        (
            lambda: linear(
                torch.ones(2, 5), torch.ones(4, 5), None, Mac("custom", library="no.so")
            ),
            "the compiled functor does not load: no.so",
        ),
    ],
)
def test_errors_name_both_sides(call, message):
    """A mistake is refused before any arithmetic."""
    with pytest.raises(RuntimeError, match=message):
        call()


def test_shapes_without_data():
    """The meta device gives the shape, or the error, and computes nothing."""
    try:
        x = torch.empty(2, 6, 9, 9, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device in Python (1.9 or later)")
    weight = torch.empty(4, 3, 3, 3, device="meta")
    assert conv2d(x, weight, None, EXACT, 2, 1, 1, 2).shape == (2, 4, 5, 5)
    assert linear(x, torch.empty(5, 9, device="meta"), None, EXACT).shape == (2, 6, 9, 5)


def test_operators_keep_torchs_rules(monkeypatch, tmp_path):
    """Schema, aliasing and fake tensors, by torch's own check."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which it sets where it is not
    if not hasattr(getattr(torch, "library", None), "opcheck"):
        pytest.skip("this torch has no torch.library.opcheck (2.4 or later)")
    tests = ("test_schema", "test_faketensor")
    window = ([1, 1], [1, 1], [1, 1], 1)
    torch.library.opcheck(
        ops.manual_conv2d.default, (X, W, None, "mitchell", 0, "", *window), test_utils=tests
    )
    torch.library.opcheck(
        ops.manual_linear.default,
        (torch.ones(2, 3), torch.ones(4, 3), None, "truncated", 5, ""),
        test_utils=tests,
    )
