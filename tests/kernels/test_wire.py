"""The int8 wire format on the CPU: to the bit of its reference, on every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from wire_cases import DTYPES, EMPTY, SHAPES, bits, check_pack, check_unpack, layouts, values

from narrowgauge_kernels.wire import (
    mapped_copy,
    pack_int8,
    pack_int8_into,
    pack_int8_ref,
    unpack_int8,
    unpack_int8_into,
    unpack_int8_ref,
)

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.narrowgauge


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_bits_are_those_of_the_reference(shape, dtype):
    x = values(shape, dtype)
    for seed in (None, 0, -7):
        packed, scale = check_pack(x, seed)
        for wide in DTYPES:
            check_unpack(packed, scale, wide)


@pytest.mark.parametrize("shape", [(4, 6, 5, 7), (3, 64, 9, 3)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_strides_and_the_draws_are_the_same(shape, dtype):
    """channels_last stays; what is neither that nor contiguous is gathered. A draw goes with the
    element, not with its place in memory."""
    plain = values(shape, dtype)
    wanted = pack_int8(plain, 3)
    for name, x, kept in layouts(shape, dtype):
        packed, scale = check_pack(x, 3)
        assert packed.stride() == (x.stride() if kept else plain.stride()), name
        assert check_unpack(packed, scale).stride() == packed.stride()
        if name == "channels_last":
            assert torch.equal(packed, wanted[0])
            assert torch.equal(scale, wanted[1])
    x = values((2, 6, 3, 4, 5)).contiguous(memory_format=torch.channels_last_3d)
    assert check_pack(x, 3)[0].stride() == x.stride()
    check_pack(values((6, 40)).t(), 3)


def test_an_error_is_at_most_half_a_step_and_with_a_seed_one():
    x = values((8, 16, 9, 9))
    step = (x.abs().transpose(0, 1).reshape(16, -1).max(dim=1)[0] / 127).reshape(1, -1, 1, 1)
    for seed, most in ((None, 0.5), (1, 1.0)):
        packed, scale = pack_int8(x, seed)
        error = (unpack_int8(packed, scale) - x).abs() / step
        assert error.max() <= most * 1.0001
        assert error.max() > most * 0.9
        assert packed.min() == -127 or packed.max() == 127


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_draws_are_unbiased(dtype):
    """The mean of many draws of one number, within five standard errors, for numbers all over the
    step; and a whole number is never moved."""
    draws = 1 << 16
    fractions = torch.tensor([0.0, 0.125, 0.25, 0.5, 0.6875, 0.9375, -0.1875, -0.5, -0.75])
    x = torch.full((draws, 10), 127.0)
    x[:, :9] = (fractions + 20).to(dtype).float()
    for column in range(9):
        one = torch.stack([x[:, column], x[:, 9]]).t().reshape(-1, 1).to(dtype)
        packed, scale = pack_int8(one, seed=column)
        assert scale.item() == 1.0
        taken = packed[::2].double()
        exact = float(x[0, column])
        spread = math.sqrt((exact % 1) * (1 - exact % 1) / draws)
        assert abs(taken.mean().item() - exact) <= 5 * spread
        assert set(taken.unique().tolist()) == {math.floor(exact), math.ceil(exact)}


def test_draws_depend_on_seed_and_element_alone_and_are_spread_evenly():
    """Chi-square over 64 classes, for several seeds; pairs of seeds and neighbours uncorrelated."""
    count = 1 << 16
    x = torch.full((count, 1), 63.5)
    x[0] = 127.0
    up = {seed: pack_int8(x, seed)[0][1:, 0].double() - 63.5 for seed in (0, 1, 2, 2**40, -1)}
    for seed, one in up.items():
        groups = one[: count - 64].reshape(64, -1).sum(1)  # of ±0.5: variance a quarter each
        chi_square = (groups**2 / (0.25 * (count - 64) / 64)).sum().item()
        assert 25 < chi_square < 115, seed  # 64 degrees of freedom: one in 10^5 outside
        correlation = (one[1:] * one[:-1]).mean().item() * 4
        assert abs(correlation) < 5 / math.sqrt(count)
        for other_seed, other in up.items():
            if other_seed != seed:
                assert abs((one * other).mean().item()) * 4 < 5 / math.sqrt(count)


def test_a_piece_draws_as_the_whole_does():
    """`first` is the index of a piece; here across a place where keys change, in every order."""
    first = 2**32 - 700
    for x in (
        values((6, 5, 9, 9)),
        values((6, 5, 9, 9)).contiguous(memory_format=torch.channels_last),
        values((600, 5)),
    ):
        one = x.numel() // x.shape[0]
        whole, scale = check_pack(x, 11, first)
        for isa in ops.cpu_instruction_sets():
            got = torch.empty_like(whole)
            ops.wire_pack_int8(x, 11, first, got, torch.empty_like(scale), isa=isa)
            assert torch.equal(got, whole)
        half = x.shape[0] // 2
        wanted, _ = pack_int8_ref(x[half:], 11, first + half * one)
        assert torch.equal(pack_int8(x[half:], 11, first + half * one)[0], wanted)
    assert not torch.equal(pack_int8(x, 11)[0], whole)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("last", [False, True])
def test_nan_and_infinity_never_come_back_as_numbers(dtype, last):
    """And touch no other channel."""
    x = values((3, 8, 6, 7), dtype)
    clean = x.clone()
    x[1, 2, 3, 4], x[0, 4, 0, 0], x[2, 5, 5, 6] = float("nan"), float("inf"), float("-inf")
    x[0, 6, 0, 0], x[1, 6, 0, 0] = float("inf"), float("nan")
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    for seed in (None, 5):
        packed, scale = check_pack(x, seed)
        assert torch.isnan(scale).tolist() == [False] * 2 + [True] + [False] * 3 + [True, False]
        assert [c for c in range(8) if math.isinf(scale[c])] == [4, 5]
        wrong = [2, 4, 5, 6]
        assert not packed[:, wrong].any()
        assert torch.isnan(check_unpack(packed, scale, dtype)[:, wrong]).all()
        right = [0, 1, 3, 7]
        assert torch.equal(packed[:, right], pack_int8(clean, seed)[0][:, right])


def test_zeros_denormals_and_the_largest():
    """A scale's reciprocal is finite, and so is what comes back."""
    tiny, most = 2.0**-149, torch.finfo(torch.float32).max
    x = torch.zeros(6, 5)
    x[:, 1] = torch.tensor([-0.0, 0.0, -0.0, 0.0, -0.0, 0.0])
    x[:, 2] = torch.tensor([tiny, -tiny, 3 * tiny, 0, 0, 0])
    x[:, 3] = torch.tensor([most, -most, most / 2, most / 254, 1.0, 0])
    x[:, 4] = torch.tensor([1e-37, -1e-37, 3e-38, 0, 0, 0])
    for seed in (None, 1):
        packed, scale = check_pack(x, seed)
        assert scale.tolist()[:3] == [1.0, 1.0, 2.0**-126]
        assert not packed[:, :2].any()
        assert packed[0, 3] == 127
        assert packed[1, 3] == -127
        back = check_unpack(packed, scale)
        assert torch.isfinite(back).all()
        assert not torch.signbit(back[:, 1]).any() if hasattr(torch, "signbit") else True
        assert (back - x)[:, 4].abs().max() <= 2.0**-126


