"""What a generated convolution asks of its tensors, keeps between calls, and launches."""

from __future__ import annotations

import pytest
import torch
from sparse_cases import Emulated, expected, operands, tolerance

from narrowgauge_kernels.sparse import launching
from narrowgauge_kernels.sparse.errors import DeviceError, SparseArgumentError
from narrowgauge_kernels.sparse.geometry import derive
from narrowgauge_kernels.sparse.launching import Convolution, launches
from narrowgauge_kernels.sparse.ordering import OrderedWeight
from narrowgauge_kernels.sparse.shapes import Shape, Tile, Variant

SHAPE, TILE, VARIANT = Shape(1, 4, 5, 5, 32), Tile(5, 5, 2), Variant(bias=True)


@pytest.fixture(scope="module")
def machine(tmp_path_factory):
    return Emulated(tmp_path_factory.mktemp("sparse"))


@pytest.fixture
def convolution(machine):
    return Convolution(SHAPE, TILE, VARIANT, machine=machine)


def close(y, x, weight, bias):
    wanted = expected(SHAPE, VARIANT, x, weight, bias)
    return float((y.double() - wanted).abs().max()) <= tolerance(VARIANT, wanted)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x, w, b: (x[:, :3], w, b), "x is .*, and the kernel is for"),
        (lambda x, w, b: (x, w[:4], b), "weight is .*, and the kernel is for"),
        (lambda x, w, b: (x, w, b[:1]), "bias is .*, and the kernel is for"),
        (lambda x, w, b: (x.double(), w, b), r"x is torch\.float64"),
        (lambda x, w, b: (x, w.half(), b), r"weight is torch\.float16"),
        (lambda x, w, b: (x, w, None), "no bias was given"),
    ],
)
def test_a_tensor_that_the_kernel_is_not_for(convolution, change, words):
    with pytest.raises(SparseArgumentError, match=words):
        convolution(*change(*operands(SHAPE)))


@pytest.mark.skipif(not hasattr(torch, "inference_mode"), reason="torch has no device meta")
def test_tensors_of_two_devices(convolution):
    x, weight, bias = operands(SHAPE)
    with pytest.raises(SparseArgumentError, match="weight is on meta, and x on cpu"):
        convolution(x, weight.to("meta"), bias)


def test_a_bias_that_the_kernel_would_not_add(machine):
    convolution = Convolution(SHAPE, TILE, Variant(), machine=machine)
    with pytest.raises(SparseArgumentError, match="a bias was given"):
        convolution(*operands(SHAPE))


@pytest.mark.parametrize("crossover", [-0.1, 1.1, float("nan")])
def test_a_crossover_is_a_share(machine, crossover):
    with pytest.raises(SparseArgumentError, match="crossover is"):
        Convolution(SHAPE, TILE, VARIANT, crossover, machine)


def test_only_a_path_that_counts_has_a_count(convolution):
    with pytest.raises(SparseArgumentError, match="the path fused counts no zeros"):
        convolution.zeros(torch.device("cpu"))


def test_a_tensor_of_the_cpu_is_refused_by_a_cuda_machine():
    """Before anything is compiled."""
    machine = object.__new__(launching.CudaMachine)
    with pytest.raises(SparseArgumentError, match="x is on cpu, and must be on a CUDA device"):
        Convolution(SHAPE, TILE, VARIANT, machine=machine)(*operands(SHAPE))


def test_without_a_driver_making_one_says_so(monkeypatch):
    def missing(*_):
        raise DeviceError("the CUDA driver is not here")

    monkeypatch.setattr(launching, "CudaDriver", missing)
    launching._cuda.cache_clear()
    with pytest.raises(DeviceError, match="the CUDA driver is not here"):
        Convolution(SHAPE, TILE, VARIANT)


def ordered_of(weight):
    return weight.permute(1, 2, 3, 0).contiguous()


def test_a_weight_is_put_in_order_once_and_again_when_it_changes():
    """In the memory that graphs may read."""
    _, weight, _ = operands(SHAPE)
    order = OrderedWeight()
    kept = order.of(weight, False)
    assert torch.equal(kept, ordered_of(weight))
    assert order.of(weight.detach(), False) is kept
    before = kept.clone()
    order.of(weight, False)
    weight.mul_(2)
    assert order.of(weight, False) is kept
    assert torch.equal(kept, 2 * before)
    other = weight.clone()
    assert order.of(other, False).data_ptr() != kept.data_ptr()


def test_a_one_by_one_weight_of_one_filter_is_a_copy_too():
    """Its order is the same already, and what is kept is written to."""
    weight = torch.ones(1, 4, 1, 1)
    kept = OrderedWeight().of(weight, False)
    assert kept.data_ptr() != weight.data_ptr()


def test_a_convolution_follows_its_weight(convolution):
    x, weight, bias = operands(SHAPE)
    for _ in range(2):
        assert close(convolution(x, weight, bias), x, weight, bias)
        weight.mul_(2)
    other = weight.flip(0).contiguous()
    assert close(convolution(x, other, bias), x, other, bias)


