"""The MAC policies by their definition: golden vectors, an independent model, special operands."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from manual_cases import MACS, SPECIALS, same_words

from narrowgauge_kernels.errors import BuildArgumentError
from narrowgauge_kernels.mac import CODE_MACS, FLOAT_MACS, Mac, reference

#: Activation, weight, product of the published multiplier (its own Python).
GOLDEN = """
3f5b22d1,3ef126e9->3eda273c 3ef126e9,3f5b22d1->3efcb787 3f800000,3f800000->40000000
3fc00000,3fc00000->40400000 bdcccccd,3e99999a->bd5a740c 3f333333,bf666666->bf317e4a
40490fd0,402df84d->415612f9 3fffffff,3fffffff->4007f6e4
"""


def golden(index):
    """A column of GOLDEN as float32."""
    rows = [each.replace("->", ",").split(",") for each in GOLDEN.split()]
    return np.array([int(row[index], 16) for row in rows], np.uint32).view(np.float32)


def ama5(a, b):
    """The 4x4 block by its truth table, not by the closed form."""
    if a == 0 or b == 0:
        return 0
    if a == 1:
        return b
    if a % 2 == 0:
        return 0 if b < 8 else 16 * a
    return b if b < 8 else b + 16 * (a - 1)


def by_blocks(a, b, bits):
    """A product of `bits` bits out of 4x4 blocks, added without error."""
    steps = range(0, bits, 4)
    return sum(ama5(a >> i & 15, b >> j & 15) << i + j for i in steps for j in steps)


def slow_axfpm(a, b, fixed):
    """The published algorithm on Python's integers, for ordinary numbers."""
    words = [struct.unpack("<I", struct.pack("<f", each))[0] for each in (a, b)]
    product = by_blocks(*((word & 0x7FFFFF) | 0x800000 for word in words), bits=24)
    exponent = sum(word >> 23 & 255 for word in words) - 254 + 1
    if product >= 1 << 48:
        product >>= 1
        exponent += fixed
    value = (product >> 24) / 2**23 * 2.0**exponent
    return -value if (words[0] ^ words[1]) >> 31 else value


def test_golden_vectors():
    """Of the published multiplier, the one whose product overflows among them."""
    got = reference(Mac("axfpm_faithful"), golden(0), golden(1))
    assert same_words(got, golden(2))
    fixed = reference(Mac("axfpm_fixed"), golden(0), golden(1))
    factors = fixed / golden(2)
    assert factors.tolist() == [1, 1, 1, 1, 1, 1, 1, 2]


def test_bfloat16_golden_vector():
    """0.856 times 0.471, as published."""
    assert reference(Mac("axbf16"), np.float32(0.856), np.float32(0.471)) == 0.42578125


@pytest.mark.parametrize("name", ["axfpm_faithful", "axfpm_fixed"])
def test_axfpm_is_the_sum_of_its_blocks(name):
    """Against the truth table of the 4x4 block, 36 of them to a product."""
    generator = np.random.default_rng(0)
    a, b = (generator.normal(size=400).astype(np.float32) for _ in range(2))
    wanted = [slow_axfpm(x, y, name == "axfpm_fixed") for x, y in zip(a.tolist(), b.tolist())]
    assert same_words(reference(Mac(name), a, b), np.array(wanted, np.float32))


def test_axbf16_is_one_block_of_eight_bits():
    """Over all 128 x 128 significands."""
    fractions = np.arange(128, dtype=np.uint32) << 16 | 0x3F800000
    a, b = (x.view(np.float32).ravel() for x in np.meshgrid(fractions, fractions, indexing="ij"))
    products = [by_blocks(int(x * 128), int(y * 128), 8) for x, y in zip(a, b)]
    wanted = [(p >> 8 if p < 1 << 16 else p >> 9) / 64 for p in products]
    assert same_words(reference(Mac("axbf16"), a, b), np.array(wanted, np.float32))


def test_published_error_statistics():
    """MRED on U(0, 1) .409 (Ax-FPM) and .406 (bfloat16), as measured on the original."""
    generator = np.random.default_rng(1)
    a, b = (generator.random(200_000).astype(np.float32) for _ in range(2))
    for name, wanted in (("axfpm_faithful", 0.409), ("axbf16", 0.406)):
        exact = a.astype(np.float64) * b
        error = np.abs(reference(Mac(name), a, b) / exact - 1)
        assert abs(np.mean(error) - wanted) < 0.006
    error = reference(Mac("axfpm_fixed"), a, b) / exact - 1
    assert 0.030 < error.min() < 0.035
    assert 0.99 < error.max() < 1


def test_mitchell_is_piecewise_linear():
    """Never above the product, at most 1/9 below it, and exact for powers of two."""
    generator = np.random.default_rng(2)
    a, b = (generator.normal(size=20_000).astype(np.float32) for _ in range(2))
    exact = a.astype(np.float64) * b
    error = reference(Mac("mitchell"), a, b) / exact - 1
    assert -1 / 9 - 1e-6 <= error.min() < -0.11
    assert error.max() <= 1e-7
    powers = np.float32(2.0) ** np.arange(-30, 31, dtype=np.float32)
    assert same_words(reference(Mac("mitchell"), powers, a[:61]), powers * a[:61])


