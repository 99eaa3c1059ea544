"""Convolution and linear over 8-bit codes on the CPU: every kernel has the bits of the table."""

from __future__ import annotations

import pytest
import torch
from codes_cases import (
    MATRICES,
    SHAPES,
    SIGNS,
    Shape,
    check_conv2d,
    check_linear,
    codes,
    instruction_sets,
    macs,
    ops,
    random_table,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from narrowgauge_kernels.codes import (
    CodeMac,
    CodeMacError,
    Term,
    conv2d_codes,
    conv2d_codes_ref,
    linear_codes,
    linear_codes_ref,
)

pytestmark = pytest.mark.usefixtures("kernels")

EXACT = CodeMac("exact_int8")

#: The machine may be busy, and no fixture here keeps state between examples.
UNHURRIED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]


@pytest.fixture
def _restore_threads():
    """Whatever a test sets the number of threads to, the next one finds it as before."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


class TestAgainstTheTable:
    @pytest.mark.parametrize("name", SHAPES)
    def test_convolution(self, name):
        """Every class of shapes by every kind of multiplier, both memory formats, a padding code
        that is no zero. Types of codes take turns: `test_linear` has all of them by all kinds."""
        shape = SHAPES[name]
        for index, kind in enumerate(macs(True, True)):
            signs = SIGNS[(index + len(name)) % len(SIGNS)]
            x, weight = codes(shape.x, signs[0], 2), codes(shape.weight, signs[1], 3)
            if index % 2:
                x = x.contiguous(memory_format=torch.channels_last)
            check_conv2d(shape, macs(*signs)[kind], x, weight, -77 if signs[0] else 201)

    @pytest.mark.parametrize("signs", SIGNS, ids=str)
    def test_linear(self, signs):
        """Sizes under, at and over the edges of tiles and blocks."""
        for rows, depth, outputs in MATRICES:
            for mac in macs(*signs).values():
                check_linear(mac, codes((rows, depth), signs[0]), codes((outputs, depth), signs[1]))

    def test_leading_dimensions(self):
        """Any number of them, none included."""
        weight = codes((6, 9), True)
        for shape in ((9,), (2, 3, 9), (2, 1, 2, 9)):
            check_linear(EXACT, codes(shape, True), weight)

    @pytest.mark.parametrize("signs", SIGNS, ids=str)
    def test_extreme_codes(self, signs):
        """All operands at either end: where saturating instructions would lose bits."""
        ends = [(-128, 127) if signed else (0, 255) for signed in signs]
        for left in ends[0]:
            for right in ends[1]:
                x = torch.full_like(codes((7, 130), signs[0]), left)
                weight = torch.full_like(codes((17, 130), signs[1]), right)
                for name in ("exact", "structured"):
                    check_linear(macs(*signs)[name], x, weight)

    def test_exact_is_torchs_own(self):
        """The reference itself: against torch's convolution in float64, which is exact here."""
        shape = SHAPES["strides"]
        x, weight = codes(shape.x, True), codes(shape.weight, True)
        expected = torch.nn.functional.conv2d(x.double(), weight.double(), None, *shape.geometry)
        assert torch.equal(conv2d_codes_ref(x, weight, EXACT, *shape.geometry), expected.long())

    def test_sums_up_to_the_last_bit_of_int32(self):
        """2^31 - 1 and its negative are reached, not refused, by every kernel."""
        depth = 7
        assert (2**31 - 1) % depth == 1
        value = (2**31 - 1) // depth
        table = torch.full((256, 256), value, dtype=torch.int32)
        for sign in (1, -1):
            mac = CodeMac("lut8x8", sign * table)
            check_linear(mac, codes((200, depth), True), codes((5, depth), True))

    def test_operands_do_not_commute(self):
        """Activation first, weight second: rows and columns of the table."""
        mac = CodeMac("lut8x8", (torch.arange(256)[:, None] * 3 + torch.zeros(256)).int())
        x, weight = codes((4, 5), True), codes((3, 5), True, 9)
        expected = ((x.long() + 128) * 3).sum(1)[:, None].expand(4, 3)
        assert torch.equal(linear_codes(x, weight, mac).long(), expected)


