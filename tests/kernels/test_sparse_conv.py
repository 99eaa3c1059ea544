"""`sparse_conv2d` on the CPU: against float64, bits of every instruction set, and refusals."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import same_bits
from torch.nn import functional

from narrowgauge_kernels.sparse_conv import (
    packed,
    run_packed,
    sparse_conv2d,
    sparse_conv2d_ref,
    zeros_in,
)

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.narrowgauge

#: x, filters, kernel, stride, padding: every width of a block and its remainders, several slices of
#: channels, tiles in both directions, windows larger than the map, and nothing at all.
CASES = [
    ((1, 128, 7, 7), 32, (3, 3), (1, 1), (1, 1)),
    ((2, 19, 9, 11), 21, (3, 3), (2, 2), (1, 1)),
    ((1, 300, 8, 9), 96, (3, 3), (1, 1), (1, 1)),
    ((3, 5, 8, 8), 7, (5, 5), (1, 1), (2, 2)),
    ((2, 40, 13, 70), 70, (1, 1), (2, 2), (0, 0)),
    ((1, 260, 5, 5), 100, (3, 3), (1, 1), (0, 0)),
    ((1, 3, 130, 131), 16, (5, 5), (2, 2), (2, 2)),
    ((2, 7, 4, 4), 9, (3, 3), (1, 1), (3, 3)),
    ((1, 6, 6, 5), 3, (2, 4), (1, 3), (0, 2)),
    ((1, 1, 1, 1), 1, (1, 1), (1, 1), (0, 0)),
    ((2, 3, 5, 1), 4, (5, 1), (4, 7), (2, 0)),
]
EMPTY = [
    ((0, 3, 5, 5), 4, (3, 3), (1, 1), (1, 1)),
    ((2, 3, 5, 5), 0, (3, 3), (1, 1), (1, 1)),
    ((2, 0, 5, 5), 4, (3, 3), (1, 1), (1, 1)),
]
BOTH = [(True, False), (False, True)]


def inputs(shape, filters, kernel, zeros=0.0, seed=0):
    """Tensors of order one; `zeros` of the map are zeros beside those that ReLU makes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    x[torch.rand(shape, generator=generator) < zeros] = 0.0
    weight = torch.randn((filters, shape[1], *kernel), generator=generator)
    return x, weight, torch.randn(filters, generator=generator)


def exact(x, weight, bias, stride, padding, relus):
    return sparse_conv2d_ref(
        x.double(),
        weight.double(),
        None if bias is None else bias.double(),
        stride,
        padding,
        *relus,
    )


def require_near(result, wanted, depth):
    """Each sum has at most `depth` products of order one."""
    assert result.shape == wanted.shape
    if result.numel():
        difference = (result.double() - wanted).abs().max().item()
        assert difference <= 2e-6 * max(depth, 1) ** 0.5 * max(1.0, wanted.abs().max().item())


@pytest.mark.parametrize("case", [*CASES, *EMPTY], ids=str)
def test_result_is_that_of_the_float64_reference(case):
    shape, filters, kernel, stride, padding = case
    x, weight, bias = inputs(shape, filters, kernel, zeros=0.3)
    for relus, given_bias in itertools.product(BOTH, (bias, None)):
        result = sparse_conv2d(x, weight, given_bias, stride, padding, *relus)
        if 0 in (shape[0], shape[1], filters):
            assert result.shape[:2] == (shape[0], filters)
            wanted = torch.zeros(result.shape, dtype=torch.float64)
            wanted = wanted if given_bias is None else wanted + given_bias.reshape(1, -1, 1, 1)
            wanted = torch.relu(wanted) if relus[1] else wanted
        else:
            wanted = exact(x, weight, given_bias, stride, padding, relus)
        require_near(result, wanted, weight[0].numel() if filters else 0)


@pytest.mark.parametrize("case", CASES[:8], ids=str)
def test_bits_depend_neither_on_instruction_set_nor_threads_nor_layout(case):
    shape, filters, kernel, stride, padding = case
    x, weight, bias = inputs(shape, filters, kernel)
    last = x.contiguous(memory_format=torch.channels_last)
    threads = torch.get_num_threads()
    rest = (list(stride), list(padding), True, True)
    wanted = ops.sparse_conv2d(x, weight, bias, *rest, isa="generic")
    try:
        for count, isa in itertools.product((1, 3), (*ops.cpu_instruction_sets(), "auto")):
            torch.set_num_threads(count)
            assert same_bits(ops.sparse_conv2d(x, weight, bias, *rest, isa=isa), wanted)
            got = ops.sparse_conv2d(last, weight, bias, *rest, isa=isa)
            assert torch.equal(got, wanted)
    finally:
        torch.set_num_threads(threads)