def test_ties_go_to_even():
    x = torch.tensor([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.0]).reshape(8, 1)
    wanted = [0, 2, 2, 0, -2, -2, 126, 127]
    for isa in ops.cpu_instruction_sets():
        packed, scale = torch.empty(8, 1, dtype=torch.int8), torch.empty(1)
        ops.wire_pack_int8(x, None, 0, packed, scale, isa=isa)
        assert packed.flatten().tolist() == wanted


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_every_16_bit_number(dtype):
    """The conversions are written out for each instruction set; torch's are the judge."""
    numbers = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    x = numbers[torch.isfinite(numbers)].reshape(-1, 2)
    check_pack(x)
    check_pack(x, 9)
    one_each = numbers.reshape(1, -1)
    assert torch.equal(bits(pack_int8(one_each)[1]), bits(pack_int8_ref(one_each)[1]))
    every = torch.arange(-128, 128).to(torch.int8).reshape(-1, 1)
    for scale in (2.0**-126, 2.0**-24, 0.0123, 1.0, 700.0, 1e38, math.inf, math.nan):
        check_unpack(every, torch.tensor([scale]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_do_not_depend_on_instruction_set_or_threads(dtype):
    """Few channels and many, threads that begin anywhere in one, and rows."""
    threads = torch.get_num_threads()
    last = torch.channels_last
    cases = [values((4, 1, 100, 101), dtype), values((3, 5, 61, 41), dtype)]
    cases += [values((2, 40, 31, 30), dtype), values((700, 60), dtype)]
    cases += [values((3, 17, 30, 31), dtype).contiguous(memory_format=last)]
    try:
        for x in cases:
            for seed in (None, 6):
                torch.set_num_threads(1)
                wanted, wanted_scale = check_pack(x, seed)
                wanted_out = check_unpack(wanted, wanted_scale, dtype)
                for count in (1, 3):
                    torch.set_num_threads(count)
                    for isa in (*ops.cpu_instruction_sets(), "auto"):
                        got = torch.empty_like(wanted), torch.empty_like(wanted_scale)
                        ops.wire_pack_int8(x, seed, 0, *got, isa=isa)
                        assert torch.equal(got[0], wanted)
                        assert torch.equal(bits(got[1]), bits(wanted_scale))
                        out = torch.empty_like(wanted_out)
                        ops.wire_unpack_int8(*got, out, isa=isa)
                        assert torch.equal(out, wanted_out)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("shape", EMPTY, ids=str)
def test_empty(shape):
    packed, scale = check_pack(torch.empty(shape), 1)
    assert torch.equal(scale, torch.ones(shape[1]))
    assert unpack_int8(packed, scale).shape == torch.Size(shape)


def test_no_history_is_kept():
    x = values((3, 4)).requires_grad_()
    packed, scale = pack_int8(x, 1)
    assert not scale.requires_grad
    assert not unpack_int8(packed, scale).requires_grad
    assert torch.equal(unpack_int8_ref(packed, scale), unpack_int8(packed, scale))


def test_what_is_written_may_have_another_order():
    """The order of what is written counts; x is gathered to it."""
    x = values((3, 4, 5, 6))
    turned = x.contiguous(memory_format=torch.channels_last)
    wanted, wanted_scale = pack_int8(x, 2)
    for given, like in ((x, turned), (turned, x)):
        packed, scale = torch.empty_like(like, dtype=torch.int8), torch.empty(4)
        pack_int8_into(packed, scale, given, 2)
        assert torch.equal(packed, wanted)
        assert torch.equal(scale, wanted_scale)
        out = torch.empty_like(given)
        unpack_int8_into(out, packed, scale)
        assert torch.equal(out, unpack_int8(wanted, wanted_scale))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.bool], ids=str)
