"""`batch_norm` on the CPU against float64, forward and backward, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import same_bits

from narrowgauge_kernels.batch_norm import batch_norm, batch_norm_ref

pytestmark = pytest.mark.usefixtures("kernels")

ops = torch.ops.narrowgauge

#: Less than a vector, some and a rest; many images of few values; more than a block in one run, and
#: in several; one image; one channel.
SHAPES = [
    (2, 3, 1, 1),
    (4, 5, 3, 2),
    (7, 3, 4, 4),
    (3, 2, 7, 11),
    (1000, 4, 1, 1),
    (90, 2, 7, 7),
    (2, 2, 67, 67),
    (1, 3, 224, 224),
    (32, 16, 32, 32),
    (33, 1, 9, 8),
    (6, 4),
    (5, 3, 12),
    (2, 3, 4, 5, 6),
]
EPS = 1e-5


def values(shape, seed=0):
    """Channels of means from -2 to some hundreds, and deviations from 0.1 to 10."""
    generator = torch.Generator().manual_seed(seed)
    ranks = torch.arange(shape[1], dtype=torch.float32).reshape([1, -1] + [1] * (len(shape) - 2))
    x = torch.randn(shape, generator=generator) * (0.1 + 3 * ranks) + 40 * ranks - 2
    weight = torch.rand(shape[1], generator=generator) + 0.5
    return x, weight, torch.randn(shape[1], generator=generator)


def both(x, weight, bias, residual=None, rectify=False):
    """Results and gradients by the kernels, and by the reference in float64."""
    found = []
    for dtype, normalise in ((torch.float32, batch_norm), (torch.float64, batch_norm_ref)):
        given = (x, weight, bias, residual)
        leaves = [None if t is None else t.to(dtype).requires_grad_() for t in given]
        results = normalise(*leaves[:3], EPS, leaves[3], rectify)
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9)).to(dtype)
        wanted = [leaf for leaf in leaves if leaf is not None]
        found.append([*results, *torch.autograd.grad(results[0], wanted, grad)])
    return found


def apart(one, other):
    return (one.double() - other).norm() / other.norm().clamp_min(1e-30)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_results_and_gradients_are_those_of_float64(shape):
    x, weight, bias = values(shape)
    ours, exact = both(x, weight, bias)
    y, mean, variance, by_x, by_weight, by_bias = map(apart, ours, exact)
    # A mean 40 deviations off leaves a value 5e-6 of its deviation in float32.
    assert max(mean, variance, by_bias) < 1e-5
    assert max(y, by_weight) < 1e-4
    # Of so few values the gradient by x is what is left of larger ones.
    assert by_x < (1e-4 if x.numel() // x.shape[1] > 8 else 1e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("added", [False, True])
def test_what_follows_is_done_too(shape, added):
    """Where float32 and float64 fall on different sides of 0, none of these values does."""
    x, weight, bias = values(shape)
    residual = values(shape, seed=5)[0] / 50 if added else None
    ours, exact = both(x, weight, bias, residual, rectify=True)
    assert (ours[0] >= 0).all()
    assert torch.equal(ours[0] > 0, exact[0] > 0)
    assert apart(ours[0], exact[0]) < 1e-4
    few = x.numel() // x.shape[1] <= 8
    for mine, theirs in zip(ours[3:], exact[3:]):
        assert apart(mine, theirs) < (1e-2 if few else 1e-4)
    if added:
        # The gradient by what is added is the one that passes, to the bit.
        grad = torch.randn(x.shape, generator=torch.Generator().manual_seed(9))
        assert same_bits(ours[-1], torch.where(ours[0] > 0, grad, torch.zeros_like(grad)))


def test_without_rectifying_the_gradient_by_what_is_added_is_the_incoming_one():
    x, weight, bias = values((6, 4, 5, 3))
    ours, exact = both(x, weight, bias, values(x.shape, seed=5)[0])
    assert max(map(apart, ours, exact)) < 1e-4
    assert torch.equal(ours[-1].double(), exact[-1])


def test_nan_is_not_rectified_and_lets_its_gradient_pass():
    x = torch.randn((2, 2, 7, 5), generator=torch.Generator().manual_seed(2))
    residual = torch.zeros_like(x)
    residual[0, 0, 0, 0] = residual[1, 1, 6, 4] = float("nan")
    grad = torch.ones_like(x)
    for isa in ops.cpu_instruction_sets():
        y, mean, variance = ops.batch_norm(x, None, None, EPS, residual, True, isa=isa)
        assert torch.isnan(y).sum() == 2
        parts = (x, None, mean, variance, EPS, y, True)
        passed = ops.batch_norm_grad(grad, *parts, isa=isa)[3]
        assert torch.equal(passed, (~(y <= 0)).float())


@pytest.mark.parametrize("left_out", ["weight", "bias", "both"])
def test_parameters_that_there_are_not(left_out):
    x, weight, bias = values((6, 4, 5, 3))
    weight = None if left_out in ("weight", "both") else weight
    bias = None if left_out in ("bias", "both") else bias
    ours, exact = both(x, weight, bias)
    assert max(map(apart, ours, exact)) < 1e-4


def test_a_mean_far_from_zero_costs_no_more_than_its_rounding():
    x = 1e4 + torch.randn((64, 3, 8, 8), generator=torch.Generator().manual_seed(1))
    ours, exact = both(x, None, None)
    assert apart(ours[2], exact[2]) < 1e-6, "the variance about the exact mean"
    assert apart(ours[0], exact[0]) < 1e-3
    assert batch_norm(x, None, None, EPS)[2].min() > 0


@pytest.mark.parametrize("value", [1.1, -10.1, 1000.1, 12345.678])
@pytest.mark.parametrize("size", [3, 32, 67])
def test_a_channel_of_one_value_has_it_for_its_mean(value, size):
    """Lanes of float32 all lose in one direction there, and 1 / sqrt(eps) shows how much."""
    x = torch.full((32, 2, size, size), value)
    for isa in ops.cpu_instruction_sets():
        y, mean, variance = ops.batch_norm(x, None, None, EPS, isa=isa)
        assert torch.equal(mean, x[0, :, 0, 0])
        assert variance.tolist() == [0.0, 0.0]
        assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("value", [1.1, 1000.1])
def test_values_that_hardly_differ_are_normalised(value):
    noise = torch.randn((32, 2, 32, 32), generator=torch.Generator().manual_seed(8))
    x = value + value * 1e-6 * noise
    ours, exact = both(x, None, None)
    assert (ours[0].double() - exact[0]).abs().max() < 0.05
    assert apart(ours[1], exact[1]) < 1e-7


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_are_the_same_on_every_instruction_set_and_with_any_threads(shape):
    x, weight, bias = values(shape)
    grad = values(shape, seed=3)[0]
    beside = values(shape, seed=4)[0]
    plain = ops.batch_norm(x, weight, bias, EPS, isa="generic")
    more = ops.batch_norm(x, weight, bias, EPS, beside, True, isa="generic")
    by_plain = ops.batch_norm_grad(grad, x, weight, *plain[1:], EPS, isa="generic")
    masked = (grad, x, weight, *more[1:], EPS, more[0], True)
    by_more = ops.batch_norm_grad(*masked, isa="generic")
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            for isa in ops.cpu_instruction_sets():
                got = ops.batch_norm(x, weight, bias, EPS, isa=isa)
                assert all(map(same_bits, got, plain)), isa
                got = ops.batch_norm(x, weight, bias, EPS, beside, True, isa=isa)
                assert all(map(same_bits, got, more)), isa
                got = ops.batch_norm_grad(grad, x, weight, *plain[1:], EPS, isa=isa)
                assert all(map(same_bits, got, by_plain)), isa
                got = ops.batch_norm_grad(*masked, isa=isa)
                assert all(map(same_bits, got, by_more)), isa
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("layout", ["channels_last", "slice", "expanded", "transposed"])
def test_any_strides_are_gathered(layout):
    x, weight, bias = values((4, 6, 5, 7))
    if layout == "channels_last":
        x = x.contiguous(memory_format=torch.channels_last)
    elif layout == "slice":
        x, weight, bias = x[:, ::2, 1:], weight[::2], bias[::2]
    elif layout == "expanded":
        x = x[:, :, :1].expand(4, 6, 5, 7)
    else:
        x, weight, bias = x.transpose(0, 1), weight[:4], bias[:4]
    grad = values(x.shape, seed=3)[0]
    wanted = ops.batch_norm(x.contiguous(), weight, bias, EPS)
    got = ops.batch_norm(x, weight, bias, EPS)
    assert all(map(same_bits, got, wanted))
    assert got[0].is_contiguous()
    turned = grad.transpose(2, 3).contiguous().transpose(2, 3)
    one = ops.batch_norm_grad(turned, x, weight, *got[1:], EPS)
    other = ops.batch_norm_grad(grad, x.contiguous(), weight, *got[1:], EPS)
    assert all(map(same_bits, one, other))


@pytest.mark.parametrize("bad", ["nan", "inf"])
@pytest.mark.parametrize("place", [0, 30, 63])
def test_what_is_no_number_makes_its_channel_none(bad, place):
    """In a vector, and in what a vector leaves over; the other channel stays as it is."""
    x, weight, bias = values((2, 2, 7, 5))
    clean = ops.batch_norm(x, weight, bias, EPS)
    spoilt = x.clone()
    spoilt[place // 35, 0, place % 35 // 5, place % 5] = float(bad)
    for isa in ops.cpu_instruction_sets():
        y, mean, variance = ops.batch_norm(spoilt, weight, bias, EPS, isa=isa)
        assert torch.isnan(y[:, 0]).all()
        assert torch.isnan(variance[0])
        assert not torch.isfinite(mean[0])
        assert same_bits(y[:, 1], clean[0][:, 1])
        grad = torch.ones_like(x)
        parts = (grad, spoilt, weight, mean, variance, EPS)
        by_x, by_weight, *_ = ops.batch_norm_grad(*parts, isa=isa)
        assert torch.isnan(by_x[:, 0]).all()
        assert torch.isnan(by_weight[0])
        assert torch.isfinite(by_x[:, 1]).all()


def test_only_gradients_that_are_wanted_are_given_and_none_twice():
    x, weight, bias = values((3, 2, 4, 4))
    weight.requires_grad_()
    y, mean, variance = batch_norm(x, weight, bias, EPS)
    assert not mean.requires_grad
    assert not variance.requires_grad
    (by_weight,) = torch.autograd.grad(y.sum(), weight)
    assert by_weight.shape == (2,)
    x.requires_grad_()
    (once,) = torch.autograd.grad(
        batch_norm(x, weight, bias, EPS)[0].pow(2).sum(), x, create_graph=True
    )
    with pytest.raises(RuntimeError, match="once_differentiable"):
        once.sum().backward()


@pytest.mark.parametrize(
    ("x", "weight", "said"),
    [
        (torch.ones(3), None, "must be"),
        (torch.ones(2, 3, dtype=torch.float64), None, "must be float32"),
        (torch.ones(0, 3, 4, 4), None, "no value for a channel"),
        (torch.ones(2, 3, 0, 4), None, "no value for a channel"),
        (torch.ones(2, 3, 4, 4), torch.ones(4), "weight is"),
        (torch.ones(2, 3, 4, 4), torch.ones(3, dtype=torch.float64), "weight is"),
    ],
)
def test_what_does_not_fit_is_refused(x, weight, said):
    with pytest.raises(RuntimeError, match=said):
        batch_norm(x, weight, None, EPS)


def test_a_gradient_that_does_not_fit_is_refused():
    x = torch.ones(2, 3, 4, 4)
    parts = ops.batch_norm(x, None, None, EPS)[1:]
    with pytest.raises(RuntimeError, match="grad is"):
        ops.batch_norm_grad(torch.ones(2, 3, 4, 5), x, None, *parts, EPS)
    with pytest.raises(RuntimeError, match="residual is"):
        ops.batch_norm(x, None, None, EPS, torch.ones(2, 3, 4, 1))
    with pytest.raises(RuntimeError, match="rectified is"):
        ops.batch_norm_grad(x, x, None, *parts, EPS, x.double())
    with pytest.raises(RuntimeError, match="mean is"):
        ops.batch_norm_grad(x, x, None, torch.ones(4), parts[1], EPS)
    with pytest.raises(RuntimeError, match="mmx"):
        ops.batch_norm(x, None, None, EPS, isa="mmx")


def test_no_channel_is_no_error():
    y, mean, variance = batch_norm(torch.ones(2, 0, 4, 4), None, None, EPS)
    assert (y.shape, mean.shape, variance.shape) == ((2, 0, 4, 4), (0,), (0,))


def test_shapes_are_known_without_values():
    try:
        x = torch.empty(2, 3, 4, 4, device="meta")
    except RuntimeError:
        pytest.skip("this torch has no meta device")
    with pytest.raises(RuntimeError, match="weight is"):
        ops.batch_norm(torch.ones(2, 3, 4, 4), x[0, :, 0, 0], None, EPS)
    with pytest.raises(RuntimeError, match="mean is"):
        ops.batch_norm_grad(x, x, None, x[:, 0, 0, 0], x[0, :, 0, 0], EPS)
    shapes = [each.shape for each in ops.batch_norm(x, None, None, EPS)]
    assert shapes == [(2, 3, 4, 4), (3,), (3,)]
    channel = torch.empty(3, device="meta")
    found = ops.batch_norm_grad(x, x, None, channel, channel, EPS)
    assert [each.shape for each in found] == [*shapes, (0,)]
    found = ops.batch_norm_grad(x, x, None, channel, channel, EPS, x, True)
    assert [each.shape for each in found] == [*shapes, shapes[0]]
