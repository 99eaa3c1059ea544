"""Shapes, inputs and error bounds that the CPU and the CUDA tests of `linear` share."""

from __future__ import annotations

import math

import torch

from narrowgauge_kernels.linear import linear_mac, linear_mac_ref

#: (leading sizes, K, N) around the edges of the blocks: 4, 6, 12 rows and 4, 8, 16, 32 columns in a
#: micro-kernel, 128 × 256 × 256 in a CPU block, 64 × 64 × 16 in a CUDA tile.
SHAPES = [
    ((1,), 1, 1),
    ((3,), 5, 2),
    ((63,), 15, 65),
    ((64,), 16, 64),
    ((65,), 17, 63),
    ((129,), 255, 127),
    ((127,), 257, 130),
    ((2, 7, 3), 33, 13),
    ((13,), 600, 259),
    ((), 9, 4),
]

#: One of the sizes is zero, so a sum is empty or the result is.
EMPTY_SHAPES = [((0,), 5, 3), ((4,), 0, 3), ((4,), 5, 0), ((2, 0, 3), 5, 2), ((0,), 0, 0)]

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def random(shape, dtype=torch.float32, device="cpu", seed=0):
    """Seeded normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values.to(dtype).to(device)


def operands(shape, dtype=torch.float32, device="cpu", bias=True):
    """x, weight, bias or None, and a gradient of the result, for a (leading, K, N)."""
    leading, depth, columns = shape
    return (
        random((*leading, depth), dtype, device, seed=1),
        random((columns, depth), dtype, device, seed=2),
        random((columns,), dtype, device, seed=3) if bias else None,
        random((*leading, columns), dtype, device, seed=4),
    )


def accumulator_roundoff(dtype):
    """Half a unit in the last place of what sums are kept in."""
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.finfo(kept).eps / 2


def assert_within(actual, expected, magnitude, depth):
    """`actual` is `expected` (float64) within what `depth` fused steps may lose.

    Each step rounds once, so a sum of depth terms and a bias is off by at most about
    (depth + 1)·u·Σ|a·b|, u the accumulator's roundoff; twice that, because in float64 the expected
    sum has the same error; then half a unit of the result's own dtype. Written so that NaN fails.
    """
    dtype = actual.dtype
    assert actual.shape == expected.shape
    own = torch.finfo(dtype)
    bound = 2 * (depth + 2) * accumulator_roundoff(dtype) * magnitude.cpu()
    bound = bound + own.eps / 2 * expected.abs().cpu() + own.tiny * own.eps
    difference = (actual.double() - expected).abs().cpu()
    assert bool((difference <= bound).all()), (
        f"worst excess {(difference - bound).max().item():.3g} over {bound.max().item():.3g}"
    )


def _leaf(tensor, double=False):
    if tensor is None:
        return None
    return (tensor.detach().double() if double else tensor.detach()).requires_grad_()


def check_forward_and_backward(x, weight, bias, grad):
    """`linear_mac` and its gradients against `linear_mac_ref` in float64, each within its bound."""
    x, weight, bias = _leaf(x), _leaf(weight), _leaf(bias)
    result = linear_mac(x, weight, bias)
    result.backward(grad)
    wide_x, wide_weight, wide_bias = (_leaf(tensor, double=True) for tensor in (x, weight, bias))
    expected = linear_mac_ref(wide_x, wide_weight, wide_bias)
    expected.backward(grad.double())

    assert result.dtype == x.dtype
    with torch.no_grad():
        rows = math.prod(x.shape[:-1])
        columns, depth = weight.shape
        sizes_x = wide_x.abs().reshape(rows, depth)
        sizes_weight = wide_weight.abs()
        sizes_grad = grad.double().abs().reshape(rows, columns)
        magnitude = torch.mm(sizes_x, sizes_weight.t())
        if bias is not None:
            magnitude = magnitude + wide_bias.abs()
        assert_within(result.detach(), expected.detach(), magnitude.reshape(result.shape), depth)
        magnitude = torch.mm(sizes_grad, sizes_weight).reshape(x.shape)
        assert_within(x.grad, wide_x.grad, magnitude, columns)
        assert_within(weight.grad, wide_weight.grad, torch.mm(sizes_grad.t(), sizes_x), rows)
        if bias is not None:
            assert_within(bias.grad, wide_bias.grad, sizes_grad.sum(0), rows)


def same_bits(left, right):
    """Equal including the sign of zero; any NaN equals any NaN."""
    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    # Widening to float64 is exact, and torch 1.8 has no signbit that sees -0.
    left, right = left.cpu().double(), right.cpu().double()
    nan = torch.isnan(left)
    return torch.equal(nan, torch.isnan(right)) and torch.equal(
        left[~nan].view(torch.int64), right[~nan].view(torch.int64)
    )