def test_a_copy(dtype):
    x = (values((3, 4, 5, 6)) > 0).to(dtype)
    for given in (x, x.contiguous(memory_format=torch.channels_last), x[1:], x[:0]):
        out = torch.empty_like(given)
        mapped_copy(out, given)
        assert torch.equal(out, given)


X = torch.ones(2, 5, 3)
PACKED, SCALE = torch.zeros(2, 5, 3, dtype=torch.int8), torch.ones(5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((PACKED, SCALE, X.double()), "x is Double; it must be float32, float16"),
        ((PACKED[0, 0], SCALE, X[0, 0]), r"x has shape \[3\]; it must be \[B, C"),
        ((PACKED.int(), SCALE, X), "values is Int; it must be Char"),
        ((PACKED[:1], SCALE, X), r"values has shape \[1, 5, 3\] and x has shape \[2, 5, 3\]"),
        ((PACKED, SCALE.double(), X), "scale is Double; it must be Float"),
        ((PACKED, SCALE[:4], X), r"scale has shape \[4\] .*it must be \[5\]"),
        ((PACKED.transpose(0, 1), SCALE[:2], X.transpose(0, 1)), "contiguous or channels_last"),
        ((PACKED, torch.ones(10)[::2], X), "scale has .*strides.*must be contiguous"),
        ((PACKED, SCALE, X, 1, -1), "first=-1; an index is not negative"),
    ],
    ids=str,
)
def test_errors_of_packing_name_both_sides(arguments, message):
    with pytest.raises(RuntimeError, match=message):
        pack_int8_into(*arguments)


def test_errors_of_the_others():
    with pytest.raises(RuntimeError, match=r"out is Double; it must be float32"):
        unpack_int8(PACKED, SCALE, torch.float64)
    with pytest.raises(RuntimeError, match=r"scale has shape \[4\] and out has shape \[2, 5, 3\]"):
        unpack_int8(PACKED, SCALE[:4])
    with pytest.raises(RuntimeError, match="x is Float and out is Char"):
        mapped_copy(PACKED, X)
    with pytest.raises(RuntimeError, match=r"x has shape .* and out has shape"):
        mapped_copy(X[:1], X)
    with pytest.raises(RuntimeError, match=r"x has strides .* and out has strides"):
        mapped_copy(torch.empty(2, 3, 5).transpose(1, 2), X)
    with pytest.raises(RuntimeError, match=r"no instruction set 'mmx'.*auto, generic"):
        ops.wire_pack_int8(X, None, 0, PACKED, SCALE, isa="mmx")


def test_shapes_without_data():
    try:
        x = X.to("meta")
    except (RuntimeError, NotImplementedError):
        pytest.skip("this torch has no meta device in Python (1.9 or later)")
    packed, scale = pack_int8(x, 1)
    assert (packed.shape, packed.stride(), scale.shape) == (x.shape, x.stride(), (5,))
    assert unpack_int8(packed, scale, torch.float16).shape == x.shape
    with pytest.raises(RuntimeError, match="it must be float32"):
        pack_int8(x.double())


def test_operators_keep_torchs_rules(monkeypatch, tmp_path):
    """Schema, aliasing and fake tensors, by torch's own check."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # which it sets where it is not
    if not hasattr(getattr(torch, "library", None), "opcheck"):
        pytest.skip("this torch has no torch.library.opcheck (2.4 or later)")
    tests = ("test_schema", "test_faketensor")
    x = values((4, 5, 3))
    packed, scale = pack_int8(x)
    out = torch.empty_like(x)
    for operator, arguments in (
        (ops.wire_pack_int8, (x, 1, 0, packed, scale)),
        (ops.wire_unpack_int8, (packed, scale, out)),
        (ops.mapped_copy, (x, out)),
    ):
        torch.library.opcheck(operator.default, arguments, test_utils=tests)
