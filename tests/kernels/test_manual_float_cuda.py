"""The manual operators of float policies on CUDA, against references. Needs a GPU and a build.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels/test_manual_float_cuda.py
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import same_bits
from manual_cases import CONVOLUTIONS, EMPTY, MACS, SPECIALS, Case, operands, roundoff_of

from narrowgauge_kernels.custom import compile_functor
from narrowgauge_kernels.mac import Mac, reference
from narrowgauge_kernels.manual import conv2d, conv2d_ref, linear, linear_ref

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

EXACT = Mac("exact_fp32")

#: Beside the CPU's cases, whose sums are mostly too small for a tile: every tile's edges, 16-byte
#: loads and stores and none, split depths, groups that are tiled and groups that are not, and a
#: kernel of more taps than a tile's words have bits for.
TILED = (
    Case((2, 16, 6, 6), (130, 16, 1, 1)),
    Case((3, 9, 5, 7), (33, 9, 1, 1)),
    Case((2, 64, 14, 14), (64, 64, 3, 3), padding=(1, 1)),
    Case((1, 12, 23, 19), (70, 12, 7, 7), (2, 2), (3, 3)),
    Case((1, 24, 15, 13), (40, 24, 5, 3), (2, 3), (2, 0), (1, 2)),
    Case((2, 48, 9, 8), (36, 16, 3, 3), (1, 1), (1, 1), (2, 2), 3),
    Case((1, 256, 7, 7), (64, 256, 3, 3), padding=(1, 1)),
    Case((4, 128, 4, 4), (200, 128, 1, 1), (2, 2)),
    Case((1, 9, 20, 5), (16, 9, 17, 2)),
)


def check(case, mac, arrange=lambda x: x):
    """`conv2d` on the GPU within the rounding of its sums, in any order."""
    x, weight, bias = operands(case)
    window = (case.stride, case.padding, case.dilation, case.groups)
    given_x = arrange(x.cuda())
    result = conv2d(given_x, weight.cuda(), bias.cuda(), mac, *window)
    wanted = conv2d_ref(x, weight, bias, mac, *window)
    assert result.shape == wanted.shape
    bound = roundoff_of(x, weight, bias, mac, *window)
    assert bool(((result.cpu().double() - wanted).abs() <= bound).all())
    return result


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("case", [*CONVOLUTIONS, *TILED], ids=str)
def test_convolutions(case, mac):
    """Every policy, contiguous and channels last; the result is laid out as x is."""
    assert check(case, mac).is_contiguous()
    last = check(case, mac, lambda x: x.contiguous(memory_format=torch.channels_last))
    if case.x[1] > 1 and case.x[2] * case.x[3] > 1:  # else x is both
        assert last.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("case", TILED[2:5], ids=str)
def test_views_are_read_by_their_strides(case, mac):
    """A window of a larger tensor, off 16 bytes; a transposed plane; an expanded batch."""

    def window(x):
        whole = torch.full((x.shape[0] + 1, x.shape[1], x.shape[2], 2 * x.shape[3] + 1), 7.0).cuda()
        whole[1:, :, :, 1::2] = x
        return whole[1:, :, :, 1::2]

    check(case, mac, window)
    check(case, mac, lambda x: x.transpose(2, 3).contiguous().transpose(2, 3))


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("depth", [1, 8, 9])
def test_products_are_the_references_to_the_bit(mac, depth):
    """All pairs of special operands, and of any 32 bits, as sums of one term: by the kernel of one
    output per thread (depth 1) and by tiles, whose other terms are 0 times 0. With NaN, and without
    any, where tiles do not look for one."""
    words = np.random.default_rng(0).integers(0, 2**32, (2, 500), np.uint32).view(np.float32)
    pairs = [(SPECIALS, SPECIALS), (words[0], words[1])]
    pairs += [(a[~np.isnan(a)], b[~np.isnan(b)]) for a, b in pairs]
    for a, b in pairs:
        x, weight = torch.zeros(len(a), depth), torch.zeros(len(b), depth)
        x[:, depth // 2] = torch.from_numpy(a.copy())
        weight[:, depth // 2] = torch.from_numpy(b.copy())
        wanted = torch.from_numpy(reference(mac, a[:, None], b[None, :]))
        got = linear(x.cuda(), weight.cuda(), None, mac).cpu()
        assert same_bits(got.abs(), wanted.abs())
        nonzero = (wanted != 0) & ~torch.isnan(wanted)
        assert same_bits(got[nonzero], wanted[nonzero])


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize("rows", [64, 20000])
def test_a_nan_is_seen_by_its_row_and_column_only(mac, rows):
    """In some chunks of the depth and not in others, of x, of weight and of both; by small tiles
    and by large ones. An infinity beside them stays one."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn((rows, 200), generator=generator)
    weight = torch.randn((130, 200), generator=generator)
    x[5, 3], x[30, 100], x[31, 101] = float("nan"), float("nan"), float("inf")
    weight[7, 60], weight[129, 103], weight[9, 150] = float("nan"), float("nan"), float("inf")
    got = linear(x.cuda(), weight.cuda(), None, mac)[:64].cpu().double()
    x = x[:64]
    wanted = linear_ref(x, weight, None, mac)
    assert torch.equal(torch.isnan(got), torch.isnan(wanted))
    infinite = torch.isinf(wanted)
    assert torch.equal(got[infinite], wanted[infinite])
    finite = torch.isfinite(wanted)
    bound = 202 * 2.0**-23 * linear_ref(x.abs(), weight.abs(), None, mac) + 2.0**-140
    assert bool(((got - wanted).abs() <= bound)[finite].all())