def test_a_weight_that_is_trained_is_put_in_order_at_each_call():
    weight = operands(SHAPE)[1].requires_grad_()
    order = OrderedWeight()
    first, second = order.of(weight, False), order.of(weight, False)
    assert first.data_ptr() != second.data_ptr()
    assert not first.requires_grad
    frozen = weight.detach()
    assert order.of(frozen, False) is order.of(frozen, False)
    never = OrderedWeight(keeps=False)
    assert never.of(frozen, False) is not never.of(frozen, False)


def test_what_a_graph_reads_stays_while_other_weights_come():
    """The memory is not given back, and not another's."""
    weights = [operands(SHAPE, seed=seed)[1] for seed in range(3)]
    order = OrderedWeight()
    inside = order.of(weights[0], True)
    assert order.of(weights[0], False) is not inside, "a graph's own memory is not kept"
    captured = order.of(weights[0], True)
    assert captured is order.of(weights[0], False)
    order.of(weights[1], False)
    order.of(weights[2], False)
    assert [each.data_ptr() for each in order._retired] == [captured.data_ptr()]
    assert torch.equal(captured, ordered_of(weights[0]))


def test_a_change_seen_while_recording_is_made_again_outside():
    """What is recorded has not run; without this the next call would read old values."""
    weight = operands(SHAPE)[1]
    order = OrderedWeight()
    kept = order.of(weight, False)
    weight.mul_(2)
    assert order.of(weight, True) is kept
    kept.zero_()  # as if the copy had been recorded alone
    assert torch.equal(order.of(weight, False), ordered_of(weight))
    kept.zero_()
    assert not order.of(weight, False).any(), "then it is not made again"


def test_a_recording_machine_is_asked(machine, convolution, monkeypatch):
    x, weight, bias = operands(SHAPE)
    monkeypatch.setattr(machine, "recording", True)
    assert close(convolution(x, weight, bias), x, weight, bias)
    assert convolution._weight._kept is None


@pytest.mark.skipif(not hasattr(torch, "inference_mode"), reason="torch has no inference mode")
def test_a_weight_of_inference_mode_is_never_kept(convolution):
    """Its changes leave no trace."""
    with torch.inference_mode():
        x, weight, bias = operands(SHAPE)
        assert close(convolution(x, weight, bias), x, weight, bias)
        weight.mul_(2)
        assert close(convolution(x, weight, bias), x, weight, bias)


def test_x_of_another_order_is_copied_and_needs_no_gradient(convolution):
    x, weight, bias = operands(SHAPE)
    weight.requires_grad_()
    turned = x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_()
    y = convolution(turned, weight, bias)
    assert not y.requires_grad
    assert close(y, x, weight.detach(), bias)


def test_the_result_is_in_the_layout(machine):
    convolution = Convolution(SHAPE, TILE, Variant(layout="nhwc"), machine=machine)
    x, weight, _ = operands(SHAPE)
    y = convolution(x, weight)
    assert y.is_contiguous(memory_format=torch.channels_last)


def test_one_launch_is_enough_for_fused(machine, convolution):
    """No clearing, no list, no reduction beside it."""
    machine.launched.clear()
    convolution(*operands(SHAPE))
    assert machine.launched == ["sparse_convolve"]


@pytest.mark.parametrize(
    ("tile", "variant", "kernels"),
    [
        (TILE, Variant(), ["sparse_convolve"]),
        (Tile(5, 5, 2, finish="launch"), Variant(), ["sparse_convolve", "sparse_reduce"]),
        (Tile(5, 5, 4, finish="launch"), Variant(), ["sparse_convolve"]),
        (Tile(5, 5, 2, finish="launch"), Variant(accumulation="atomic"), ["sparse_convolve"]),
        (TILE, Variant(path="lists"), ["sparse_produce", "sparse_convolve"]),
        (
            TILE,
            Variant(path="switched"),
            ["sparse_produce", "sparse_convolve", "dense_convolve"],
        ),
    ],
)
def test_the_launches_of_a_path(tile, variant, kernels):
    """A launch for partial sums only where there are some to add in order."""
    plan = launches(SHAPE, tile, variant, derive(SHAPE, tile, variant, "9.0"))
    assert [each.kernel for each in plan] == kernels
    convolve = next(each for each in plan if each.kernel == "sparse_convolve")
    assert convolve.grid == (1, 4 // tile.channels)


def test_both_ways_to_add_up_give_the_same_bits(machine):
    """Four sums a thread in the block that comes last, one in a launch: in one order."""
    shape, (x, weight, bias) = Shape(1, 16, 5, 5, 32), operands(Shape(1, 16, 5, 5, 32))
    last, launched = (
        Convolution(shape, Tile(5, 5, 2, finish=how), VARIANT, machine=machine)(x, weight, bias)
        for how in ("tail", "launch")
    )
    assert torch.equal(last, launched)
