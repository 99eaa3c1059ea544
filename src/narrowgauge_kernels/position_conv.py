"""Convolutions at listed positions of maps that lie as rows: reference and public functions.

| name      | shape     | meaning                                                        |
|-----------|-----------|----------------------------------------------------------------|
| rows      | [P, C]    | float32; a row per position, images with borders of their own  |
| positions | [n] int64 | the rows at which results are wanted, each once if written to  |
| weight    | [T, C, F] | a matrix for each tap                                          |
| bias      | [F]       |                                                                |
| taps      | T numbers | how many rows from a position each tap is, either way          |

    result[i] = leaky(Σ_t rows[positions[i] + taps[t]] @ weight[t] + bias)

where leaky multiplies what is below zero by `slope` (1: nothing happens). CPU: without im2col, in
blocks of positions by filters that stay in registers; bits depend neither on threads nor on the
instruction set. Neither function is differentiable.
"""

from __future__ import annotations

from typing import Any, List, Sequence, Tuple

import torch
from torch.nn import functional

from narrowgauge_kernels.library import require

__all__ = ["add_at", "packed", "position_conv", "position_conv_example", "position_conv_ref",
           "positions_near", "run_packed", "set_at"]  # fmt: skip

#: Widths of panels of the packed weight, as position_conv.h has them; the last is what F is
#: rounded up to.
_PANELS = (64, 32, 16)


def position_conv_ref(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    taps: Sequence[int],
    slope: float = 1.0,
) -> torch.Tensor:
    """What `position_conv` should give, by torch's operators in the dtype of rows."""
    with torch.no_grad():
        result = bias.expand(len(positions), -1).clone()
        for tap, matrix in zip(taps, weight):
            result += rows[positions + tap] @ matrix
        return functional.leaky_relu(result, slope)


def position_conv(
    rows: torch.Tensor,
    positions: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    taps: Sequence[int],
    slope: float = 1.0,
) -> torch.Tensor:
    """The convolution at positions, [n, F].

    Raises RuntimeError where shapes or dtypes do not fit or a window reaches out of the rows, and
    KernelsNotBuiltError, with the command that builds.
    """
    return run_packed(rows.detach(), positions, packed(weight), bias.detach(), taps, slope)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """A weight [T, C, F] in the order in which the loops read it, one-dimensional: panels of 64, 32
    or 16 filters (of one alone: as it is), [T · C, width] each, the last filled up with zeros."""
    matrix = weight.detach().reshape(-1, weight.shape[2])
    filters = matrix.shape[1]
    if filters == 1:
        return matrix.reshape(-1).contiguous()
    matrix = functional.pad(matrix, (0, -filters % _PANELS[-1]))
    parts: List[torch.Tensor] = []
    first = 0
    while first < matrix.shape[1]:
        width = next(each for each in _PANELS if each <= matrix.shape[1] - first)
        parts.append(matrix[:, first : first + width].reshape(-1))
        first += width
    return torch.cat(parts)


def run_packed(
    rows: torch.Tensor, positions: torch.Tensor, packed_weight: torch.Tensor, bias: torch.Tensor,
    taps: Sequence[int], slope: float = 1.0,
) -> torch.Tensor:  # fmt: skip
    """`position_conv` with a weight that `packed` gave. Raises as it does."""
    require(rows.device.type)
    return torch.ops.narrowgauge.position_conv(
        rows, positions, packed_weight, bias, list(taps), slope
    )


def set_at(
    rows: torch.Tensor, positions: torch.Tensor, packed_weight: torch.Tensor, bias: torch.Tensor,
    taps: Sequence[int], slope: float, out: torch.Tensor,
) -> None:  # fmt: skip
    """out[positions[i]] = result[i], with out [P, F] in other memory than rows. Raises as
    `position_conv`, and where it is not or a position is listed twice."""
    require(rows.device.type)
    torch.ops.narrowgauge.position_conv_set(
        rows, positions, packed_weight, bias, list(taps), slope, out
    )


def add_at(
    rows: torch.Tensor, positions: torch.Tensor, packed_weight: torch.Tensor, bias: torch.Tensor,
    taps: Sequence[int], share: torch.Tensor, state: torch.Tensor, total: torch.Tensor,
) -> None:  # fmt: skip
    """state[positions[i]] += result[i] and total[positions[i]] += share[i] · result[i], without the
    leaky ReLU; share [n], state and total [P, F], each in memory of its own. Raises as
    `position_conv`, and where it is not or a position is listed twice."""
    require(rows.device.type)
    torch.ops.narrowgauge.position_conv_add(
        rows, positions, packed_weight, bias, list(taps), share, state, total
    )


def positions_near(
    positions: torch.Tensor, taps: Sequence[int], inside: torch.Tensor
) -> torch.Tensor:
    """The rows that are a tap away from one of positions and that bool [P] `inside` allows, in
    order and each once: int64 [m]. Raises as `position_conv`."""
    require(positions.device.type)
    return torch.ops.narrowgauge.positions_near(positions, list(taps), inside)


def position_conv_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: channels and filters that fill no vector, and a last block."""
    rows = torch.randn((60, 19), generator=generator)
    weight = torch.randn((9, 19, 85), generator=generator) * 0.1
    taps = [tall * 6 + wide for tall in (-1, 0, 1) for wide in (-1, 0, 1)]
    positions = torch.randperm(46, generator=generator)[:23] + 7
    return rows, positions, weight, torch.randn(85, generator=generator), taps, 0.1
