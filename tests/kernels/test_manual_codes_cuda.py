"""Convolution and linear over 8-bit codes on CUDA: bit for bit what the table says, by every kernel
there. Needs a GPU and a build for it.

PYTHONPATH=src python3 -m narrowgauge_kernels.build --cuda auto
PYTHONPATH=src python3 -m pytest -m gpu tests/kernels
"""

from __future__ import annotations

import numpy
import pytest
import torch
from manual_codes_device_cases import (
    SHAPES,
    TERMS,
    Shape,
    codes,
    expected,
    operands,
    random_table,
    term_table,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("kernels")]

ops = torch.ops.narrowgauge

SIGNS = [(False, False), (False, True), (True, False), (True, True)]
BY_TERMS = ("auto", "tensor", "dot", "direct")
BY_TABLE = ("auto", "table", "direct")

#: As SHAPES, and of many tiles, with more than one of each along pixels, channels and depth.
LARGE = {
    "late": Shape(9, 256, 7, 7, 192, (3, 3), padding=(1, 1)),
    "early": Shape(2, 3, 64, 61, 64, (7, 7), (2, 2), (3, 3)),
    "many groups": Shape(3, 96, 15, 14, 132, (3, 3), padding=(1, 1), dilation=(1, 2), groups=3),
}
EVERY = {**SHAPES, **LARGE}


def skip_without(isa):
    if isa == "tensor" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("int8 products of 16 x 8 x 32 need compute capability 8.0")


def conv(shape, x, weight, isa="auto", **chosen):
    """The operator itself, whose isa the public function does not take."""
    table, terms = chosen.get("table"), chosen.get("terms", ())
    largest = chosen.get("largest")
    if largest is None:
        products = term_table(terms, x.dtype == torch.int8, weight.dtype == torch.int8)
        products = products if table is None else table.cpu().numpy()
        largest = int(numpy.abs(products.astype(numpy.int64)).max())
    return ops.conv2d_codes(
        x,
        weight,
        table,
        [number for term in terms for number in term],
        largest,
        shape.stride,
        shape.padding,
        shape.dilation,
        shape.groups,
        chosen.get("x_zero", 0),
        isa=isa,
    )


def moved(array):
    return torch.from_numpy(array).cuda()


def check(shape, isa, signs=(True, True), x_zero=0, **chosen):
    """One kernel against numpy's sums of the table's products, every number."""
    skip_without(isa)
    x, weight = operands(shape, *signs)
    table = chosen.get("table")
    products = term_table(chosen["terms"], *signs) if table is None else table
    if table is not None:
        chosen["table"] = moved(table)
    given = conv(shape, moved(x), moved(weight), isa, x_zero=x_zero, **chosen)
    wanted = torch.from_numpy(expected(shape, x, weight, products, x_zero))
    assert torch.equal(given.cpu(), wanted)


@pytest.mark.parametrize("isa", BY_TERMS)
@pytest.mark.parametrize("name", EVERY)
def test_terms_on_every_shape(name, isa):
    check(EVERY[name], isa, terms=TERMS["masked"], x_zero=-77)


@pytest.mark.parametrize("isa", BY_TABLE)
@pytest.mark.parametrize("name", EVERY)
def test_tables_on_every_shape(name, isa):
    check(EVERY[name], isa, table=random_table(-32768, 32767), x_zero=-77)


@pytest.mark.parametrize("isa", BY_TERMS)
@pytest.mark.parametrize("signs", SIGNS, ids=str)
@pytest.mark.parametrize("name", TERMS)
def test_every_kind_of_term_and_code(name, signs, isa):
    zero = -128 if signs[0] else 255
    for shape in (SHAPES["words"], Shape(300, 1000, 1, 1, 140)):
        check(shape, isa, signs, terms=TERMS[name], x_zero=zero)


@pytest.mark.parametrize("isa", BY_TABLE)
@pytest.mark.parametrize(
    ("least", "most"),
    [(0, 65535), (-1, 65534), (5, 65540), (-70000, -5000), (-70000, 69071), (7, 7)],
)
def test_tables_of_every_range(least, most, isa):
    for signs in SIGNS:
        check(SHAPES["3x3"], isa, signs, table=random_table(least, most), x_zero=3)
    check(Shape(1100, 130, 1, 1, 70), isa, table=random_table(least, most))


@pytest.mark.parametrize("isa", BY_TERMS)
def test_a_large_product_of_terms(isa):
    """Against the sums in float64, which are exact."""
    skip_without(isa)
    shape = Shape(1500, 2304, 1, 1, 1030)
    x, weight = (moved(each) for each in operands(shape, True, True))
    given = conv(shape, x, weight, isa, terms=TERMS["masked"])
    wanted = torch.zeros(1500, 1030, dtype=torch.float64, device="cuda")
    for a_mask, b_mask, coefficient, _, _ in TERMS["masked"]:
        left, right = (
            (each.flatten(1) & (mask - 256 if mask > 127 else mask)).double()
            for each, mask in ((x, a_mask), (weight, b_mask))
        )
        wanted += coefficient * (left @ right.t())
    assert torch.equal(given.flatten(1), wanted.int())


