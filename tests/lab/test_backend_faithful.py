"""The original's algorithm: gradients against float64, its bytes, and its bug."""

from __future__ import annotations

from typing import Any, Dict, List, Sequence, Tuple

import pytest
import torch
from hetero_cases import CASES, Case, gradients, relative_error

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.layers.hetero.backends import BackendOptions, WholeBackend, make_backend
from narrowgauge_lab.layers.hetero.backends.faithful import bytes_per_call, tiled
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem

CPU = torch.device("cpu")
TOLERANCE = {"fp32": 1e-5, "fp16": 3e-3}


def backend(
    problem: Problem, precision: str = "fp32", ledger: Any = None, stride_bug: bool = False
) -> WholeBackend:
    options = BackendOptions(stride_bug=stride_bug)
    kept = Ledger("bytes") if ledger is None else ledger
    return make_backend("faithful", "conv", problem, precision, CPU, kept, options)


def test_nothing_is_missing_anywhere() -> None:
    with pytest.raises(NotApplicableError, match="no bf16"):
        backend(Problem("conv2d"), "bf16")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_products_are_those_of_float64(case: Case, precision: str) -> None:
    made, exact = backend(case.problem, precision), gradients(case)

    found = (
        made.forward(case.x, case.weight, case.bias),
        made.input_grad(case.grad, case.weight, case.x.shape),
        made.weight_grad(case.grad, case.x, case.weight.shape),
    )

    for name, result, wanted in zip(("y", "gx", "gw"), found, exact):
        assert (name, result.dtype, result.shape) == (name, torch.float32, wanted.shape)
        assert relative_error(result, wanted) <= TOLERANCE[precision], name


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_ledger_is_told_what_the_formula_says(case: Case, precision: str) -> None:
    ledger = Ledger("serial")
    made = backend(case.problem, precision, ledger)

    made.forward(case.x, case.weight, case.bias)
    made.input_grad(case.grad, case.weight, case.x.shape)
    made.weight_grad(case.grad, case.x, case.weight.shape)

    told: Dict[str, List[int]] = {}
    for each in ledger.intervals():
        sums = told.setdefault(each.pass_, [0, 0])
        sums[0] += each.to_device
        sums[1] += each.from_device
    wanted = bytes_per_call(case.problem, case.x.shape, case.weight.shape, precision)
    assert {name: tuple(sums) for name, sums in told.items()} == wanted
    stages = {each.stage for each in ledger.intervals()}
    common = {"to_device", "refit", "compute", "from_device", "reshape"}
    assert stages == common | ({"quantise"} if precision == "fp16" else set())


def test_the_gradient_is_repeated_for_each_input_channel_of_its_group() -> None:
    grad = torch.arange(2.0 * 4).view(2, 4, 1, 1)

    one = tiled(grad, inputs=3, groups=1).flatten().tolist()
    two = tiled(grad, inputs=4, groups=2).flatten().tolist()

    assert one == [0, 1, 2, 3] * 3 + [4, 5, 6, 7] * 3
    assert two == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5, 4, 5, 6, 7, 6, 7]


@pytest.mark.parametrize(("stride", "wrong"), [(1, 0.0), (2, 1.45)])
def test_the_originals_bug_is_at_stride_two(stride: int, wrong: float) -> None:
    """Layer 7 of the original's tables, 16 to 32 channels of 32 x 32, with 4 images."""
    torch.manual_seed(0)
    problem = Problem("conv2d", (stride, stride), (1, 1))
    x, weight = torch.randn(4, 16, 32, 32), torch.randn(32, 16, 3, 3)
    grad = torch.randn(problem.output_shape(x.shape, weight.shape))
    case = Case("layer 7", problem, x, weight, None, grad)
    exact = gradients(case)[2]

    bugged = backend(problem, stride_bug=True).weight_grad(grad, x, weight.shape)
    right = backend(problem).weight_grad(grad, x, weight.shape)

    assert relative_error(right, exact) <= 1e-5
    assert abs(relative_error(bugged, exact) - wrong) <= 0.05