def test_the_result_keeps_the_layout_of_the_map():
    x, weight, bias = inputs((2, 8, 6, 6), 8, (3, 3))
    last = x.contiguous(memory_format=torch.channels_last)
    assert sparse_conv2d(x, weight, bias, 1, 1).is_contiguous()
    result = sparse_conv2d(last, weight, bias, 1, 1)
    assert result.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("how", ["transposed", "slice", "expanded", "offset"])
def test_any_strides_of_map_and_weight(how):
    x, weight, bias = inputs((4, 6, 8, 8), 10, (3, 3))
    if how == "transposed":
        x, weight = x.permute(0, 1, 3, 2), weight.permute(0, 1, 3, 2)
    elif how == "slice":
        x, weight = x[:, ::2, 1:], weight[:, ::2]
    elif how == "expanded":
        x, bias = x[:1].expand(4, 6, 8, 8), bias[:1].expand(10)
    else:
        x = torch.randn(4 * 6 * 8 * 8 + 1)[1:].reshape(4, 6, 8, 8)
    result = sparse_conv2d(x, weight, bias, 1, 1)
    require_near(result, exact(x, weight, bias, 1, 1, (True, False)), 54)


@pytest.mark.parametrize("relu", [True, False])
def test_an_all_zero_map_gives_the_bias_and_one_without_zeros_everything(relu):
    x, weight, bias = inputs((2, 20, 6, 7), 18, (3, 3))
    for zeros in (torch.zeros_like(x), torch.full_like(x, -0.0)):
        result = sparse_conv2d(zeros, weight, bias, 1, 1, relu)
        assert torch.equal(result, bias.reshape(1, -1, 1, 1).expand_as(result))
    full = x.abs() + 0.1
    require_near(
        sparse_conv2d(full, weight, bias, 1, 1, relu),
        exact(full, weight, bias, 1, 1, (False, False)), 180,
    )  # fmt: skip
    if relu:
        assert torch.equal(sparse_conv2d(-full, weight, None, 1, 1), torch.zeros(2, 18, 6, 7))


@pytest.mark.parametrize("relus", [(True, True), (False, False)])
def test_nan_is_not_a_zero_and_reaches_every_result_of_its_windows(relus):
    x, weight, bias = inputs((1, 20, 9, 9), 18, (3, 3))
    x[0, 7, 4, 5] = float("nan")
    for isa in ops.cpu_instruction_sets():
        result = ops.sparse_conv2d(x, weight, bias, [1, 1], [1, 1], *relus, isa=isa)
        wanted = torch.zeros(1, 18, 9, 9, dtype=torch.bool)
        wanted[:, :, 3:6, 4:7] = True
        assert torch.equal(torch.isnan(result), wanted)


def test_infinity_is_multiplied_and_an_infinite_weight_beside_zeros_is_not():
    x = torch.zeros(1, 2, 3, 3)
    x[0, 1, 1, 1] = 2.0
    weight = torch.ones(1, 2, 3, 3)
    weight[0, 0] = float("inf")
    for isa in ops.cpu_instruction_sets():
        rest = ([1, 1], [1, 1], True, False)
        result = ops.sparse_conv2d(x, weight, None, *rest, isa=isa)
        assert torch.equal(result, torch.full((1, 1, 3, 3), 2.0))
        x[0, 1, 1, 1] = float("inf")
        result = ops.sparse_conv2d(x, torch.ones_like(weight), None, *rest, isa=isa)
        assert torch.equal(result, torch.full((1, 1, 3, 3), float("inf")))
        x[0, 1, 1, 1] = 2.0


@pytest.mark.parametrize("relus", list(itertools.product((True, False), repeat=2)))
def test_gradients_are_those_of_the_float64_reference(relus):
    x, weight, bias = inputs((2, 6, 7, 8), 5, (3, 3), zeros=0.2)
    ours = [each.clone().requires_grad_() for each in (x, weight, bias)]
    theirs = [each.double().requires_grad_() for each in (x, weight, bias)]
    result = sparse_conv2d(*ours, (2, 1), (1, 0), *relus)
    wanted = sparse_conv2d_ref(*theirs, (2, 1), (1, 0), *relus)
    grad = torch.randn(result.shape, generator=torch.Generator().manual_seed(3))
    result.backward(grad)
    wanted.backward(grad.double())
    for one, other in zip(ours, theirs):
        assert (one.grad.double() - other.grad).abs().max().item() <= 1e-4


