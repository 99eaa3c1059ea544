"""`linear` on the CPU: forward and backward against float64, on every instruction set."""

from __future__ import annotations

import ctypes
import ctypes.util

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import (
    DTYPES,
    EMPTY_SHAPES,
    SHAPES,
    check_forward_and_backward,
    operands,
    random,
    same_bits,
)

from narrowgauge_kernels.linear import LinearMac, linear_mac, linear_mac_ref

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.narrowgauge

#: The machine may be busy, and no fixture here keeps state between examples.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture
def _restore_threads():
    """Whatever a test sets the number of threads to, the next one finds it as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_gradients_are_those_of_the_reference(shape, dtype):
    """Sizes just under, at and over every block edge; with and without bias."""
    for bias in (True, False):
        check_forward_and_backward(*operands(shape, dtype, bias=bias))


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_an_empty_sum_is_zero_and_an_empty_result_is_empty(shape):
    """K = 0 leaves the bias, M = 0 gives zero gradients, N = 0 gives no output."""
    check_forward_and_backward(*operands(shape))
    check_forward_and_backward(*operands(shape, bias=False))


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "offset"])
def test_any_strides_are_read_where_they_are(layout):
    """No operand needs to be contiguous: x, weight, bias and the incoming gradient."""
    rows, depth, columns = 37, 45, 29

    def laid_out(height, width, seed):
        if layout == "transposed":
            return random((width, height), seed=seed).t()
        if layout == "strided":
            return random((2 * height, 3 * width), seed=seed)[::2, ::3]
        if layout == "expanded":
            return random((1, width), seed=seed).expand(height, width)
        return random((height + 2, width + 1), seed=seed)[2:, 1:]

    bias = random((3 * columns,), seed=8)[::3]
    check_forward_and_backward(
        laid_out(rows, depth, 5), laid_out(columns, depth, 6), bias, laid_out(rows, columns, 7)
    )


def test_batches_with_strides_between_them():
    """Leading dimensions that no single stride describes."""
    x = random((4, 6, 11)).transpose(0, 1)
    check_forward_and_backward(x, random((5, 11)), None, random((6, 4, 5)))


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_reach_exactly_the_results_that_use_them(special):
    """Padding inside a block never leaks: only row 3 sees x[3], only column 2 sees weight[2]."""
    x, weight, bias, grad = operands(((17,), 19, 7))
    x[3, 18] = special
    weight[2, 0] = special
    for isa in ops.cpu_instruction_sets():
        result = ops.linear(x, weight, bias, isa=isa)
        touched = torch.zeros(17, 7, dtype=torch.bool)
        touched[3, :] = True
        touched[:, 2] = True
        assert torch.equal(~torch.isfinite(result), touched)
        assert same_bits(
            torch.isnan(result).float(), linear_mac_ref(x, weight, bias).isnan().float()
        )
        assert torch.equal(torch.isfinite(ops.linear_grad_bias(grad, isa=isa)), torch.ones(7) > 0)
        grad_weight = ops.linear_grad_weight(grad, x, isa=isa)
        assert not torch.isfinite(grad_weight[:, 18]).any()
        assert torch.isfinite(grad_weight[:, :18]).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_bits_are_those_of_one_fma_after_the_other(dtype):
    """The definition, step by step, with the C library's fma."""
    libm = ctypes.CDLL(ctypes.util.find_library("m"))
    fma, scalar = (
        (libm.fmaf, ctypes.c_float) if dtype == torch.float32 else (libm.fma, ctypes.c_double)
    )
    fma.restype, fma.argtypes = scalar, [scalar] * 3
    x, weight, bias, _ = operands(((3,), 300, 5), dtype)
    expected = torch.empty(3, 5, dtype=dtype)
    for row, left in enumerate(x.tolist()):
        for column, right in enumerate(weight.tolist()):
            total = 0.0
            for a, b in zip(left, right):
                total = fma(a, b, total)
            expected[row, column] = torch.tensor(total, dtype=dtype) + bias[column]
    for isa in ops.cpu_instruction_sets():
        assert same_bits(ops.linear(x, weight, bias, isa=isa), expected), isa


@pytest.mark.usefixtures("_restore_threads")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_instruction_set_or_threads(dtype):
    """Blocks change with both; sums do not, forward and backward, thrice the same."""
    x, weight, bias, grad = operands(((67,), 261, 70), dtype)

    def everything(isa):
        return (
            ops.linear(x, weight, bias, isa=isa),
            ops.linear_grad_input(grad, weight, isa=isa),
            ops.linear_grad_weight(grad, x, isa=isa),
            ops.linear_grad_bias(grad, isa=isa),
        )

    torch.set_num_threads(1)
    expected = everything("generic")
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        for isa in (*ops.cpu_instruction_sets(), "auto"):
            for actual, wanted in zip(everything(isa), expected):
                assert same_bits(actual, wanted), (isa, threads)


def test_negative_zero_survives():
    """A product that underflows below zero rounds to -0, which a padded step would turn into +0."""
    tiny = torch.full((1, 1), 1e-30)
    for isa in ops.cpu_instruction_sets():
        assert same_bits(ops.linear(tiny, -tiny, None, isa=isa), torch.tensor([[-0.0]])), isa


