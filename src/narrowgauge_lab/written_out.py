"""Back-propagation written out: forward and backward of small networks' layers, by hand.

Plain arithmetic on tensors of any floating type: no autograd, no `torch.nn`. Each `f_backward`
takes what went into `f` and the gradient of the cost by what came out, and gives the gradients by
what went in. The derivations are those of Nielsen 2015, chapters 2 (dense), 3 (costs) and 6
(convolution and pooling); the last two follow from the first, since every patch of an image is an
input of one and the same dense layer. `tests/lab/test_written_out.py` holds all to autograd.

Batches may be empty; the mean cost of no image is NaN, as torch has it. NaN goes through.
"""

from __future__ import annotations

from typing import Iterator, List, NamedTuple, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import BadValueError

__all__ = [
    "Gradients",
    "convolution", "convolution_backward",
    "cross_entropy", "cross_entropy_backward",
    "dense", "dense_backward",
    "log_likelihood", "log_likelihood_backward",
    "max_pool", "max_pool_backward",
    "mean_pool", "mean_pool_backward",
    "penalty", "penalty_backward",
    "quadratic", "quadratic_backward",
    "relu", "relu_backward",
    "sigmoid", "sigmoid_backward",
    "tanh", "tanh_backward",
]  # fmt: skip


class Gradients(NamedTuple):
    """Of a cost, by a layer's inputs, weights and biases, each shaped like what it is by."""

    inputs: torch.Tensor
    weights: torch.Tensor
    biases: torch.Tensor


def dense(inputs: torch.Tensor, weights: torch.Tensor, biases: torch.Tensor) -> torch.Tensor:
    """z = x·Wᵀ + b. inputs [B, I], weights [O, I], biases [O]; returns [B, O]."""
    return inputs @ weights.t() + biases


def dense_backward(
    inputs: torch.Tensor, weights: torch.Tensor, gradient: torch.Tensor
) -> Gradients:
    """`gradient` [B, O] by z: δ·W to the layer before, δᵀ·x to the weights, their sum to biases."""
    return Gradients(gradient @ weights, gradient.t() @ inputs, gradient.sum(0))


