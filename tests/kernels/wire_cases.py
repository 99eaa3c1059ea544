"""What the CPU and the CUDA tests of the wire format share."""

from __future__ import annotations

import torch

from narrowgauge_kernels.wire import pack_int8, pack_int8_ref, unpack_int8

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
#: Every way through the code: planes that vectors fill and that leave a rest, of few and of many
#: channels; one channel; planes of one element, alone and in rows; three dimensions of them.
SHAPES = (
    (1, 1),
    (5, 3),
    (33, 520),
    (3, 1, 5, 7),
    (2, 3, 40, 41),
    (4, 16, 8, 8),
    (7, 64, 7, 7),
    (2, 5, 33),
    (2, 3, 4, 5, 6),
    (6, 10, 1, 1),
)
EMPTY = ((0, 3), (2, 0), (0, 3, 4, 4), (2, 3, 0, 4), (0, 0))


def values(shape, dtype=torch.float32, device="cpu", seed=1):
    """Normal numbers; each channel of another size."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    if x.dim() > 1:
        size = torch.logspace(-2, 1, shape[1]) if shape[1] else torch.ones(0)
        x = x * size.reshape([1, -1] + [1] * (x.dim() - 2))
    return x.to(dtype).to(device)


def bits(x):
    """The bits of a float32 tensor; of NaN, those of any NaN."""
    x = x.cpu()
    return torch.where(torch.isnan(x), torch.full_like(x, float("nan")), x).view(torch.int32)


def check_pack(x, seed=None, first=0):
    """`pack_int8` to the bit of its reference, and in the order of memory of x; both results."""
    got, scale = pack_int8(x, seed, first)
    wanted, wanted_scale = pack_int8_ref(x, seed, first)
    assert (got.dtype, scale.dtype, scale.shape) == (torch.int8, torch.float32, x.shape[1:2])
    assert torch.equal(bits(scale), bits(wanted_scale))
    assert torch.equal(got, wanted)
    return got, scale


def check_unpack(packed, scale, dtype=torch.float32):
    """`unpack_int8` to the bit: a float32 product, rounded once more to the dtype."""
    out = unpack_int8(packed, scale, dtype)
    along = [1, -1] + [1] * (packed.dim() - 2)
    wanted = (packed.float() * scale.reshape(along)).to(dtype)
    assert out.dtype == dtype
    assert torch.equal(bits(out.float()), bits(wanted.float()))
    return out


def layouts(shape, dtype=torch.float32, device="cpu"):
    """(name, tensor, whether its strides stay) of one shape [B, C, H, W]."""
    x = values(shape, dtype, device)
    batch, channels, height, width = shape
    last = torch.channels_last
    offset = values((x.numel() + 1,), dtype, device)[1:].reshape(shape)
    wide = values((batch, channels, height, 2 * width), dtype, device)
    turned = values((width, batch, height, channels), dtype, device).permute(1, 3, 2, 0)
    return (
        ("contiguous", x, True),
        ("channels_last", x.contiguous(memory_format=last), True),
        ("offset", offset, True),
        ("sliced", wide[..., ::2], False),
        ("transposed", turned, False),
        ("expanded", x[:1].expand(shape), False),
    )
