"""Back-propagation written out, held to autograd in float64."""

from __future__ import annotations

import math
from typing import Any, Callable, List, Sequence, Tuple

import pytest
import torch
import torch.nn.functional as F

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab import written_out

#: Sums of up to a few hundred products of numbers near 1.
TOLERANCE = 1e-12


def _random(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def _assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """As `difference <= tolerance`, which NaN fails."""
    assert found.shape == expected.shape
    assert found.dtype == expected.dtype
    if found.numel():
        assert float((found - expected).abs().max()) <= TOLERANCE


def _by_autograd(
    function: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]
) -> Tuple[torch.Tensor, torch.Tensor, List[torch.Tensor]]:
    """What it gives, a gradient by that, and the gradients by the tensors."""
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    found = function(*leaves)
    above = _random(*found.shape, seed=9)
    return found.detach(), above, list(torch.autograd.grad(found, leaves, above))


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, not contiguous."""
    spread = tensor.repeat_interleave(2, -1)[..., ::2]
    assert spread.numel() < 2 or not spread.is_contiguous()
    return spread


DENSE = [(1, 1, 1), (1, 7, 3), (5, 3, 10), (0, 4, 2)]


@pytest.mark.parametrize(("batch", "inputs", "outputs"), DENSE)
@pytest.mark.parametrize("laid", [torch.clone, _strided], ids=["contiguous", "strided"])
def test_dense(batch: int, inputs: int, outputs: int, laid: Any) -> None:
    tensors = [
        laid(_random(batch, inputs)),
        laid(_random(outputs, inputs, seed=1)),
        laid(_random(outputs, seed=2)),
    ]
    expected, above, gradients = _by_autograd(F.linear, tensors)

    _assert_close(written_out.dense(*tensors), expected)
    found = written_out.dense_backward(tensors[0], tensors[1], laid(above))
    for mine, its in zip(found, gradients):
        _assert_close(mine, its)


#: batch, channels in and out, height, width, kernel, stride, padding, groups.
CONVOLUTIONS = [
    (1, 1, 1, 3, 3, (3, 3), 1, 0, 1),
    (3, 2, 5, 7, 6, (3, 2), 1, 1, 1),
    (2, 4, 6, 9, 8, (3, 3), 2, 1, 2),  # the last column is in no window
    (1, 6, 6, 5, 5, (5, 5), 3, 2, 6),
    (2, 3, 4, 8, 11, (1, 1), 4, 0, 1),
    (0, 2, 2, 6, 6, (3, 3), 1, 1, 2),
]


@pytest.mark.parametrize("shape", CONVOLUTIONS, ids=str)
@pytest.mark.parametrize("laid", [torch.clone, _strided], ids=["contiguous", "strided"])
def test_convolution(shape: Any, laid: Any) -> None:
    batch, inputs, outputs, height, width, kernel, stride, padding, groups = shape
    tensors = [
        laid(_random(batch, inputs, height, width)),
        laid(_random(outputs, inputs // groups, *kernel, seed=1)),
        laid(_random(outputs, seed=2)),
    ]
    how = {"stride": stride, "padding": padding, "groups": groups}
    expected, above, gradients = _by_autograd(lambda *each: F.conv2d(*each, **how), tensors)

    _assert_close(written_out.convolution(*tensors, **how), expected)
    found = written_out.convolution_backward(tensors[0], tensors[1], laid(above), **how)
    for mine, its in zip(found, gradients):
        _assert_close(mine, its)


#: shape, window, stride; windows that overlap, leave pixels out, or lie apart.
POOLS = [
    ((2, 3, 6, 6), 2, None),
    ((1, 1, 7, 5), 3, 2),
    ((2, 2, 7, 7), 2, 3),
    ((1, 4, 5, 5), 5, 1),
]


@pytest.mark.parametrize(("shape", "size", "stride"), POOLS, ids=str)
@pytest.mark.parametrize("kind", ["max", "mean"])
@pytest.mark.parametrize("laid", [torch.clone, _strided], ids=["contiguous", "strided"])
def test_pooling(shape: Any, size: int, stride: Any, kind: str, laid: Any) -> None:
    reference = F.max_pool2d if kind == "max" else F.avg_pool2d
    forward = getattr(written_out, f"{kind}_pool")
    backward = getattr(written_out, f"{kind}_pool_backward")
    images = laid(_random(*shape))
    expected, above, (gradient,) = _by_autograd(lambda x: reference(x, size, stride), [images])

    _assert_close(forward(images, size, stride), expected)
    _assert_close(backward(images, laid(above), size, stride), gradient)


@pytest.mark.parametrize("kind", ["max", "mean"])
def test_pooling_of_no_image(kind: str) -> None:
    """torch 1.8 refuses it."""
    images = _random(0, 2, 7, 5)

    pooled = getattr(written_out, f"{kind}_pool")(images, 2)

    assert pooled.shape == (0, 2, 3, 2)
    back = getattr(written_out, f"{kind}_pool_backward")(images, pooled, 2)
    assert back.shape == images.shape


def test_of_equal_values_the_first_takes_the_gradient() -> None:
    flat = torch.zeros(1, 1, 4, 6, dtype=torch.float64)
    _, above, (gradient,) = _by_autograd(lambda x: F.max_pool2d(x, 2), [flat])

    found = written_out.max_pool_backward(flat, above, 2)

    _assert_close(found, gradient)
    assert int((found != 0).sum()) == 6


ACTIVATIONS = {"sigmoid": torch.sigmoid, "tanh": torch.tanh, "relu": torch.relu}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (5, 3), (0, 4), (2, 3, 4, 5)], ids=str)
@pytest.mark.parametrize("laid", [torch.clone, _strided], ids=["contiguous", "strided"])
def test_activations(name: str, shape: Any, laid: Any) -> None:
    given = laid(_random(*shape))
    expected, above, (gradient,) = _by_autograd(ACTIVATIONS[name], [given])

    _assert_close(getattr(written_out, name)(given), expected)
    _assert_close(getattr(written_out, f"{name}_backward")(given, laid(above)), gradient)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_saturated_neurons_have_a_limit_and_no_nan(name: str) -> None:
    far = torch.tensor([-1e4, -0.0, 0.0, 1e4], dtype=torch.float64)
    expected, above, (gradient,) = _by_autograd(ACTIVATIONS[name], [far])

    _assert_close(getattr(written_out, name)(far), expected)
    _assert_close(getattr(written_out, f"{name}_backward")(far, above), gradient)


def _quadratic(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = F.one_hot(labels, z.shape[1]).to(z.dtype)
    return F.mse_loss(torch.sigmoid(z), wanted, reduction="sum") / 2 / len(z)


def _cross_entropy(z: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    wanted = F.one_hot(labels, z.shape[1]).to(z.dtype)
    return F.binary_cross_entropy_with_logits(z, wanted, reduction="sum") / len(z)


COSTS = {
    "quadratic": _quadratic,
    "cross_entropy": _cross_entropy,
    "log_likelihood": F.cross_entropy,
}


@pytest.mark.parametrize("name", COSTS)
@pytest.mark.parametrize(("batch", "classes"), [(1, 2), (7, 10), (3, 1)])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["near", "saturated"])
@pytest.mark.parametrize("laid", [torch.clone, _strided], ids=["contiguous", "strided"])
def test_costs(name: str, batch: int, classes: int, size: float, laid: Any) -> None:
    outputs = laid(_random(batch, classes) * size)
    labels = torch.arange(batch) % classes
    leaf = outputs.detach().clone().requires_grad_()
    expected = COSTS[name](leaf, labels)
    (gradient,) = torch.autograd.grad(expected, leaf)

    _assert_close(getattr(written_out, name)(outputs, labels), expected.detach())
    _assert_close(getattr(written_out, f"{name}_backward")(outputs, labels), gradient)


@pytest.mark.parametrize("name", COSTS)
def test_no_image_has_no_cost_and_an_empty_gradient(name: str) -> None:
    outputs, labels = _random(0, 10), torch.zeros(0, dtype=torch.int64)

    assert math.isnan(float(getattr(written_out, name)(outputs, labels)))
    assert getattr(written_out, f"{name}_backward")(outputs, labels).shape == (0, 10)


def test_the_quadratic_cost_of_a_saturated_output_teaches_little() -> None:
    """The book's chapter 3: σ' has to cancel, and in the quadratic cost it does not."""
    outputs, labels = torch.full((1, 10), 8.0, dtype=torch.float64), torch.tensor([3])

    slow = written_out.quadratic_backward(outputs, labels)
    fast = written_out.cross_entropy_backward(outputs, labels)

    wrong = torch.arange(10) != 3
    assert bool((fast[0, wrong] > 0.99).all())
    assert bool((slow[0, wrong] < 1e-3).all())


@pytest.mark.parametrize(("l1", "l2"), [(0.0, 0.3), (0.2, 0.0), (0.2, 0.3)])
def test_penalty(l1: float, l2: float) -> None:
    weights = [_random(3, 4), _random(2, 1, 3, 3), torch.zeros(2, dtype=torch.float64)]
    leaves = [each.clone().requires_grad_() for each in weights]
    parts = [l1 * each.abs().sum() + l2 / 2 * each.pow(2).sum() for each in leaves]
    expected = parts[0] + parts[1] + parts[2]
    gradients = torch.autograd.grad(expected, leaves)

    _assert_close(written_out.penalty(weights, l1, l2), expected.detach())
    for mine, its in zip(written_out.penalty_backward(weights, l1, l2), gradients):
        _assert_close(mine, its)


NAN = float("nan")


@pytest.mark.parametrize("name", ["sigmoid", "tanh", "relu"])
def test_nan_goes_through_activations(name: str) -> None:
    given = torch.tensor([1.0, NAN, -1.0], dtype=torch.float64)
    above = torch.ones_like(given)
    expected, _, _ = _by_autograd(ACTIVATIONS[name], [given])

    found = getattr(written_out, name)(given)
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    lost = torch.where(torch.isnan(given), given, above)
    assert bool(torch.isnan(getattr(written_out, f"{name}_backward")(given.abs(), lost)[1]))


def test_nan_goes_through_layers_and_costs() -> None:
    images = _random(2, 2, 4, 4)
    images[1, 0, 2, 2] = NAN
    filters, biases = _random(3, 2, 3, 3), _random(3)
    labels = torch.tensor([0, 1])

    found = written_out.convolution(images, filters, biases, padding=1)
    expected = F.conv2d(images, filters, biases, padding=1)
    assert torch.equal(torch.isnan(found), torch.isnan(expected))
    gradients = written_out.convolution_backward(images, filters, torch.ones_like(found), padding=1)
    assert bool(torch.isnan(gradients.weights).any())
    for pool in (written_out.max_pool, written_out.mean_pool):
        assert torch.isnan(pool(images, 2)).nonzero().tolist() == [[1, 0, 1, 1]]
    dense = written_out.dense(images.flatten(1), _random(3, 32), biases)
    assert torch.isnan(dense).any(1).tolist() == [False, True]
    for name in COSTS:
        assert math.isnan(float(getattr(written_out, name)(dense, labels)))
        by_output = getattr(written_out, f"{name}_backward")(dense, labels)
        assert torch.isnan(by_output).any(1).tolist() == [False, True]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: written_out.convolution(_random(1, 3, 5, 5), _random(2, 2, 3, 3), _random(2)),
         "3 channels in, 2 out"),
        (lambda: written_out.convolution(
            _random(1, 4, 5, 5), _random(3, 2, 3, 3), _random(3), groups=2), "2 groups"),
        (lambda: written_out.convolution(
            _random(1, 4, 5, 5), _random(4, 4, 3, 3), _random(4), groups=0), "0 groups"),
        (lambda: written_out.convolution(_random(1, 1, 2, 9), _random(1, 1, 3, 3), _random(1)),
         "3×3 does not fit into images of 2×9"),
        (lambda: written_out.max_pool(_random(1, 1, 2, 2), 3), "3×3 does not fit"),
        (lambda: written_out.mean_pool_backward(_random(1, 1, 2, 2), _random(1, 1, 1, 1), 0),
         "window of 0×0"),
        (lambda: written_out.max_pool(_random(1, 1, 4, 4), 2, -1), "stride of -1"),
        (lambda: written_out.convolution(
            _random(1, 1, 4, 4), _random(1, 1, 3, 3), _random(1), stride=0), "stride of 0"),
        (lambda: written_out.convolution(
            _random(1, 1, 4, 4), _random(1, 1, 3, 3), _random(1), padding=-1), "padding of -1"),
    ],
    ids=["depth", "groups", "no-groups", "kernel", "window", "no-window", "stride", "no-stride",
         "padding"],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(BadValueError, match=message):
        call()


def test_a_network_of_all_of_them_has_the_gradient_of_autograd() -> None:
    images, labels = _random(3, 2, 8, 8), torch.tensor([1, 0, 2])
    filters, biases = _random(4, 1, 3, 3, seed=1), _random(4, seed=2)
    weights, offsets = _random(3, 4 * 9, seed=3), _random(3, seed=4)
    leaves = [each.clone().requires_grad_() for each in (filters, biases, weights, offsets)]
    z = F.max_pool2d(F.conv2d(images, leaves[0], leaves[1], padding=0, groups=2), 2)
    answer = F.linear(torch.tanh(z).flatten(1), leaves[2], leaves[3])
    expected = torch.autograd.grad(F.cross_entropy(answer, labels), leaves)

    unpooled = written_out.convolution(images, filters, biases, groups=2)
    pooled = written_out.max_pool(unpooled, 2)
    active = written_out.tanh(pooled).reshape(3, -1)
    outputs = written_out.dense(active, weights, offsets)
    last = written_out.dense_backward(
        active, weights, written_out.log_likelihood_backward(outputs, labels)
    )
    by_pooled = written_out.tanh_backward(pooled, last.inputs.reshape(pooled.shape))
    by_unpooled = written_out.max_pool_backward(unpooled, by_pooled, 2)
    first = written_out.convolution_backward(images, filters, by_unpooled, groups=2)

    found = (first.weights, first.biases, last.weights, last.biases)
    for mine, its in zip(found, expected):
        _assert_close(mine, its)
