"""The int8 wire format on CUDA: the CPU's bits, and memory of the host that kernels reach. Needs a
GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

import pytest
import torch
from wire_cases import DTYPES, EMPTY, SHAPES, bits, check_pack, check_unpack, layouts, values

from narrowgauge_kernels.wire import (
    mapped_copy,
    pack_int8,
    pack_int8_into,
    unpack_int8,
    unpack_int8_into,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

#: As SHAPES, and large enough for several blocks: a channel to itself and not, few rows and many,
#: more channels than a block's memory takes.
LARGE = (
    (32, 16, 32, 32),
    (64, 16, 56, 56),
    (5, 3, 224, 224),
    (5, 3, 223, 223),
    (1, 1, 300001),
    (4096, 2050),
    (5000, 12),
    (128, 1000),
)


def same(got, wanted):
    return torch.equal(got[0].cpu(), wanted[0]) and torch.equal(bits(got[1]), bits(wanted[1]))


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_are_those_of_the_cpu(shape, dtype):
    x = values(shape, dtype)
    moved = x.cuda()
    for seed, first in ((None, 0), (3, 0), (-5, 2**32 - x.numel() // 2)):
        packed, scale = pack_int8(moved, seed, first)
        assert same((packed, scale), pack_int8(x, seed, first))
        for wide in DTYPES:
            wanted = unpack_int8(packed.cpu(), scale.cpu(), wide)
            assert torch.equal(unpack_int8(packed, scale, wide).cpu(), wanted)


@pytest.mark.parametrize("shape", [(4, 6, 5, 7), (3, 64, 9, 3), (8, 1028, 6, 6), (9, 1027, 6, 7)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides(shape, dtype):
    """Also a pointer that is not aligned; check_pack holds them to the reference on the GPU."""
    plain = values(shape, dtype, "cuda")
    wanted = pack_int8(plain.cpu(), 3)
    for name, x, kept in layouts(shape, dtype, "cuda"):
        packed, scale = check_pack(x, 3)
        assert packed.stride() == (x.stride() if kept else plain.stride()), name
        check_unpack(packed, scale, dtype)
        if name == "channels_last":
            assert same((packed, scale), wanted)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 6, 7), (64, 8, 40, 40)], ids=str)
def test_nan_infinity_denormals_and_the_largest(shape, dtype, last):
    x = values(shape, dtype)
    x[1, 2, 3, 4], x[0, 4, 0, 0], x[2, 5, 5, 6] = float("nan"), float("inf"), float("-inf")
    x[:, 0] = 0
    x[:, 1] = x[:, 1] * 2.0**-140
    x[0, 3, 0, 0] = torch.finfo(dtype).max
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    for seed in (None, 5):
        got = pack_int8(x.cuda(), seed)
        wanted = pack_int8(x, seed)
        assert same(got, wanted)
        back = unpack_int8(*got)
        assert torch.equal(bits(back), bits(unpack_int8(*wanted)))
        assert torch.isnan(back[:, [2, 4, 5]]).all()
        assert torch.isfinite(back[:, [0, 1, 3]]).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(dtype):
    numbers = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[torch.isfinite(numbers)].reshape(-1, 2)
    assert same(pack_int8(x.cuda(), 1), pack_int8(x, 1))
    assert same(pack_int8(numbers.reshape(1, -1).cuda()), pack_int8(numbers.reshape(1, -1)))


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape):
    """An empty result must not launch: a grid of zero blocks is an error."""
    packed, scale = pack_int8(torch.empty(shape, device="cuda"), 1)
    assert torch.equal(scale.cpu(), torch.ones(shape[1]))
    assert unpack_int8(packed, scale).shape == torch.Size(shape)
    mapped_copy(torch.empty(shape, device="cuda"), torch.empty(shape).pin_memory())
    torch.cuda.synchronize()


@pytest.mark.parametrize(
    "shape", [(4, 16, 9, 9), (64, 16, 56, 56), (128, 1000), (33, 48), (3, 17, 4, 4)], ids=str
)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mapped_memory_is_written_and_read(shape, last, dtype):
    """Values and scale go to the host and come back from there by the kernels themselves, by 16, 4
    or one at once."""
    x = values(shape, dtype, device="cuda")
    if last and x.dim() == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    wanted = pack_int8(x.cpu(), 7)
    packed = torch.empty_like(wanted[0]).pin_memory()
    scale = torch.empty(shape[1]).pin_memory()
    if last and x.dim() == 4:
        packed = torch.empty(shape, dtype=torch.int8).pin_memory()
        packed = packed.view(-1).as_strided(shape, wanted[0].stride())
    pack_int8_into(packed, scale, x, 7)
    torch.cuda.synchronize()
    assert same((packed, scale), wanted)
    out = torch.empty_like(x)
    unpack_int8_into(out, packed, scale)
    assert torch.equal(out.cpu(), unpack_int8(*wanted, dtype))


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 4099, 300_007, 9_000_001])
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_a_mapped_copy(count, offset):
    """Both ways, and between tensors of the device; whatever the alignment."""
    x = torch.randint(0, 256, (count + offset,), dtype=torch.uint8).pin_memory()[offset:]
    there = torch.zeros(count + offset, dtype=torch.uint8, device="cuda")[offset:]
    back = torch.zeros(count + offset, dtype=torch.uint8).pin_memory()[offset:]
    mapped_copy(there, x)
    mapped_copy(back, there)
    torch.cuda.synchronize()
    assert torch.equal(there.cpu(), x)
    assert torch.equal(back, x)
    again = torch.zeros_like(there)
    mapped_copy(again, there)
    assert torch.equal(again, there)


def test_memory_that_no_kernel_reaches_is_refused_by_name():
    x = values((3, 4), device="cuda")
    packed, scale = pack_int8(x)
    pinned = torch.empty(3, 4).pin_memory()
    cases = (
        (
            lambda: pack_int8_into(packed.cpu(), scale, x),
            "pack_int8: values is on cpu and not page",
        ),
        (lambda: pack_int8_into(packed, scale.cpu(), x), "pack_int8: scale is on cpu and not page"),
        (lambda: unpack_int8_into(x, packed.cpu(), scale), "unpack_int8: values is on cpu and not"),
        (lambda: mapped_copy(x, x.cpu()), "mapped_copy: x is on cpu and not page-locked"),
        (lambda: mapped_copy(x.cpu(), x), "mapped_copy: out is on cpu and not page-locked"),
        (
            lambda: unpack_int8_into(
                torch.empty(4, 3, device="cuda"), packed.cpu().pin_memory().t(), scale[:3]
            ),
            "values has strides .* and is mapped",
        ),
    )
    for call, message in cases:
        with pytest.raises(RuntimeError, match=message):
            call()
    mapped_copy(x, pinned)
    with pytest.raises(RuntimeError, match="instruction set of the CPU"):
        torch.ops.narrowgauge.wire_pack_int8(x, None, 0, packed, scale, isa="generic")


@pytest.mark.parametrize("shape", [(4, 16, 9, 9), (64, 16, 56, 56), (5000, 12)], ids=str)
def test_a_cuda_graph_captures_it(shape):
    """No allocation outside torch's, no synchronisation, no default stream."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    x = values(shape, device="cuda")
    packed, scale = pack_int8(x, 1)
    host = torch.empty(packed.shape, dtype=torch.int8).pin_memory()
    out = torch.empty_like(x)
    unpack_int8_into(out, packed, scale)
    mapped_copy(host, packed)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pack_int8_into(packed, scale, x, 1)
        mapped_copy(host, packed)
        unpack_int8_into(out, packed, scale)
    x.copy_(values(shape, seed=5))
    graph.replay()
    torch.cuda.synchronize()
    wanted = pack_int8(x.cpu(), 1)
    assert same((packed, scale), wanted)
    assert torch.equal(host, wanted[0])
    assert torch.equal(out.cpu(), unpack_int8(*wanted))


def test_offsets_past_two_to_the_31_elements():
    """64-bit offsets and the second keys: 2^32 + 2^17 halves, in rows and in planes."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    columns = 2**16
    rows = 2**16 + 2
    x = torch.zeros(rows, columns, dtype=torch.float16, device="cuda")
    x[0] = 1.0
    x[-1] = values((columns,), torch.float16, "cuda").clamp(-1, 1)
    for shape in ((rows, columns), (rows, 16, columns // 16)):
        packed, scale = pack_int8(x.reshape(shape), 3)
        last = torch.cat([x[:1], x[-1:]]).reshape(2, *shape[1:])
        plain, _ = pack_int8(last, 3, (rows - 2) * columns)
        assert torch.equal(packed[-1], plain[1])
        assert torch.equal(unpack_int8(packed, scale)[-1], unpack_int8(plain, scale)[1])
        assert not packed[1:-1].any()
