"""`fake_quantize` on the CPU: forward and backward, to the bit, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from fake_quantize_cases import (
    CASES,
    DTYPES,
    EMPTY,
    FORMATS,
    check_against_float64,
    check_bits,
    parameters,
    transcription,
    values,
)
from kernel_cases import same_bits

from narrowgauge_kernels.fake_quantize import FakeQuantize, fake_quantize

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.narrowgauge

ONE = (torch.tensor(0.5), torch.tensor(0, dtype=torch.int32))


@pytest.mark.parametrize(("shape", "axis"), CASES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_result_and_gradient_are_the_definitions_to_the_bit(shape, axis, dtype):
    for limits in FORMATS:
        check_bits(values(shape, dtype), *parameters(shape, axis, limits), axis, limits)


@pytest.mark.parametrize(("shape", "axis"), CASES, ids=str)
def test_result_and_gradient_are_those_of_the_float64_reference(shape, axis):
    check_against_float64(shape, axis)


def test_finite_float32_gives_the_bits_of_torchs_own_operators():
    x = values((3, 5, 67))
    scale, zero_point = parameters((5,), 0, (0, 255))
    ours = fake_quantize(x, scale[0], zero_point[0], None, 0, 255)
    theirs = torch.fake_quantize_per_tensor_affine(x, float(scale[0]), int(zero_point[0]), 0, 255)
    assert same_bits(ours, theirs)
    # Before torch 1.9 it takes int64 zero points only, later int32 only.
    old = torch.__version__.startswith("1.8.")
    theirs = torch.fake_quantize_per_channel_affine(
        x, scale, zero_point.long() if old else zero_point, 1, 0, 255
    )
    assert same_bits(fake_quantize(x, scale, zero_point, 1, 0, 255), theirs)


@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "slice", "expanded", "offset"])
def test_any_strides(layout, axis):
    """No order of dimensions is changed; what has gaps or overlaps is gathered."""
    x = values((4, 6, 5, 7))
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.permute(2, 0, 3, 1)
    elif layout == "slice":
        x = x[:, ::2, 1:]
    elif layout == "expanded":
        x = x[:1].expand(4, 6, 5, 7)
    else:
        x = values((841,))[1:].reshape(4, 6, 5, 7)
    result = check_bits(x, *parameters(x.shape, axis), axis)
    dense = layout not in ("slice", "expanded")
    assert result.stride() == (x.stride() if dense else x.contiguous().stride())


def test_a_gradient_of_another_layout():
    x, (scale, zero_point) = values((4, 6, 5, 7)), parameters((6,), 0)
    grad = values((4, 6, 5, 7), seed=3)
    wanted = ops.fake_quantize_grad(grad, x, scale, zero_point, 1, -128, 127)
    turned = grad.contiguous(memory_format=torch.channels_last)
    got = ops.fake_quantize_grad(turned, x, scale, zero_point, 1, -128, 127)
    assert same_bits(got, wanted)
    assert got.stride() == x.stride()


def test_nan_stays_and_is_not_saturated():
    """A NaN must not become a number, nor must its gradient vanish."""
    for isa in ops.cpu_instruction_sets():
        x = torch.full((40,), 3.0)
        x[::3] = float("nan")
        result = ops.fake_quantize(x, *ONE, None, -128, 127, isa=isa)
        assert same_bits(result, x)
        grad = ops.fake_quantize_grad(torch.ones(40), x, *ONE, None, -128, 127, isa=isa)
        assert torch.equal(grad, torch.ones(40))


def test_infinity_and_huge_values_saturate():
    x = torch.tensor([float("inf"), float("-inf"), 3.4e38, -3.4e38, 1e9, 63.5, 63.76, -64.24])
    wanted = torch.tensor([63.5, -64.0, 63.5, -64.0, 63.5, 63.5, 63.5, -64.0])
    passes = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0])
    for isa in ops.cpu_instruction_sets():
        assert same_bits(ops.fake_quantize(x, *ONE, None, -128, 127, isa=isa), wanted)
        grad = ops.fake_quantize_grad(torch.ones(8), x, *ONE, None, -128, 127, isa=isa)
        assert torch.equal(grad, passes)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_even_and_no_zero_is_negative(dtype):
    x = torch.tensor([0.25, 0.75, 1.25, -0.25, -0.75, -1.25, -0.0, -0.1], dtype=dtype)
    wanted = torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0, 0.0, 0.0], dtype=dtype)
    for isa in ops.cpu_instruction_sets():
        assert same_bits(ops.fake_quantize(x, *ONE, None, -128, 127, isa=isa), wanted)


@pytest.mark.parametrize("scale", [2.0**-126, 1e-30, 1e-3, 1.0, 1e30])
def test_scales_of_any_size(scale):
    x = values((4001,)) * scale * 10
    step = torch.tensor(scale)
    check_bits(x, step, torch.tensor(-3, dtype=torch.int32), None)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(dtype):
    """The conversions are written out for each instruction set; torch's are the judge."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype)
    for scale in (2.0**-24, 0.003, 1.0, 700.0):
        step = torch.tensor(scale)
        wanted, saturated = transcription(x, step, ONE[1], None, -128, 127)
        for isa in ops.cpu_instruction_sets():
            result = ops.fake_quantize(x, step, ONE[1], None, -128, 127, isa=isa)
            assert same_bits(result, wanted), (scale, isa)
            grad = ops.fake_quantize_grad(x, x, step, ONE[1], None, -128, 127, isa=isa)
            assert same_bits(grad, torch.where(saturated, torch.zeros_like(x), x)), (scale, isa)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_instruction_set_or_threads(dtype):
    """Pieces begin anywhere in a channel, or in a table; long enough for every thread."""
    threads = torch.get_num_threads()
    try:
        for shape, axis in (((2, 37, 1033), 1), ((3000, 37), 1), ((40, 61, 31), 1)):
            x, grad = values(shape, dtype), values(shape, dtype, seed=4)
            rest = (*parameters(shape, axis), axis, -128, 127)
            torch.set_num_threads(1)
            wanted = ops.fake_quantize(x, *rest, isa="generic")
            wanted_grad = ops.fake_quantize_grad(grad, x, *rest, isa="generic")
            for count in (1, 3):
                torch.set_num_threads(count)
                for isa in (*ops.cpu_instruction_sets(), "auto"):
                    assert same_bits(ops.fake_quantize(x, *rest, isa=isa), wanted)
                    got = ops.fake_quantize_grad(grad, x, *rest, isa=isa)
                    assert same_bits(got, wanted_grad)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize(("shape", "axis"), EMPTY, ids=str)