class TestLayouts:
    @pytest.mark.parametrize("layout", ["transposed", "strided", "expanded", "channels cut"])
    def test_any_strides_are_read_where_they_are(self, layout):
        """Neither operand needs to be contiguous."""
        if layout == "transposed":
            x = codes((2, 11, 9, 4), True).permute(0, 3, 2, 1)
        elif layout == "strided":
            x = codes((2, 4, 18, 33), True)[:, :, ::2, ::3]
        elif layout == "expanded":
            x = codes((1, 4, 1, 11), True).expand(2, 4, 9, 11)
        else:
            x = codes((2, 9, 9, 11), True)[:, 3:7]
        weight = codes((3, 5, 3, 4), True).permute(1, 3, 0, 2)
        shape = Shape(tuple(x.shape), tuple(weight.shape), padding=(1, 2))
        for mac in (EXACT, macs(True, True)["16-bit table"]):
            check_conv2d(shape, mac, x, weight, 5)
        check_linear(EXACT, codes((9, 6), True).t(), codes((14, 18), True)[::2, ::2])

    @pytest.mark.parametrize(
        ("x", "weight"),
        [((0, 3, 5, 5), (4, 3, 3, 3)), ((2, 3, 5, 5), (0, 3, 3, 3)), ((2, 0, 5, 5), (4, 0, 3, 3))],
        ids=["no image", "no output channel", "no input channel"],
    )
    def test_empty(self, x, weight):
        """An empty result is empty; an empty sum is 0, not memory as it was found."""
        for mac in (EXACT, macs(True, True)["wide table"]):
            result = conv2d_codes(codes(x, True), codes(weight, True), mac)
            assert result.shape == (x[0], weight[0], 3, 3)
            assert not result.any()
            assert (
                linear_codes(codes((3, 0), True), codes((2, 0), True), mac).tolist() == [[0, 0]] * 3
            )
            assert linear_codes(codes((0, 4), True), codes((2, 4), True), mac).shape == (0, 2)

    @pytest.mark.usefixtures("_restore_threads")
    def test_bits_do_not_depend_on_threads(self):
        """Blocks change with their number; sums do not."""
        shape = Shape((3, 20, 30, 31), (40, 20, 3, 3), padding=(1, 1))
        x, weight = codes(shape.x, True), codes(shape.weight, True)
        for mac in macs(True, True).values():
            results = []
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                results.append(conv2d_codes(x, weight, mac, *shape.geometry))
            assert torch.equal(results[0], results[1])
            assert torch.equal(results[0], results[2])

    def test_meta(self):
        """Shapes without data, as tracing asks for them."""
        try:
            x = torch.empty(2, 3, 8, 8, dtype=torch.int8, device="meta")
        except RuntimeError:
            pytest.skip("this torch has no meta device in Python (1.9 or later)")
        weight = torch.empty(4, 3, 3, 3, dtype=torch.int8, device="meta")
        result = ops.conv2d_codes(x, weight, None, [], 16384, [2, 2], [1, 1], [1, 1], 1, 0)
        assert (result.shape, result.dtype) == ((2, 4, 4, 4), torch.int32)
        matrix = weight.reshape(12, 9)[:, :8]
        assert ops.linear_codes(x, matrix, None, [], 16384).shape == (2, 3, 8, 12)


@settings(max_examples=25, deadline=None, suppress_health_check=UNHURRIED)
@given(data=st.data())
def test_any_terms_are_their_table(data):
    """Fuzzed terms: the masked products are what the table of the same multiplier gives."""
    signs = data.draw(st.sampled_from(SIGNS))
    byte = st.integers(0, 255)
    shift = st.integers(0, 7)
    term = st.builds(Term, byte, byte, st.integers(-9, 9), shift, shift)
    terms = tuple(data.draw(st.lists(term, min_size=1, max_size=5)))
    structured = CodeMac("structured", None, *signs, terms)
    table = CodeMac("lut8x8", structured.products.int(), *signs)
    seed = data.draw(st.integers(0, 2**31))
    x, weight = codes((11, 50), signs[0], seed), codes((18, 50), signs[1], seed + 1)
    expected = linear_codes(x, weight, table)
    for isa in instruction_sets(structured):
        result = ops.linear_codes(x, weight, *structured.arguments(x.device), isa=isa)
        assert torch.equal(result, expected), isa
    assert torch.equal(expected.long(), linear_codes_ref(x, weight, structured))


