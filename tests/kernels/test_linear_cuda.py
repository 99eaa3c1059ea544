"""`linear` on CUDA: the CPU's checks, and the CPU's bits. Needs a GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

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

from narrowgauge_kernels.linear import linear_mac

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

ops = torch.ops.narrowgauge

#: The machine may be busy, and no fixture here keeps state between examples.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


def everything(x, weight, bias, grad):
    """The result and the three gradients, by the raw operators."""
    return (
        ops.linear(x, weight, bias),
        ops.linear_grad_input(grad, weight),
        ops.linear_grad_weight(grad, x),
        ops.linear_grad_bias(grad),
    )


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_and_gradients_are_those_of_the_reference(shape, dtype):
    """Sizes around the tile's edges; with and without bias."""
    for bias in (True, False):
        check_forward_and_backward(*operands(shape, dtype, "cuda", bias=bias))


@pytest.mark.parametrize("shape", EMPTY_SHAPES, ids=str)
def test_an_empty_sum_is_zero_and_an_empty_result_is_empty(shape):
    """An empty output must not launch: a grid of zero blocks is an error."""
    check_forward_and_backward(*operands(shape, device="cuda"))
    check_forward_and_backward(*operands(shape, device="cuda", bias=False))
    torch.cuda.synchronize()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(shape, dtype):
    """One definition of the sum, two devices, the same bits forward and backward."""
    tensors = operands(shape, dtype)
    on_cuda = everything(*(tensor.cuda() for tensor in tensors))
    for actual, wanted in zip(on_cuda, everything(*tensors)):
        assert same_bits(actual, wanted)


@pytest.mark.parametrize("layout", ["transposed", "strided", "expanded"])
def test_any_strides_are_read_where_they_are(layout):
    """Both directions of the tile loader, and strides that neither favours."""
    rows, depth, columns = 97, 75, 69

    def laid_out(height, width, seed):
        if layout == "transposed":
            return random((width, height), device="cuda", seed=seed).t()
        if layout == "strided":
            return random((2 * height, 3 * width), device="cuda", seed=seed)[::2, ::3]
        return random((1, width), device="cuda", seed=seed).expand(height, width)

    bias = random((3 * columns,), device="cuda", seed=8)[::3]
    check_forward_and_backward(
        laid_out(rows, depth, 5), laid_out(columns, depth, 6), bias, laid_out(rows, columns, 7)
    )


@pytest.mark.parametrize("special", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_infinity_and_overflow_are_those_of_the_cpu(special, dtype):
    """Also in the 16-bit conversions, which are written out in the device code."""
    x, weight, bias, grad = operands(((70,), 19, 67), dtype)
    x[3, 18] = special
    weight[66, 0] = special
    x[5] = torch.finfo(dtype).max
    tensors = (x, weight, bias, grad)
    on_cuda = everything(*(tensor.cuda() for tensor in tensors))
    for actual, wanted in zip(on_cuda, everything(*tensors)):
        assert same_bits(actual, wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value_is_widened_and_rounded_as_on_the_cpu(dtype):
    """All 65,536 patterns, times 1 and times factors after which rounding happens."""
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    x = bits.view(dtype).reshape(-1, 1)
    for factor in (1.0, 1 + 2**-7, 3.0):
        weight = torch.full((1, 1), factor, dtype=dtype)
        assert same_bits(ops.linear(x.cuda(), weight.cuda()), ops.linear(x, weight))


def test_the_current_stream_is_used():
    """Work queued before, on a stream of our own, is seen: there is no hidden default stream."""
    x, weight, bias, _ = operands(((300,), 200, 100), device="cuda")
    expected = ops.linear(x, weight, bias)
    slow = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = torch.mm(slow, slow).clamp(-1, 1)
        late.copy_(x)
        result = ops.linear(late, weight, bias)
    stream.synchronize()
    assert same_bits(result, expected)


def test_a_cuda_graph_captures_it():
    """No allocation outside torch's, no synchronisation, no default stream."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    x, weight, bias, grad = operands(((65,), 33, 70), device="cuda")
    everything(x, weight, bias, grad)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = everything(x, weight, bias, grad)
    x.copy_(random(x.shape, seed=11))
    grad.copy_(random(grad.shape, seed=12))
    graph.replay()
    torch.cuda.synchronize()
    for actual, wanted in zip(captured, everything(x, weight, bias, grad)):
        assert same_bits(actual, wanted)


def test_the_device_of_the_tensors_is_used():
    """Not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = operands(((70,), 19, 67))
    assert torch.cuda.current_device() == 0
    on_second = everything(*(tensor.to("cuda:1") for tensor in tensors))
    assert torch.cuda.current_device() == 0
    for actual, wanted in zip(on_second, everything(*tensors)):
        assert actual.device == torch.device("cuda:1")
        assert same_bits(actual, wanted)


def test_offsets_past_two_to_the_31_elements():
    """64-bit offsets: the last rows of an operand of 2³¹ + 2¹⁶ halves (4 GiB)."""
    depth = 65536
    rows = 2**31 // depth + 1
    if torch.cuda.get_device_properties(0).total_memory < 10 * 2**30:
        pytest.skip("needs 10 GiB of device memory")
    x = torch.zeros(rows, depth, dtype=torch.float16, device="cuda")
    x[-1] = random((depth,), torch.float16, "cuda")
    weight = random((3, depth), torch.float16, "cuda", seed=2)
    result = ops.linear(x, weight)
    assert same_bits(result[-1:], ops.linear(x[-1:].clone(), weight))
    assert not result[:-1].any()


def test_gradcheck():
    """Analytic against numeric gradients, in float64."""
    x, weight, bias, _ = operands(((2, 3), 4, 5), torch.float64, "cuda")
    inputs = [tensor.requires_grad_() for tensor in (x, weight, bias)]
    assert torch.autograd.gradcheck(linear_mac, inputs)


def test_errors_name_both_sides():
    """Devices that disagree, and a CPU instruction set asked of a GPU."""
    x, weight, _, _ = operands(((2,), 3, 4), device="cuda")
    with pytest.raises(RuntimeError, match="weight is on cpu but x is on cuda:0"):
        linear_mac(x, weight.cpu())
    with pytest.raises(RuntimeError, match="weight is on cuda:0 but x is on cpu"):
        linear_mac(x.cpu(), weight)
    with pytest.raises(RuntimeError, match="instruction set of the CPU"):
        ops.linear(x, weight, None, isa="generic")


@settings(max_examples=60, deadline=None, suppress_health_check=UNHURRIED)
@given(
    leading=st.lists(st.integers(0, 9), max_size=3),
    depth=st.integers(0, 70),
    columns=st.integers(0, 70),
    dtype=st.sampled_from(DTYPES),
    bias=st.booleans(),
)
def test_any_small_shape(leading, depth, columns, dtype, bias):
    """Shapes nobody thought of."""
    shape = (tuple(leading), depth, columns)
    check_forward_and_backward(*operands(shape, dtype, "cuda", bias=bias))