@pytest.mark.parametrize("isa", BY_TABLE)
def test_a_large_product_by_table(isa):
    """Several tiles along every side; against lookups by torch."""
    shape = Shape(2100, 500, 1, 1, 200)
    x, weight = (moved(each) for each in operands(shape, False, True))
    table = moved(random_table(-32000, 32767))
    given = conv(shape, x, weight, isa, table=table)
    wanted = torch.zeros(2100, 200, dtype=torch.int64, device="cuda")
    left, right = x.flatten(1).long(), weight.flatten(1).long() + 128
    for k in range(500):
        wanted += table[left[:, k, None], right[None, :, k]]
    assert torch.equal(given.flatten(1), wanted.int())


def test_tables_on_tiles_of_896_pixels():
    """Which an H200 takes for this layer; against a lookup per product, and images that leave one
    of its tiles partly empty."""
    table = moved(random_table(-32000, 32767))
    for batch in (32, 33):
        shape = Shape(batch, 256, 14, 14, 1024)
        x, weight = (moved(each) for each in operands(shape, True, True))
        wanted = conv(shape, x, weight, "direct", table=table)
        assert torch.equal(conv(shape, x, weight, "table", table=table), wanted)


@pytest.mark.parametrize("table", [False, True])
def test_layouts(table):
    """channels_last stays so; what is neither, or begins anywhere, gives the same numbers."""
    shape = SHAPES["3x3"]
    x, weight = (moved(each) for each in operands(shape, True, True))
    chosen = {"table": moved(random_table(-30000, 30000))} if table else {"terms": TERMS["masked"]}
    wanted = conv(shape, x, weight, **chosen)
    last = x.contiguous(memory_format=torch.channels_last)
    given = conv(shape, last, weight, **chosen)
    assert given.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(given, wanted)
    unaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(2, 6, 5, 16)
    unaligned.copy_(x.permute(0, 2, 3, 1))
    assert torch.equal(conv(shape, unaligned.permute(0, 3, 1, 2), weight, **chosen), wanted)
    spread = torch.stack([x, x], dim=4)[..., 0]
    turned = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    assert torch.equal(conv(shape, spread, turned, **chosen), wanted)


def tiled_isa():
    return "tensor" if torch.cuda.get_device_capability() >= (8, 0) else "dot"


@pytest.mark.parametrize("batch", [0, 1, 3])
@pytest.mark.parametrize(("height", "width"), [(1, 1), (7, 7), (5, 10), (14, 14), (56, 56)])
@pytest.mark.parametrize("channels", [1, 3, 5, 64, 65])
def test_planes_of_codes_are_turned(channels, height, width, batch):
    """The identity gives x back, to the code, as it does of permute().contiguous(), which lies as
    tiles read it; from an address that is no multiple of 4, too."""
    shape = Shape(batch, channels, height, width, channels)
    x = moved(codes((batch, channels, height, width), True, 6))
    identity = torch.eye(channels, dtype=torch.int8, device="cuda")[:, :, None, None]
    rows = x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)
    odd = torch.empty(x.numel() + 1, dtype=x.dtype, device="cuda")[1:].view(x.shape)
    odd.copy_(x)
    for each in (x, rows, odd):
        assert torch.equal(conv(shape, each, identity, tiled_isa()), x.int())


def test_planes_of_very_many_images_are_turned():
    """More than a grid has along y and z."""
    shape = Shape(70001, 8, 1, 2, 8)
    x = moved(codes((70001, 8, 1, 2), True, 7))
    identity = torch.eye(8, dtype=torch.int8, device="cuda")[:, :, None, None]
    assert torch.equal(conv(shape, x, identity, tiled_isa()), x.int())


@pytest.mark.parametrize("kernel", [(1, 2), (3, 3), (5, 5)])
@pytest.mark.parametrize("channels", [1, 3, 5, 64, 65, 300])
def test_weights_of_several_taps_are_turned(channels, kernel):
    """The same numbers as of weights in another order of memory, which torch turns."""
    shape = Shape(2, channels, 9, 8, 21, kernel, padding=(1, 1))
    x, weight = (moved(each) for each in operands(shape, True, True))
    other = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    given = conv(shape, x, weight, tiled_isa(), terms=TERMS["masked"])
    assert torch.equal(given, conv(shape, x, other, tiled_isa(), terms=TERMS["masked"]))
    assert torch.equal(given, conv(shape, x, weight, "direct", terms=TERMS["masked"]))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("outputs", [32, 33, 96])
