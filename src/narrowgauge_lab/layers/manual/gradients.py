"""Gradients of layers by their input and weight: of exact products, and of a table's own slopes.

A table's slope by the activation's code is itself a table D[a, w], and the gradient by an input
pixel the sum of g · D[code of the pixel, code of the weight] over the products it is in. D is split
into few products u_r(a) · v_r(w) (its singular value decomposition, to float32's precision), so
that sum is one gradient of an exact convolution by torch for each r, with v_r(code) for the weight,
times u_r(code of the pixel). A multiplier made of R masked products takes R of them or fewer; a
table without structure can take 256.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Optional, Sequence, Tuple

import numpy as np
import torch

from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.layers.passes.primitives import (
    input_gradient,
    weight_gradient,
    without_autocast,
)

__all__ = [
    "Slopes",
    "Split",
    "by_input",
    "by_weight",
    "over_channels",
    "slopes_of",
    "split_by_input",
    "split_by_weight",
]

#: Singular values below this share of the largest are rounding errors of the decomposition, and far
#: below what float32 resolves.
_NEGLIGIBLE = 1e-11
#: Tables' slopes that are kept on their devices, 512 KB each or less.
_KEPT = 64


def by_input(
    problem: Problem, grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int]
) -> torch.Tensor:
    """The exact layer's gradient by its input, in the float math that torch's own layers are set
    to, whatever autocast says."""
    if grad.numel() == 0 or weight.numel() == 0:
        return grad.new_zeros(tuple(input_shape))
    with without_autocast(grad.device):
        if problem.kind == "linear":
            return grad.mm(weight)
        return input_gradient(problem, grad, weight, input_shape)


def by_weight(
    problem: Problem, grad: torch.Tensor, x: torch.Tensor, weight_shape: Sequence[int]
) -> torch.Tensor:
    """The exact layer's gradient by its weight, likewise."""
    if grad.numel() == 0 or x.numel() == 0:
        return grad.new_zeros(tuple(weight_shape))
    with without_autocast(grad.device):
        if problem.kind == "linear":
            return grad.t().mm(x)
        return weight_gradient(problem, grad, x, weight_shape)


@dataclasses.dataclass(frozen=True, eq=False)
class Split:
    """A table as the sum over r of rows[r, a] · columns[r, w], float32 [R, 256] each; entries are
    in the order of the table's rows and columns."""

    rows: np.ndarray
    columns: np.ndarray

    @property
    def rank(self) -> int:
        return len(self.rows)


@dataclasses.dataclass(frozen=True, eq=False)
class Slopes:
    """A table's finite differences by the activation's and by the weight's code, per code."""

    by_input: Split
    by_weight: Split


def slopes_of(table: np.ndarray, window: int, codes: Tuple[slice, slice]) -> Slopes:
    """Of table[a, w]: (table[a + h, w] - table[a - h, w]) / 2h with h = `window`, and so for w. At
    the ends, where one of the two is no code, the last code there is takes its place.

    `codes`: which rows and columns operands have; differences do not reach beyond.
    """
    rows, columns = codes
    by_rows, by_columns = np.zeros(table.shape), np.zeros(table.shape)
    used = table[rows, columns].astype(np.float64)
    by_rows[rows, columns] = _differences(used, window)
    by_columns[rows, columns] = _differences(used.T, window).T
    return Slopes(_split(by_rows), _split(by_columns))


def _differences(values: np.ndarray, window: int) -> np.ndarray:
    at = np.arange(len(values))
    above, below = np.minimum(at + window, len(values) - 1), np.maximum(at - window, 0)
    return (values[above] - values[below]) / (above - below)[:, None]


def _split(table: np.ndarray) -> Split:
    left, sizes, right = np.linalg.svd(table)
    rank = int((sizes > _NEGLIGIBLE * max(sizes[0], np.finfo(np.float64).tiny)).sum())
    # Each side gets the root, so that neither leaves float32's range.
    roots = np.sqrt(sizes[:rank])
    rows, columns = (left[:, :rank] * roots).T, right[:rank] * roots[:, None]
    return Split(np.ascontiguousarray(rows, np.float32), np.ascontiguousarray(columns, np.float32))


def split_by_input(
    split: Split, problem: Problem, grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> torch.Tensor:
    """For every pixel of the input, the sum of grad · D[a, w] over the products it is in. `x`: the
    rows of the input's codes, `weight`: the columns of the weight's; int64."""
    total: Optional[torch.Tensor] = None
    for row, column in _pairs(split, grad.device):
        part = by_input(problem, grad, column[weight], x.shape).mul_(row[x])
        total = part if total is None else total.add_(part)
    return grad.new_zeros(tuple(x.shape)) if total is None else total


def split_by_weight(
    split: Split,
    problem: Problem,
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    padding: torch.Tensor,
) -> torch.Tensor:
    """The same for every entry of the weight. `padding`: the row of the padding's code, int64 [].

    torch pads with zeros: what is padded are differences from the padding's own value, and what
    these leave out is that value times the sum of the gradient.
    """
    sums = over_channels(grad).reshape(-1, *[1] * (weight.dim() - 1))
    total: Optional[torch.Tensor] = None
    for row, column in _pairs(split, grad.device):
        outside = row.index_select(0, padding.reshape(1))  # indexing by a tensor [] waits for it
        part = by_weight(problem, grad, row[x].sub_(outside), weight.shape)
        part = part.add_(sums * outside).mul_(column[weight])
        total = part if total is None else total.add_(part)
    return grad.new_zeros(tuple(weight.shape)) if total is None else total


def over_channels(grad: torch.Tensor) -> torch.Tensor:
    """The gradient by a bias: the sum over all but dimension 1."""
    return grad.sum(dim=[at for at in range(grad.dim()) if at != 1])


@functools.lru_cache(maxsize=_KEPT)
def _pairs(split: Split, device: torch.device) -> Tuple[Tuple[torch.Tensor, torch.Tensor], ...]:
    rows = torch.from_numpy(split.rows).to(device)
    columns = torch.from_numpy(split.columns).to(device)
    return tuple(zip(rows, columns))