def convolution(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    biases: torch.Tensor,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> torch.Tensor:
    """inputs [B, C, H, W], weights [O, C/groups, h, w], biases [O]; returns [B, O, H', W'] with
    H' = (H + 2·padding − h) // stride + 1. Padding is with zeros, on all sides.

    Raises BadValueError where groups do not divide the channels, or the kernel does not fit.
    """
    patches = _patches(_padded(inputs, padding), weights, stride, groups)
    filters = weights.reshape(groups, len(weights) // groups, -1)
    found = filters @ patches  # [B, groups, O / groups, H'·W']
    height, width = _extent(inputs, weights.shape[2:], stride, padding)
    return found.reshape(len(inputs), len(weights), height, width) + biases.view(-1, 1, 1)


def convolution_backward(
    inputs: torch.Tensor,
    weights: torch.Tensor,
    gradient: torch.Tensor,
    stride: int = 1,
    padding: int = 0,
    groups: int = 1,
) -> Gradients:
    """`gradient` [B, O, H', W'] by what came out. Each patch's gradient is that of a dense layer;
    a pixel gets the sum over the patches that it is in. Raises what `convolution` raises."""
    padded = _padded(inputs, padding)
    patches = _patches(padded, weights, stride, groups)
    filters = weights.reshape(groups, len(weights) // groups, -1)
    batch, (height, width) = len(inputs), gradient.shape[2:]
    by_patch = gradient.reshape(batch, groups, len(weights) // groups, height * width)
    by_filter = (by_patch @ patches.transpose(2, 3)).sum(0)
    shape = (batch, inputs.shape[1], weights[0, 0].numel(), height, width)
    spread = (filters.transpose(1, 2) @ by_patch).reshape(shape)
    by_input = torch.zeros_like(padded)
    for number, (rows, columns) in enumerate(_windows(weights.shape[2:], (height, width), stride)):
        by_input[:, :, rows, columns] += spread[:, :, number]
    rows, columns = (slice(padding, padding + size) for size in inputs.shape[2:])
    return Gradients(
        by_input[:, :, rows, columns], by_filter.reshape(weights.shape), gradient.sum((0, 2, 3))
    )


def max_pool(inputs: torch.Tensor, size: int, stride: Optional[int] = None) -> torch.Tensor:
    """The largest of each `size`×`size` window of [B, C, H, W], windows `stride` apart (by default
    side by side); what does not fill a window is left out. NaN is larger than any number."""
    return _largest(_pooled(inputs, size, size if stride is None else stride), 0)[0]


def max_pool_backward(
    inputs: torch.Tensor, gradient: torch.Tensor, size: int, stride: Optional[int] = None
) -> torch.Tensor:
    """All of a window's gradient goes to its largest value, of equal ones to the first."""
    step = size if stride is None else stride
    chosen = _largest(_pooled(inputs, size, step), 0)[1]
    found = torch.zeros_like(inputs)
    nothing = torch.zeros_like(gradient)
    for number, (rows, columns) in enumerate(_windows((size, size), gradient.shape[2:], step)):
        found[:, :, rows, columns] += torch.where(chosen == number, gradient, nothing)
    return found


def mean_pool(inputs: torch.Tensor, size: int, stride: Optional[int] = None) -> torch.Tensor:
    """The mean of each window; windows as `max_pool` has them."""
    return _pooled(inputs, size, size if stride is None else stride).sum(0) / size**2


def mean_pool_backward(
    inputs: torch.Tensor, gradient: torch.Tensor, size: int, stride: Optional[int] = None
) -> torch.Tensor:
    """Each value of a window gets the same part of its gradient."""
    step = size if stride is None else stride
    extent = _extent(inputs, (size, size), step, 0)
    found = torch.zeros_like(inputs)
    for rows, columns in _windows((size, size), extent, step):
        found[:, :, rows, columns] += gradient / size**2
    return found


def sigmoid(inputs: torch.Tensor) -> torch.Tensor:
    """σ(z) = 1 / (1 + e^−z); where e^−z is too large for its type σ is 0, as it should be."""
    return 1 / (1 + torch.exp(-inputs))


def sigmoid_backward(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """σ' = σ·(1 − σ): nearly 0 where a neuron is saturated, a quarter at most."""
    active = sigmoid(inputs)
    return gradient * active * (1 - active)


def tanh(inputs: torch.Tensor) -> torch.Tensor:
    """tanh z = 2·σ(2z) − 1, which overflows nowhere."""
    return 2 * sigmoid(2 * inputs) - 1


def tanh_backward(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """1 − tanh²."""
    return gradient * (1 - tanh(inputs) ** 2)


def relu(inputs: torch.Tensor) -> torch.Tensor:
    """max(0, z); NaN stays NaN."""
    return torch.where(inputs <= 0, torch.zeros_like(inputs), inputs)


def relu_backward(inputs: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """1 above 0, else 0, at 0 too."""
    return torch.where(inputs <= 0, torch.zeros_like(gradient), gradient)


def quadratic(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over images of ½·‖y − σ(z)‖². outputs: z [B, classes]; labels int64 [B]."""
    return ((sigmoid(outputs) - _wanted(outputs, labels)) ** 2).sum() / 2 / _count(outputs)


def quadratic_backward(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(a − y)·σ'(z) / B: little is learnt where σ' is nearly 0, however wrong the answer."""
    off = sigmoid(outputs) - _wanted(outputs, labels)
    return sigmoid_backward(outputs, off) / len(outputs)


def cross_entropy(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over images of −Σ y·ln a + (1 − y)·ln(1 − a) with a = σ(z), one sigmoid per class [nat].

    As max(z, 0) − z·y + ln(1 + e^−|z|), which is the same and overflows nowhere.
    """
    wanted = _wanted(outputs, labels)
    each = relu(outputs) - outputs * wanted + torch.log1p(torch.exp(-outputs.abs()))
    return each.sum() / _count(outputs)


def cross_entropy_backward(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(a − y) / B: σ' has cancelled."""
    return (sigmoid(outputs) - _wanted(outputs, labels)) / len(outputs)


def log_likelihood(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean over images of −ln softmax(z) at the label [nat]."""
    return -_log_softmax(outputs).gather(1, labels[:, None]).sum() / _count(outputs)


def log_likelihood_backward(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """(softmax(z) − y) / B."""
    return (torch.exp(_log_softmax(outputs)) - _wanted(outputs, labels)) / len(outputs)


def penalty(weights: Sequence[torch.Tensor], l1: float, l2: float) -> torch.Tensor:
    """l1·Σ|w| + ½·l2·Σw² over one or more tensors of weights: in Nielsen's letters λ/n is l1 or
    l2."""
    parts = [l1 * each.abs().sum() + l2 / 2 * (each * each).sum() for each in weights]
    return torch.stack(parts).sum()


def penalty_backward(weights: Sequence[torch.Tensor], l1: float, l2: float) -> List[torch.Tensor]:
    """l1·sign(w) + l2·w by each tensor of weights; sign(0) = 0."""
    return [l1 * torch.sign(each) + l2 * each for each in weights]


def _wanted(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """y: 1 at each image's label, else 0, in the type of the outputs [B, classes]."""
    classes = torch.arange(outputs.shape[1], device=outputs.device)
    return (labels[:, None] == classes).to(outputs.dtype)


def _count(outputs: torch.Tensor) -> torch.Tensor:
    """How many images, as a tensor: no images make NaN and no ZeroDivisionError."""
    return outputs.new_full((), float(len(outputs)))


def _log_softmax(outputs: torch.Tensor) -> torch.Tensor:
    shifted = outputs - _largest(outputs, 1)[0][:, None]
    return shifted - torch.log(torch.exp(shifted).sum(1, keepdim=True))


def _largest(values: torch.Tensor, dim: int) -> Tuple[torch.Tensor, torch.Tensor]:
    """Along a dimension that has some: the largest values, and where they are. torch 1.8 gives none
    where another dimension is empty."""
    if not values.numel():
        nothing = values.select(dim, 0)
        return nothing, nothing.to(torch.int64)
    found = values.max(dim)
    return found[0], found[1]


def _padded(inputs: torch.Tensor, padding: int) -> torch.Tensor:
    batch, channels, height, width = inputs.shape
    if padding < 0:
        raise BadValueError(f"a padding of {padding}", next_step="take 0 or more")
    found = inputs.new_zeros(batch, channels, height + 2 * padding, width + 2 * padding)
    found[:, :, padding : padding + height, padding : padding + width] = inputs
    return found


def _extent(
    inputs: torch.Tensor, kernel: Sequence[int], stride: int, padding: int
) -> Tuple[int, int]:
    """How many windows fit, down and across. Raises BadValueError where none does."""
    if min(*kernel, stride) < 1:
        raise BadValueError(
            f"a window of {kernel[0]}×{kernel[1]} by a stride of {stride}",
            next_step="take 1 or more",
        )
    down, across = (
        (size + 2 * padding - part) // stride + 1 for size, part in zip(inputs.shape[2:], kernel)
    )
    if down < 1 or across < 1:
        raise BadValueError(
            f"a window of {kernel[0]}×{kernel[1]} does not fit into images of "
            f"{inputs.shape[2]}×{inputs.shape[3]} padded by {padding}",
            next_step="take a smaller window, or more padding",
        )
    return down, across


def _windows(
    kernel: Sequence[int], extent: Sequence[int], stride: int
) -> Iterator[Tuple[slice, slice]]:
    """For each place in a window, row by row: which pixels of the image are there, of all windows
    at once."""
    for row in range(kernel[0]):
        for column in range(kernel[1]):
            yield (
                slice(row, row + stride * (extent[0] - 1) + 1, stride),
                slice(column, column + stride * (extent[1] - 1) + 1, stride),
            )


def _pooled(inputs: torch.Tensor, size: int, stride: int) -> torch.Tensor:
    """[size², B, C, H', W']: the values of each window."""
    extent = _extent(inputs, (size, size), stride, 0)
    windows = _windows((size, size), extent, stride)
    return torch.stack([inputs[:, :, rows, columns] for rows, columns in windows])


def _patches(padded: torch.Tensor, weights: torch.Tensor, stride: int, groups: int) -> torch.Tensor:
    """[B, groups, C/groups · h · w, H'·W']: a column per patch of the padded image."""
    batch, channels = padded.shape[:2]
    outputs, depth = weights.shape[:2]
    if groups < 1 or outputs % groups or depth * groups != channels:
        raise BadValueError(
            f"{channels} channels in, {outputs} out, filters of {depth} and {groups} groups do not "
            "go together",
            why="groups divide both, and a filter sees the channels of its group",
        )
    extent = _extent(padded, weights.shape[2:], stride, 0)
    windows = _windows(weights.shape[2:], extent, stride)
    places = torch.stack([padded[:, :, rows, columns] for rows, columns in windows], 2)
    return places.reshape(batch, groups, depth * places.shape[2], extent[0] * extent[1])