@pytest.mark.parametrize("mac", MACS, ids=str)
@pytest.mark.parametrize(
    "shape", [((), 9, 4), ((1,), 300, 17), ((33,), 7, 20), ((2, 65), 261, 133)]
)
def test_linear(shape, mac):
    """Leading dimensions of every number, a transposed weight, with and without bias."""
    leading, depth, columns = shape
    generator = torch.Generator().manual_seed(1)
    x = torch.randn((*leading, depth), generator=generator)
    weight = torch.randn((depth, columns), generator=generator).t()
    for bias in (torch.randn((columns,), generator=generator), None):
        result = linear(x.cuda(), weight.cuda(), None if bias is None else bias.cuda(), mac)
        wanted = linear_ref(x, weight, bias, mac)
        scale = linear_ref(x.abs(), weight.abs(), None if bias is None else bias.abs(), mac)
        assert result.shape == wanted.shape
        bound = (depth + 2) * 2.0**-23 * scale + 2.0**-140
        assert bool(((result.cpu().double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_depthwise_has_the_bits_of_the_cpu(mac):
    """The order of its terms is the CPU's."""
    case = Case((2, 40, 13, 11), (80, 1, 3, 3), (1, 1), (1, 1), (1, 1), 40)
    x, weight, bias = operands(case)
    window = (case.stride, case.padding, case.dilation, case.groups)
    on_cuda = conv2d(x.cuda(), weight.cuda(), bias.cuda(), mac, *window)
    assert same_bits(on_cuda, conv2d(x, weight, bias, mac, *window))


def test_a_result_repeats_to_the_bit():
    """Also where the depth is split: no order is left to chance."""
    x, weight, bias = (each.cuda() for each in operands(TILED[6]))
    first = conv2d(x, weight, bias, EXACT, 1, 1)
    for _ in range(20):
        assert same_bits(conv2d(x, weight, bias, EXACT, 1, 1), first)


@pytest.mark.parametrize("case", EMPTY, ids=str)
def test_empty(case):
    """Nothing is launched for an empty result; a sum of nothing is the bias."""
    x, weight, bias = (each.cuda() for each in operands(case))
    result = conv2d(x, weight, bias, EXACT, case.stride, case.padding, case.dilation, case.groups)
    torch.cuda.synchronize()
    assert torch.equal(result, bias.reshape(1, -1, 1, 1).expand_as(result))


def test_padding_is_multiplied():
    """Zeros beside an infinite weight are NaN, as in the reference."""
    x, weight = torch.ones(1, 8, 3, 3), torch.ones(8, 8, 3, 3)
    weight[0, 0, 0, 0] = float("inf")
    result = conv2d(x.cuda(), weight.cuda(), None, EXACT, 1, 1)
    assert same_bits(result, conv2d_ref(x, weight, None, EXACT, 1, 1).float())


def test_a_compiled_functor(tmp_path, monkeypatch):
    """Not commutative, and not zero of zeros, so that padding and tails show."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    source = tmp_path / "odd.h"
    source.write_text(
        "struct Multiply { MAC_INLINE float operator()(float a, float b) const "
        "{ return a * 2.0f + b + 1.0f; } };\n"
    )
    mac = compile_functor(source, cuda=True)
    case = Case((2, 9, 6, 5), (20, 9, 3, 3), padding=(1, 1))
    generator = torch.Generator().manual_seed(2)
    x = torch.randint(-8, 9, case.x, generator=generator).float()
    weight = torch.randint(-8, 9, case.weight, generator=generator).float()
    on_cpu = conv2d(x, weight, None, mac, 1, 1)
    assert same_bits(conv2d(x.cuda(), weight.cuda(), None, mac, 1, 1), on_cpu)
    grouped = torch.randint(-8, 9, (9, 1, 3, 3), generator=generator).float()
    on_cpu = conv2d(x, grouped, None, mac, 1, 1, 1, 9)
    assert same_bits(conv2d(x.cuda(), grouped.cuda(), None, mac, 1, 1, 1, 9), on_cpu)


def test_the_current_stream_is_used():
    """Work queued before, on a stream of our own, is seen: there is no hidden default stream."""
    x, weight, bias = (each.cuda() for each in operands(TILED[6]))
    expected = conv2d(x, weight, bias, EXACT, 1, 1)
    slow = torch.randn(4096, 4096, device="cuda")
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(20):
            slow = torch.mm(slow, slow).clamp(-1, 1)
        late.copy_(x)
        result = conv2d(late, weight, bias, EXACT, 1, 1)
    stream.synchronize()
    assert same_bits(result, expected)


def test_a_cuda_graph_captures_it():
    """Partial sums too: they are torch's memory."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    x, weight, bias = (each.cuda() for each in operands(TILED[6]))
    conv2d(x, weight, bias, EXACT, 1, 1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = conv2d(x, weight, bias, EXACT, 1, 1)
    x.copy_(torch.randn_like(x))
    graph.replay()
    torch.cuda.synchronize()
    assert same_bits(captured, conv2d(x, weight, bias, EXACT, 1, 1))


def test_the_device_of_the_tensors_is_used():
    """Not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    tensors = operands(TILED[6])
    on_second = conv2d(*(each.to("cuda:1") for each in tensors), EXACT, 1, 1)
    assert torch.cuda.current_device() == 0
    assert on_second.device == torch.device("cuda:1")
    assert same_bits(on_second, conv2d(*(each.cuda() for each in tensors), EXACT, 1, 1))


@pytest.mark.parametrize(
    ("shape", "kernel"),
    [
        ((2**31 // (64 * 1024) + 2, 64, 32, 32), 1),  # images past 2^31 elements, in tiles
        ((1, 33, 6000, 6000), 1),  # one image past 2^30 bytes, an output per thread
    ],
)
def test_offsets_past_32_bits(shape, kernel):
    """The last pixels are those of a small copy."""
    if torch.cuda.get_device_properties(0).total_memory < 24 * 2**30:
        pytest.skip("needs 24 GiB of device memory")
    x = torch.zeros(shape, device="cuda")
    x[-1, :, -2:] = torch.randn(x[-1, :, -2:].shape, device="cuda")
    weight = torch.randn(3, shape[1], kernel, kernel, device="cuda")
    result = conv2d(x, weight, None, EXACT)
    small = conv2d(x[-1:, :, -2:].contiguous(), weight, None, EXACT)
    assert torch.allclose(result[-1:, :, -2:], small, rtol=1e-4, atol=1e-5)
    assert not result[:-1].any()
    assert not result[-1, :, :-2].any()


def test_errors_name_both_sides():
    """Devices that disagree, and a CPU instruction set asked of a GPU."""
    x, weight, _ = (each.cuda() for each in operands(TILED[0]))
    with pytest.raises(RuntimeError, match="weight is on cpu but x is on cuda:0"):
        conv2d(x, weight.cpu(), None, EXACT)
    with pytest.raises(RuntimeError, match="weight is on cuda:0 but x is on cpu"):
        conv2d(x.cpu(), weight, None, EXACT)
    with pytest.raises(RuntimeError, match="instruction set of the CPU"):
        torch.ops.narrowgauge.manual_linear(
            x[..., 0, 0], weight[..., 0, 0], None, "exact_fp32", 0, "", isa="generic"
        )


@settings(
    max_examples=80,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
@given(data=st.data())
def test_any_small_convolution(data):
    """Shapes nobody thought of."""
    draw = data.draw
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    channels, filters = draw(st.integers(1, 40)), draw(st.integers(1, 70))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    dilation = draw(st.tuples(st.integers(1, 2), st.integers(1, 2)))
    least = [d * (k - 1) + 1 for k, d in zip(kernel, dilation)]
    size = [each + draw(st.integers(0, 9)) for each in least]
    case = Case(
        (draw(st.integers(1, 3)), groups * channels, *size),
        (groups * filters, channels, *kernel),
        draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        draw(st.tuples(st.integers(0, 3), st.integers(0, 3))),
        dilation,
        groups,
    )
    layout = draw(st.sampled_from([torch.contiguous_format, torch.channels_last]))
    check(case, draw(st.sampled_from(MACS)), lambda x: x.contiguous(memory_format=layout))
