"""`fake_quantize` on CUDA: the CPU's checks, and the CPU's bits. Needs a GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

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
    values,
)
from kernel_cases import same_bits

from narrowgauge_kernels.fake_quantize import fake_quantize

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

ops = torch.ops.narrowgauge

#: As CASES, and large enough for several blocks of each kernel, with and without a rest.
LARGE = (
    ((4097, 1031), None),
    ((16, 64, 56, 56), 1),
    ((16, 65, 7, 7), 1),
    ((512, 256, 3, 3), 0),
    ((5000, 520), 1),
    ((700, 8), 1),
)


@pytest.mark.parametrize(("shape", "axis"), [*CASES, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(shape, axis, dtype):
    """Forward and backward; the CPU's are those of the definition."""
    for limits in FORMATS[:: 1 if len(shape) < 2 else 3]:
        x, grad = values(shape, dtype), values(shape, dtype, seed=2)
        rest = (*parameters(shape, axis, limits), axis, *limits)
        moved = (rest[0].cuda(), rest[1].cuda(), *rest[2:])
        assert same_bits(ops.fake_quantize(x.cuda(), *moved), ops.fake_quantize(x, *rest))
        assert same_bits(
            ops.fake_quantize_grad(grad.cuda(), x.cuda(), *moved),
            ops.fake_quantize_grad(grad, x, *rest),
        )


@pytest.mark.parametrize(("shape", "axis"), CASES, ids=str)
def test_result_and_gradient_are_those_of_the_float64_reference(shape, axis):
    check_against_float64(shape, axis, "cuda")


@pytest.mark.parametrize("axis", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["channels_last", "transposed", "slice", "expanded", "offset"])
def test_any_strides(layout, dtype, axis):
    """Also a pointer that is not aligned to 16 bytes."""
    x = values((4, 16, 5, 7), dtype, "cuda")
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "transposed":
        x = x.permute(2, 0, 3, 1)
    elif layout == "slice":
        x = x[:, ::2, 1:]
    elif layout == "expanded":
        x = x[:1].expand(4, 16, 5, 7)
    else:
        x = values((2241,), dtype, "cuda")[1:].reshape(4, 16, 5, 7)
    result = check_bits(x, *parameters(x.shape, axis, device="cuda"), axis)
    dense = layout not in ("slice", "expanded")
    assert result.stride() == (x.stride() if dense else x.contiguous().stride())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_nan_and_infinity_are_those_of_the_cpu(axis, dtype):
    x = values((70, 64), dtype)
    x[3, ::2], x[5, 1:], x[6] = float("nan"), float("inf"), float("-inf")
    x[7] = torch.finfo(dtype).max
    rest = (*parameters(x.shape, axis), axis, -128, 127)
    moved = (rest[0].cuda(), rest[1].cuda(), *rest[2:])
    result = ops.fake_quantize(x.cuda(), *moved)
    assert torch.equal(torch.isnan(result.cpu()), torch.isnan(x))
    assert same_bits(result, ops.fake_quantize(x, *rest))
    ones = torch.ones_like(x)
    assert same_bits(
        ops.fake_quantize_grad(ones.cuda(), x.cuda(), *moved),
        ops.fake_quantize_grad(ones, x, *rest),
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_value(dtype):
    bits = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16)
    x = bits.cuda().view(dtype)
    zero = torch.tensor(0, dtype=torch.int32)
    for scale in (2.0**-24, 0.003, 1.0, 700.0):
        step = torch.tensor(scale)
        wanted = ops.fake_quantize(x.cpu(), step, zero, None, -128, 127)
        assert same_bits(ops.fake_quantize(x, step.cuda(), zero.cuda(), None, -128, 127), wanted)


@pytest.mark.parametrize(("shape", "axis"), EMPTY, ids=str)
def test_empty(shape, axis):
    """An empty result must not launch: a grid of zero blocks is an error."""
    check_bits(values(shape, device="cuda"), *parameters(shape, axis, device="cuda"), axis)
    torch.cuda.synchronize()


def test_a_cuda_graph_on_a_stream_captures_it():
    """No allocation outside torch's, no synchronisation, no default stream."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    x = values((65, 33), device="cuda")
    rest = (*parameters(x.shape, 1, device="cuda"), 1, -128, 127)
    ops.fake_quantize(x, *rest)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = ops.fake_quantize(x, *rest), ops.fake_quantize_grad(x, x, *rest)
    x.copy_(values((65, 33), seed=11))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured[0], ops.fake_quantize(x, *rest))
    assert same_bits(captured[1], ops.fake_quantize_grad(x, x, *rest))


def test_errors_name_both_sides():
    x, (scale, zero_point) = values((3,), device="cuda"), parameters((), None)
    with pytest.raises(RuntimeError, match="scale is on cpu but x is on cuda:0"):
        fake_quantize(x, scale, zero_point, None, 0, 1)
    with pytest.raises(RuntimeError, match="instruction set of the CPU"):
        ops.fake_quantize(x, scale.cuda(), zero_point.cuda(), None, 0, 1, isa="generic")


def test_offsets_past_two_to_the_31_elements():
    """64-bit offsets: the last row of 2¹⁵ + 1 rows of 2¹⁶ halves (4 GiB), by both kernels."""
    if torch.cuda.get_device_properties(0).total_memory < 20 * 2**30:
        pytest.skip("needs 20 GiB of device memory")
    rows, columns = 2**15 + 1, 2**16
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    x[-1] = values((columns,), torch.float16, "cuda")
    for axis in (None, 0, 1):
        scale, zero_point = parameters(x.shape, axis, device="cuda")
        result = fake_quantize(x, scale, zero_point, axis, -128, 127)
        last = (scale, zero_point) if axis != 0 else (scale[-1:], zero_point[-1:])
        wanted = fake_quantize(x[-1:].clone(), *last, axis, -128, 127)
        assert same_bits(result[-1:], wanted)
        assert not result[:-1].any()
