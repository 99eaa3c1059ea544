"""What the CPU and the CUDA tests of `fake_quantize` share: inputs, and two independent answers."""

from __future__ import annotations

import torch
from kernel_cases import same_bits

from narrowgauge_kernels.fake_quantize import fake_quantize, fake_quantize_ref

DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
#: (shape, axis): every way through the code. Without an axis; long runs of a channel; short ones;
#: single elements of few and many channels; a table that is too large; 16-byte packs that one
#: channel fills, that several share, and that leave a rest.
CASES = (
    ((), None),
    ((1,), 0),
    ((1023,), None),
    ((3, 1, 5), 1),
    ((2, 3, 40, 41), 1),
    ((2, 5, 7, 7), 1),
    ((3, 16, 4, 4), 1),
    ((7, 4, 3, 3), 0),
    ((4, 7, 3, 3), 1),
    ((50, 3), 1),
    ((70, 64), 1),
    ((33, 520), 1),
    ((2, 8000, 9), 1),
)
EMPTY = (((0,), None), ((0, 3), 1), ((4, 0), 1), ((4, 0), 0))
#: (quant_min, quant_max): 8 bits signed, narrow, unsigned; 2 bits.
FORMATS = ((-128, 127), (-127, 127), (0, 255), (-2, 1))


def parameters(shape, axis, limits=(-128, 127), device="cpu", seed=0):
    """Scales between 0.01 and 0.11, zero points all over the range."""
    generator = torch.Generator().manual_seed(seed)
    size = () if axis is None else (shape[axis],)
    scale = torch.rand(size, generator=generator) * 0.1 + 0.01
    zero_point = torch.randint(limits[0], limits[1] + 1, size, generator=generator)
    return scale.to(device), zero_point.to(torch.int32).to(device)


def values(shape, dtype=torch.float32, device="cpu", seed=1):
    """Normal values of a size that saturates some of them."""
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) * 6).to(dtype).to(device)


def _along(parameter, x, axis):
    shape = [1] * x.dim()
    if axis is not None:
        shape[axis] = -1
    return parameter.reshape(shape)


def transcription(x, scale, zero_point, axis, quant_min, quant_max):
    """The definition step by step, in the arithmetic of the module's table: (result, saturated)."""
    wide = x.double() if x.dtype == torch.float64 else x.float()
    step = _along(scale, x, axis).to(wide.dtype)
    zero = _along(zero_point, x, axis).to(wide.dtype)
    rounded = torch.round(wide * (1 / step)) + zero
    low, high = rounded < quant_min, rounded > quant_max
    rounded = torch.where(low, torch.full_like(rounded, quant_min), rounded)
    rounded = torch.where(high, torch.full_like(rounded, quant_max), rounded)
    return ((rounded - zero) * step).to(x.dtype), low | high


def check_bits(x, scale, zero_point, axis, limits=(-128, 127)):
    """Result and gradient of `fake_quantize`, to the bit, by the transcription."""
    wanted, saturated = transcription(x, scale, zero_point, axis, *limits)
    leaf = x.detach().requires_grad_()
    result = fake_quantize(leaf, scale, zero_point, axis, *limits)
    assert same_bits(result.detach(), wanted)
    grad = values(tuple(x.shape), x.dtype, x.device, seed=9)
    (gradient,) = torch.autograd.grad(result, leaf, grad)
    assert same_bits(gradient, torch.where(saturated, torch.zeros_like(grad), grad))
    return result.detach()


def check_against_float64(shape, axis, device="cpu"):
    """Forward and backward against the float64 reference, with inputs away from ties."""
    scale, zero_point = parameters(shape, axis)
    steps = torch.round(values(shape, torch.float64) * 50)
    offset = torch.rand(shape, dtype=torch.float64) * 0.8 - 0.4
    x = ((steps + offset) * _along(scale, steps, axis).double()).float()
    ours = x.to(device).requires_grad_()
    exact = x.double().requires_grad_()
    result = fake_quantize(ours, scale.to(device), zero_point.to(device), axis, -128, 127)
    wanted = fake_quantize_ref(exact, scale, zero_point, axis, -128, 127)
    # One rounding, of the product with the scale.
    error = (result.detach().cpu().double() - wanted.detach()).abs()
    assert bool((error <= wanted.detach().abs() * 2**-24).all())
    grad = values(shape, seed=5)
    (got,) = torch.autograd.grad(result, ours, grad.to(device))
    (expected,) = torch.autograd.grad(wanted, exact, grad.double())
    assert torch.equal(got.cpu().double(), expected)
    if x.numel() > 100:
        assert bool((expected == 0).any())
        assert bool((expected != 0).any())