def test_where_the_bug_leaves_too_little_it_is_refused() -> None:
    problem = Problem("conv2d", (2, 2), (1, 1))
    x, grad = torch.randn(1, 2, 2, 2), torch.randn(1, 2, 1, 1)

    with pytest.raises(NotApplicableError, match="2 x 2 here"):
        backend(problem, stride_bug=True).weight_grad(grad, x, (2, 2, 3, 3))


def test_no_images_move_nothing() -> None:
    ledger = Ledger("bytes")
    problem = Problem("conv2d", (1, 1), (1, 1))
    made, weight = backend(problem, ledger=ledger), torch.randn(4, 3, 3, 3)
    x = torch.zeros(0, 3, 8, 8)

    y = made.forward(x, weight, None)

    assert y.shape == (0, 4, 8, 8)
    assert made.input_grad(y, weight, x.shape).shape == x.shape
    assert torch.equal(made.weight_grad(y, x, weight.shape), torch.zeros_like(weight))
    assert ledger.bytes_moved() == (0, 0)


def test_what_is_sent_is_a_copy_and_what_comes_back_too() -> None:
    case = CASES[0]
    before = [each.clone() for each in (case.x, case.weight, case.grad)]
    made = backend(case.problem)

    first = made.forward(case.x, case.weight, case.bias)
    kept = first.clone()
    made.forward(case.x * 2, case.weight, case.bias)
    made.weight_grad(case.grad, case.x, case.weight.shape)

    assert torch.equal(first, kept)
    after = (case.x, case.weight, case.grad)
    assert all(torch.equal(*pair) for pair in zip(before, after))


def test_fp16_gradients_underflow_as_there_is_no_loss_scaling() -> None:
    case = CASES[0]
    tiny = case.grad * 1e-9

    found = backend(case.problem, "fp16").weight_grad(tiny, case.x, case.weight.shape)

    assert not found.any()


def resnet20(batch: int) -> List[Tuple[Problem, Sequence[int], Sequence[int]]]:
    """(problem, input shape, weight shape) of its convolutions on 32 x 32 images: the first, then
    three stages of six, the second and third beginning with stride 2."""
    layers: List[Tuple[Problem, Sequence[int], Sequence[int]]] = []
    inputs, size = 3, 32
    for number in range(19):
        outputs = 16 << max(0, number - 1) // 6
        stride = 2 if number in (7, 13) else 1
        problem = Problem("conv2d", (stride, stride), (1, 1))
        layers.append((problem, (batch, inputs, size, size), (outputs, inputs, 3, 3)))
        inputs, size = outputs, size // stride
    return layers


def test_a_step_of_resnet20_moves_what_the_formula_says() -> None:
    """Batch 32 at fp32. Counted: x, w, y; g, w, gx (not of the first layer, whose input needs no
    gradient); x, the repeated g, and the images' own weight gradients."""
    layers = resnet20(32)
    per_layer = [bytes_per_call(*layer) for layer in layers]
    del per_layer[0]["input_grad"]

    total = sum(sum(moved) for passes in per_layer for moved in passes.values())
    repeated = sum(
        4 * shape[1] * torch.Size(problem.output_shape(shape, weight)).numel()
        for problem, shape, weight in layers
    )
    half = [bytes_per_call(*layer, precision="fp16") for layer in layers]
    del half[0]["input_grad"]

    print(f"\n{len(layers)} layers: {total / 1e6:.1f} MB, of which repeated {repeated / 1e6:.1f}")
    assert len(layers) == 19
    assert 690e6 <= total <= 760e6
    assert 0.7 <= repeated / total <= 0.9
    sent = sum(moved[0] for passes in half for moved in passes.values())
    full = sum(moved[0] for passes in per_layer for moved in passes.values())
    assert sent * 2 == full