def test_only_what_asks_for_a_gradient_gets_one_and_nan_lets_it_through():
    x, weight, bias = inputs((1, 2, 4, 4), 3, (3, 3))
    x[0, 0, 0, 0] = float("nan")
    leaf = x.clone().requires_grad_()
    sparse_conv2d(leaf, weight, bias, 1, 1).sum().backward()
    assert leaf.grad[0, 0, 0, 0].abs().item() > 0
    assert not sparse_conv2d(x, weight, bias).requires_grad


def test_a_packed_weight_gives_the_same_bits():
    for shape, filters, kernel, stride, padding in CASES[:4]:
        x, weight, bias = inputs(shape, filters, kernel)
        rest = (bias, stride, padding, True, False)
        wanted = run_packed(x, weight, None, *rest)
        assert same_bits(run_packed(x, weight, packed(weight), *rest), wanted)


def test_a_packed_weight_of_another_layer_is_refused():
    x, weight, bias = inputs((1, 8, 5, 5), 8, (3, 3))
    with pytest.raises(RuntimeError, match="not what sparse_pack gives"):
        run_packed(x, weight, packed(weight[:, :4]), bias, (1, 1), (1, 1), True, False)


@pytest.mark.parametrize("size", [0, 1, 15, 1000, 200_001])
def test_zeros_are_counted(size):
    x = torch.randn(size, generator=torch.Generator().manual_seed(0))
    x[::3], x[1::7] = 0.0, -0.0
    x[2::11] = float("nan")
    for isa in ops.cpu_instruction_sets():
        assert ops.sparse_zeros(x, False, isa=isa) == int((x == 0).sum())
        assert ops.sparse_zeros(x, True, isa=isa) == int((x <= 0).sum())
    assert zeros_in(x[::2], True) == int((x[::2] <= 0).sum())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.zeros(3, 4, 4)}, "needs 4 dimensions"),
        ({"x": torch.zeros(1, 3, 4, 4).double()}, "must be float32"),
        ({"x": torch.zeros(1, 2, 4, 4)}, "agree in C"),
        ({"weight": torch.zeros(2, 3, 3, 0)}, "no window"),
        ({"weight": torch.zeros(2, 3, 9, 3)}, "smaller than the window"),
        ({"bias": torch.zeros(3)}, "there are 2 filters"),
        ({"stride": (0, 1)}, "stride is 0"),
        ({"padding": (0, -1)}, "padding is -1"),
        ({"padding": (2**40, 1)}, "padding is"),
        ({"padding": (2**31 - 1, 2**31 - 1)}, "more than 64 bits address"),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(change, message):
    given_inputs = {
        "x": torch.zeros(1, 3, 4, 4), "weight": torch.zeros(2, 3, 3, 3), "bias": None,
        "stride": (1, 1), "padding": (1, 1), **change,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=message):
        sparse_conv2d(*given_inputs.values())


def test_meta_tensors_give_the_shape():
    try:
        x = torch.empty(2, 3, 9, 9, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device in Python (1.9 or later)")
    weight = torch.empty(4, 3, 3, 3, device="meta")
    result = ops.sparse_conv2d(x, weight, None, [2, 2], [1, 1], True, False)
    assert result.shape == (2, 4, 5, 5)
    assert result.device.type == "meta"


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_any_shape(data):
    sizes = data.draw(st.tuples(*[st.integers(1, top) for top in (3, 40, 20, 20, 70)]))
    batch, channels, height, width, filters = sizes
    kernel = data.draw(st.tuples(st.integers(1, 5), st.integers(1, 5)))
    stride = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    padding = data.draw(st.tuples(st.integers(0, 5), st.integers(0, 5)))
    if height + 2 * padding[0] < kernel[0] or width + 2 * padding[1] < kernel[1]:
        return
    relus = data.draw(st.tuples(st.booleans(), st.booleans()))
    x, weight, bias = inputs((batch, channels, height, width), filters, kernel, zeros=0.6)
    if data.draw(st.booleans()):
        x = x.contiguous(memory_format=torch.channels_last)
    result = sparse_conv2d(x, weight, bias, stride, padding, *relus)
    require_near(result, exact(x, weight, bias, stride, padding, relus), weight[0].numel())


def test_the_reference_is_torchs_own_layers():
    x, weight, bias = inputs((2, 3, 6, 6), 4, (3, 3))
    wanted = functional.conv2d(functional.relu(x), weight, bias, padding=1)
    assert torch.equal(sparse_conv2d_ref(x, weight, bias, 1, 1), wanted)
    assert torch.equal(sparse_conv2d_ref(x, weight, bias, 1, 1, True, True), wanted.relu())