@pytest.mark.parametrize("bits", [1, 7, 11, 22, 23])
def test_truncated_cuts_toward_zero(bits):
    """By frexp, and one rounding of the product of what is left."""
    generator = np.random.default_rng(3)
    a, b = (generator.normal(size=5_000).astype(np.float32) for _ in range(2))

    def cut(x):
        fraction, exponent = np.frexp(x.astype(np.float64))
        return np.ldexp(np.trunc(fraction * 2.0 ** (bits + 1)), exponent - bits - 1)

    assert same_words(reference(Mac("truncated", bits), a, b), np.float32(cut(a) * cut(b)))


@pytest.mark.parametrize("mac", MACS, ids=str)
def test_special_operands(mac):
    """NaN, infinities, zeros and subnormals by every policy's rule, in every combination."""
    a, b = (x.ravel() for x in np.meshgrid(SPECIALS, SPECIALS, indexing="ij"))
    got = reference(mac, a, b)
    least = {"axfpm_faithful": 1e-36, "axfpm_fixed": 1e-36, "exact_fp32": 0, "truncated": 0}
    threshold = least.get(mac.name, 2.0**-126)
    # In Python's floats: numpy warns of a signalling NaN that it widens.
    size_a, size_b = (np.array([abs(each) for each in x.tolist()]) for x in (a, b))
    zero_a, zero_b = ((size < threshold) | (size == 0) for size in (size_a, size_b))
    infinite = np.isinf(a) | np.isinf(b)
    undefined = np.isnan(a) | np.isnan(b) | (infinite & (zero_a | zero_b))
    if mac.name == "truncated":  # which may cut a subnormal to nothing
        least_cut = 2.0**-149 * 2 ** (23 - mac.bits)
        zero_a, zero_b = size_a < least_cut, size_b < least_cut
        undefined |= infinite & (zero_a | zero_b)
    assert np.array_equal(np.isnan(got), undefined)
    negative = np.signbit(a) ^ np.signbit(b)
    assert np.array_equal(np.signbit(got)[~undefined], negative[~undefined])
    assert np.isinf(got[infinite & ~undefined]).all()
    assert not got[(zero_a | zero_b) & ~undefined].any()
    if mac.name not in ("exact_fp32", "truncated"):
        assert not (np.abs(got) < 2.0**-126)[got != 0].any()


@pytest.mark.parametrize("name", ["axfpm_faithful", "axfpm_fixed", "axbf16", "mitchell"])
def test_exponents_that_leave_the_range(name):
    """Zero below, infinity above, and no product between them is subnormal."""
    exponents = np.arange(-119, 128, dtype=np.float64)
    a, b = np.meshgrid(1.5 * 2.0**exponents, -1.75 * 2.0**exponents)
    got = reference(Mac(name), a.astype(np.float32), b.astype(np.float32))
    total = np.add.outer(exponents, exponents) + (name != "mitchell")
    assert np.array_equal(got == 0, total < -126)
    top = 128 - (name == "mitchell")  # 1.5 x 1.75 carries there
    assert np.array_equal(np.isinf(got), total >= top) or name == "axfpm_fixed"
    assert np.signbit(got).all()
    finite = np.abs(got[np.isfinite(got) & (got != 0)])
    assert finite.min() >= 2.0**-126


def test_operands_do_not_commute():
    """Activation first: the published multiplier gives .426 one way and .494 the other."""
    a, b = np.float32(0.856), np.float32(0.471)
    for name in ("axfpm_faithful", "axfpm_fixed", "axbf16"):
        assert reference(Mac(name), a, b) != reference(Mac(name), b, a)


def test_shapes_broadcast():
    """Scalars, empty arrays and views."""
    for mac in MACS:
        assert reference(mac, np.ones((0, 3), np.float32), np.ones(3, np.float32)).shape == (0, 3)
        assert reference(mac, np.float32(1), np.ones((4, 1), np.float32)).shape == (4, 1)
        wide = np.arange(12, dtype=np.float32).reshape(3, 4)
        wanted = reference(mac, wide.T.copy(), wide.T.copy())
        assert same_words(reference(mac, wide.T, wide.T), wanted)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("mitchel",), "no MAC policy 'mitchel'"),
        (("truncated",), "keeps 0 bits"),
        (("truncated", 24), "keeps 24 bits"),
        (("mitchell", 3), "takes no bits"),
        (("custom",), "has the library ''"),
        (("mitchell", 0, "x.so"), "has the library 'x.so'"),
    ],
)
def test_policies_that_make_no_sense(arguments, message):
    """Refused when they are made."""
    with pytest.raises(BuildArgumentError, match=message):
        Mac(*arguments)


@pytest.mark.parametrize("mac", [*map(Mac, CODE_MACS), Mac("custom", library="x.so")], ids=str)
def test_no_reference_where_there_is_none(mac):
    """Codes are not float32, and a user's function is not known here."""
    with pytest.raises(BuildArgumentError, match="no reference"):
        reference(mac, np.ones(1, np.float32), np.ones(1, np.float32))


def test_every_policy_is_tested():
    """A new one has to be added to the cases."""
    assert {mac.name for mac in MACS} == set(FLOAT_MACS)