def test_gradcheck():
    """Analytic against numeric gradients, in float64."""
    x, weight, bias, _ = operands(((2, 3), 4, 5), torch.float64)
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear_mac, inputs)
    assert torch.autograd.gradcheck(linear_mac, (*inputs[:2], None))


@pytest.mark.parametrize("wanted", range(8))
def test_only_wanted_gradients_are_made(wanted):
    """Every subset of x, weight, bias may require a gradient; the others get none."""
    x, weight, bias, grad = operands(((6,), 5, 4))
    tensors = (x, weight, bias)
    for index, tensor in enumerate(tensors):
        tensor.requires_grad_(bool(wanted >> index & 1))
    result = LinearMac.apply(*tensors)
    assert result.requires_grad == bool(wanted)
    if wanted:
        result.backward(grad)
    for tensor in tensors:
        assert (tensor.grad is not None) == tensor.requires_grad


def test_second_derivative_is_refused():
    """The backward pass is compiled code; differentiating it is an error, not a zero."""
    x, weight, _, _ = operands(((2,), 3, 4))
    x.requires_grad_()
    (grad,) = torch.autograd.grad(linear_mac(x, weight).pow(2).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "bias", "message"),
    [
        (random((2, 3)), random((4, 5)), None, r"\[2, 3\].*\[4, 5\].*agree in K"),
        (random((2, 3)), random((4, 3, 1)), None, r"weight has shape \[4, 3, 1\].*\[N, K\]"),
        (random(()), random((4, 3)), None, "x has shape .*1 or more dimensions"),
        (random((2, 3)), random((4, 3)), random((3,)), r"bias has shape \[3\].*bias must be \[N\]"),
        (random((2, 3)), random((4, 3), torch.float64), None, "weight is Double but x is Float"),
        (random((2, 3)), random((4, 3)), random((4,), torch.half), "bias is Half but x is Float"),
        (torch.ones(2, 3).long(), torch.ones(4, 3).long(), None, "x is Long; it must be float32"),
    ],
    ids=["K", "weight rank", "x rank", "bias", "weight dtype", "bias dtype", "integers"],
)
def test_errors_name_both_sides(x, weight, bias, message):
    """A mistake is refused before any arithmetic, with the shapes or dtypes that disagree."""
    with pytest.raises(RuntimeError, match=message):
        linear_mac(x, weight, bias)


def test_gradient_operators_check_too():
    """They are public to other code through torch.ops, so they trust nobody."""
    with pytest.raises(RuntimeError, match="agree in N"):
        ops.linear_grad_input(random((2, 3)), random((4, 5)))
    with pytest.raises(RuntimeError, match="last dimension only"):
        ops.linear_grad_weight(random((2, 3)), random((4, 5)))
    with pytest.raises(RuntimeError, match="x is Double but grad is Float"):
        ops.linear_grad_weight(random((2, 3)), random((2, 3), torch.float64))


def test_unknown_instruction_set_is_refused_with_the_list():
    """Also one that exists elsewhere: there is no silent fallback to a slower path."""
    with pytest.raises(RuntimeError, match=r"no instruction set 'mmx'.*auto, generic"):
        ops.linear(random((2, 3)), random((4, 3)), None, isa="mmx")


@settings(max_examples=60, deadline=None, suppress_health_check=UNHURRIED)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    depth=st.integers(0, 40),
    columns=st.integers(0, 40),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_any_small_shape(leading, depth, columns, dtype, bias):
    """Shapes nobody thought of."""
    check_forward_and_backward(*operands((tuple(leading), depth, columns), dtype, bias=bias))


def test_one_openmp_runtime_in_the_process():
    """Two thread pools would fight for the cores, and torch.set_num_threads steer only one."""
    linear_mac(random((200, 300)), random((200, 300)))
    with open("/proc/self/maps", encoding="ascii", errors="replace") as maps:
        paths = {line.split()[-1] for line in maps if "gomp" in line}
    assert len(paths) == 1, paths


def test_shapes_without_data():
    """The meta device gives the shape, or the error, and computes nothing."""
    try:
        x = torch.empty(2, 7, 3, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device in Python (1.9 or later)")
    weight = torch.empty(4, 3, device="meta")
    grad = torch.empty(2, 7, 4, device="meta")
    assert linear_mac(x, weight).shape == (2, 7, 4)
    assert ops.linear_grad_input(grad, weight).shape == x.shape
    assert ops.linear_grad_weight(grad, x).shape == weight.shape
    assert ops.linear_grad_bias(grad).shape == (4,)
    with pytest.raises(RuntimeError, match="agree in K"):
        linear_mac(x, torch.empty(4, 5, device="meta"))


def test_operators_keep_torchs_rules(monkeypatch, tmp_path):
    """Schema, aliasing and fake tensors, by torch's own check."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which it sets where it is not
    if not hasattr(getattr(torch, "library", None), "opcheck"):
        pytest.skip("this torch has no torch.library.opcheck (2.4 or later)")
    x, weight, bias, grad = operands(((4,), 5, 3))
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.linear.default, (x, weight, bias), test_utils=tests)
    torch.library.opcheck(ops.linear_grad_input.default, (grad, weight), test_utils=tests)
    torch.library.opcheck(ops.linear_grad_weight.default, (grad, x), test_utils=tests)
    torch.library.opcheck(ops.linear_grad_bias.default, (grad,), test_utils=tests)