class TestMultipliers:
    def test_a_term_is_its_formula(self):
        """By Python's own integers, which are two's complement without end."""
        for signs in SIGNS:
            mac = CodeMac("structured", None, *signs, (Term(0xB4, 0x8F, -3, 2, 1),))
            low = [-128 if signed else 0 for signed in signs]
            for a in (low[0], low[0] + 77, low[0] + 255):
                for b in (low[1], low[1] + 131, low[1] + 255):
                    # Of a signed code the mask's bit 7 is the sign and all bits above it.
                    a_mask = 0xB4 - 256 if signs[0] else 0xB4
                    b_mask = 0x8F - 256 if signs[1] else 0x8F
                    product = -3 * ((a & a_mask) >> 2) * ((b & b_mask) >> 1)
                    assert mac.products[a - low[0], b - low[1]] == product

    def test_largest(self):
        """The greatest magnitude, negative products included."""
        assert EXACT.largest == 128 * 128
        assert CodeMac("exact_int8", None, False, False).largest == 255 * 255
        table = torch.zeros(256, 256, dtype=torch.int32)
        table[3, 4] = -(2**31) + 1
        assert CodeMac("lut8x8", table).largest == 2**31 - 1

    @pytest.mark.parametrize(
        ("make", "message"),
        [
            (lambda: CodeMac("lut"), "no multiplier over codes is called 'lut'"),
            (lambda: CodeMac("lut8x8"), "needs a table"),
            (lambda: CodeMac("lut8x8", random_table(0, 9).long()), "torch.int64 of shape"),
            (lambda: CodeMac("lut8x8", random_table(0, 9)[:, :255]), r"\(256, 255\)"),
            (lambda: CodeMac("structured"), "0 terms"),
            (lambda: CodeMac("exact_int8", terms=(Term(1, 1),)), "1 terms"),
            (lambda: CodeMac("exact_int8", random_table(7, 9)), "differ in 6.... of 65,536"),
            (lambda: Term(256, 0), "a_mask is 256"),
            (lambda: Term(0, 0, 1, 0, 8), "b_shift is 8"),
            (lambda: Term(0, 0, 2**31), "coefficient is 2147483648"),
            (
                lambda: CodeMac("structured", terms=(Term(255, 255, 2**30),)),
                "reaches .* beyond int32",
            ),
            (
                lambda: CodeMac("lut8x8", torch.full((256, 256), -(2**31)).to(torch.int32)),
                "reaches 2147483648, beyond int32",
            ),
        ],
    )
    def test_contradictions_are_refused(self, make, message):
        """When the multiplier is made, not when it first multiplies."""
        with pytest.raises(CodeMacError, match=message):
            make()


class TestRefusals:
    @pytest.mark.parametrize("isa", ["avx1024", "AVX2", ""])
    def test_unknown_instruction_set(self, isa):
        """With what there is."""
        x = codes((2, 3), True)
        with pytest.raises(RuntimeError, match="has here: auto, generic"):
            ops.linear_codes(x, x, None, [], 1, isa=isa)

    def test_a_sum_that_int32_may_not_hold(self):
        """K times the largest product, both in the message."""
        mac = CodeMac("lut8x8", random_table(0, 65536).fill_(2**20))
        x, weight = codes((1, 2048), True), codes((1, 2048), True)
        with pytest.raises(RuntimeError, match="2048 products of magnitude up to 1048576"):
            linear_codes(x, weight, mac)
        assert linear_codes(x[:, 1:], weight[:, 1:], mac).item() == 2047 * 2**20
        deep = codes((1, 512, 2, 2), True)
        with pytest.raises(RuntimeError, match="2048 products"):
            conv2d_codes(deep, deep, mac)

    def test_other_codes_than_the_multipliers(self):
        """A uint8 tensor is not quietly read as int8."""
        signed, unsigned = codes((2, 3), True), codes((2, 3), False)
        with pytest.raises(CodeMacError, match=r"x is torch\.uint8; .* torch\.int8"):
            linear_codes(unsigned, signed, EXACT)
        with pytest.raises(CodeMacError, match=r"weight is torch\.uint8"):
            linear_codes(signed, unsigned, EXACT)
        with pytest.raises(RuntimeError, match="x is Float"):
            ops.linear_codes(signed.float(), signed, None, [], 1)

    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"stride": [0, 1]}, "stride is 0"),
            ({"padding": [0, -1]}, "padding -1"),
            ({"dilation": [1, 0]}, "dilation 0"),
            ({"stride": [1]}, "stride is 1 integers"),
            ({"groups": 2}, "groups is 2"),
            ({"groups": 0}, "groups is 0"),
            ({"x_zero": 128}, "x_zero is 128.*-128 to 127"),
            ({"dilation": [4, 4]}, "less than the 9 that the kernel spans"),
            ({"terms": [1, 2, 3]}, "3 integers"),
            ({"terms": [256, 0, 1, 0, 0]}, "term 0 is out of range"),
            ({"table": torch.zeros(256, 256)}, r"Float.*\[256, 256\]"),
            (
                {"table": torch.zeros(256, 256, dtype=torch.int32), "terms": [1, 1, 1, 0, 0]},
                "two ways",
            ),
        ],
    )
    def test_what_the_operator_itself_refuses(self, changes, message):
        """Each names the number that is wrong."""
        given = {
            "table": None,
            "terms": [],
            "largest": 1,
            "stride": [1, 1],
            "padding": [0, 0],
            "dilation": [1, 1],
            "groups": 1,
            "x_zero": 0,
        }
        x, weight = codes((1, 3, 6, 6), True), codes((4, 3, 3, 3), True)
        ops.conv2d_codes(x, weight, *given.values())
        with pytest.raises(RuntimeError, match=message):
            ops.conv2d_codes(x, weight, *{**given, **changes}.values())

    def test_shapes_that_disagree(self):
        """Both are named."""
        x = codes((2, 3), True)
        with pytest.raises(RuntimeError, match=r"\[2, 3\].*\[4, 5\].*agree in K"):
            linear_codes(x, codes((4, 5), True), EXACT)
        with pytest.raises(RuntimeError, match=r"x has shape \[2, 3\]"):
            conv2d_codes(x, codes((4, 3, 1, 1), True), EXACT)