@pytest.mark.parametrize("kernel", [(1, 1), (1, 2), (3, 3)])
@pytest.mark.parametrize("channels", [1, 6, 64, 130])
def test_weights_of_tables_are_turned(channels, kernel, outputs, groups):
    """Outputs to the end: by our kernel where a group has a multiple of 32, else by torch."""
    skip_without("table")
    shape = Shape(
        2, groups * channels, 9, 8, groups * outputs, kernel, (1, 1), (1, 1), (1, 1), groups
    )
    x, weight = (moved(each) for each in operands(shape, True, True))
    other = weight.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    table = moved(random_table(-30000, 31000))
    given = conv(shape, x, weight, "table", table=table)
    assert torch.equal(given, conv(shape, x, other, "table", table=table))
    assert torch.equal(given, conv(shape, x, weight, "direct", table=table))


@pytest.mark.parametrize("isa", ["auto", "tensor", "table", "direct"])
def test_linear_of_any_rank(isa):
    skip_without(isa)
    x, weight = moved(codes((3, 4, 5, 130), True, 1)), moved(codes((67, 130), True, 2))
    table = moved(random_table(-9, 12345)) if isa == "table" else None
    flat = Shape(60, 130, 1, 1, 67)
    wanted = conv(flat, x.reshape(60, 130, 1, 1), weight.reshape(67, 130, 1, 1), table=table)
    given = ops.linear_codes(x, weight, table, [], 16384, isa=isa)
    assert given.shape == (3, 4, 5, 67)
    assert torch.equal(given.reshape(60, 67, 1, 1), wanted)


@pytest.mark.parametrize("table", [False, True])
def test_empty(table):
    """No launch of zero blocks, and sums of nothing are zero."""
    made = moved(random_table(1, 5)) if table else None
    for x_shape, weight_shape, out in (
        ((0, 8), (5, 8), (0, 5)),
        ((3, 0), (5, 0), (3, 5)),
        ((3, 8), (0, 8), (3, 0)),
    ):
        x = torch.zeros(x_shape, dtype=torch.int8, device="cuda")
        weight = torch.zeros(weight_shape, dtype=torch.int8, device="cuda")
        given = ops.linear_codes(x, weight, made, [], 16384)
        assert given.shape == out
        assert not given.any()
    torch.cuda.synchronize()


def test_padding_alone_is_multiplied():
    """An x without rows, all of whose windows lie in the padding."""
    shape = Shape(2, 16, 0, 3, 5, (2, 2), padding=(1, 0))
    check(shape, "table", table=random_table(1, 9), x_zero=4)
    check(shape, "tensor", terms=(), x_zero=4)


def test_names_of_kernels_are_checked():
    x = torch.zeros(2, 8, dtype=torch.int8, device="cuda")
    table = moved(random_table(0, 1))
    for given, isa in ((table, "tensor"), (None, "table"), (table, "avx2"), (None, "")):
        with pytest.raises(RuntimeError, match="is no kernel of CUDA for"):
            ops.linear_codes(x, x, given, [], 16384, isa=isa)


@pytest.mark.parametrize("table", [False, True])
def test_a_cuda_graph_captures_it_on_its_stream(table):
    """No allocation outside torch's, no synchronisation, no default stream."""
    if not hasattr(torch.cuda, "CUDAGraph"):
        pytest.skip("this torch has no CUDA graphs (1.10 or later)")
    shape = Shape(4, 64, 14, 14, 96, (3, 3), padding=(1, 1))
    x, weight = (moved(each) for each in operands(shape, True, True))
    chosen = {"table": moved(random_table(0, 60000))} if table else {"terms": TERMS["shifted"]}
    chosen["largest"] = 60000  # which the terms' is less than; finding it out would synchronise
    conv(shape, x, weight, **chosen)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = conv(shape, x, weight, **chosen)
    x.copy_(moved(operands(shape, True, True, seed=9)[0]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, conv(shape, x, weight, **chosen))


def test_offsets_past_two_to_the_31():
    """Of x and of the result, by both tiled kernels: the last image is like the first."""
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GiB of device memory")
    shape = Shape(2**31 // (64 * 128 * 128) + 2, 64, 128, 128, 68)
    x = torch.zeros(shape.batch, 64, 128, 128, dtype=torch.uint8, device="cuda")
    x = x.contiguous(memory_format=torch.channels_last)
    first = moved(codes((64, 128, 128), False, 3))
    x[0], x[-1] = first, first
    weight = moved(codes((68, 64, 1, 1), True, 4))
    for chosen in ({"terms": TERMS["masked"]}, {"table": moved(random_table(-30000, 30000))}):
        out = conv(shape, x, weight, **chosen)
        small = shape._replace(batch=1)
        wanted = conv(small, x[:1], weight, **chosen)
        assert torch.equal(out[-1], wanted[0])
        assert torch.equal(out[0], wanted[0])
        del out