def test_empty(shape, axis):
    check_bits(values(shape), *parameters(shape, axis), axis)


def test_only_x_has_a_gradient():
    x, scale, zero_point = values((3,)), ONE[0].clone().requires_grad_(), ONE[1]
    result = FakeQuantize.apply(x, scale, zero_point, None, -128, 127)
    result.sum().backward()
    assert scale.grad is None
    leaf = x.requires_grad_()
    (grad,) = torch.autograd.grad(
        fake_quantize(leaf, *ONE, None, -128, 127).pow(2).sum(), leaf, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


FIVE = (torch.ones(5), torch.zeros(5, dtype=torch.int32))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((torch.ones(2).long(), *ONE, None, 0, 1), "x is Long; it must be float32"),
        (
            (torch.ones(2, 4), *FIVE, 1, 0, 1),
            r"scale has shape \[5\] .*along axis 1 it must be \[4",
        ),
        ((torch.ones(2, 5), FIVE[0], ONE[1], 1, 0, 1), r"zero_point has shape \[\]"),
        ((torch.ones(2, 5), *FIVE, None, 0, 1), r"scale has shape \[5\].*must be one number"),
        ((torch.ones(2, 5), *FIVE, 2, 0, 1), r"axis 2 is no dimension of x.*\[2, 5\]"),
        ((torch.ones(2, 5), *FIVE, -1, 0, 1), "axis -1 is no dimension"),
        ((torch.ones(2), ONE[0].double(), ONE[1], None, 0, 1), "scale is Double; it must be Float"),
        ((torch.ones(2), ONE[0], ONE[1].long(), None, 0, 1), "zero_point is Long; it must be Int"),
        ((torch.ones(2), *ONE, None, 1, 0), "the integers from 1 to 0 must be in order"),
        ((torch.ones(2), *ONE, None, 0, 2**24), "within -1048576 to 1048576"),
    ],
    ids=str,
)
def test_errors_name_both_sides(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        fake_quantize(*arguments)


def test_the_gradient_operator_checks_too():
    with pytest.raises(RuntimeError, match=r"grad has shape \[3\] and x has shape \[2\]"):
        ops.fake_quantize_grad(torch.ones(3), torch.ones(2), *ONE, None, 0, 1)
    with pytest.raises(RuntimeError, match="grad is Double but x is Float"):
        ops.fake_quantize_grad(torch.ones(2).double(), torch.ones(2), *ONE, None, 0, 1)
    with pytest.raises(RuntimeError, match=r"no instruction set 'mmx'.*auto, generic"):
        ops.fake_quantize(torch.ones(2), *ONE, None, 0, 1, isa="mmx")


def test_shapes_without_data():
    try:
        x = torch.empty(2, 5, 3, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device in Python (1.9 or later)")
    scale, zero_point = (each.to("meta") for each in FIVE)
    result = ops.fake_quantize(x, scale, zero_point, 1, 0, 1)
    assert (result.shape, result.stride()) == (x.shape, x.stride())
    assert ops.fake_quantize_grad(x, x, scale, zero_point, 1, 0, 1).shape == x.shape
    with pytest.raises(RuntimeError, match="along axis 2"):
        ops.fake_quantize(x, scale, zero_point, 2, 0, 1)


def test_operators_keep_torchs_rules(monkeypatch, tmp_path):
    """Schema, aliasing and fake tensors, by torch's own check."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which it sets where it is not
    if not hasattr(getattr(torch, "library", None), "opcheck"):
        pytest.skip("this torch has no torch.library.opcheck (2.4 or later)")
    tests = ("test_schema", "test_faketensor")
    for x in (values((4, 5, 3)), values((4, 3, 5)).transpose(1, 2), values((4, 5, 6))[:, :, ::2]):
        arguments = (x, *FIVE, 1, -8, 7)
        torch.library.opcheck(ops.fake_quantize.default, arguments, test_utils=tests)
        torch.library.opcheck(ops.fake_quantize_grad.default, (x, *arguments), test_utils=tests)
