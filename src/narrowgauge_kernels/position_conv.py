"""Convolutions at listed positions of maps that lie as rows: reference and public functions.

| name      | shape     | meaning                                                        |
|-----------|-----------|----------------------------------------------------------------|
| rows      | [P, C]    | float32; a row per position, images with borders of their own  |
| positions | [n] int64 | the rows at which results are wanted, each once if written to  |
| weight    | [T, C, F] | a matrix for each tap                                          |
| bias      | [F]       |                                                                |
| taps      | T numbers | how many rows from a position each tap is, either way          |

    result[i] = leaky(Σ_t rows[positions[i] + taps[t]] @ weight[t] + bias)

where leaky multiplies what is below zero by `slope` (1: nothing happens). Both devices: without
im2col, in blocks of positions by filters that stay in registers, each product and sum one rounding
in float32; the bits of a result do not depend on what else is listed. On the CPU they depend
neither on threads nor on the instruction set; on a GPU sums run in another order. Neither function
is differentiable.

`count`, int64 [1] where the tensors are, says how many of the positions are meant, at most all
(None: all), so that a list is made and used on a GPU without the host waiting for its length.

Nothing here waits for a GPU but `positions_near`, so what only a look at data tells is not checked
there: positions whose windows reach out of the rows are read, and written, out of bounds, and one
that is listed twice is written twice at once. A GPU takes 256 taps at most.
"""

from __future__ import annotations

from typing import Any, List, Optional, Sequence, Tuple

import torch
from torch.nn import functional

from narrowgauge_kernels.library import require

__all__ = ["add_at", "flagged", "near_list", "packed", "position_conv", "position_conv_example",
           "position_conv_ref", "positions_near", "run_packed", "set_at"]  # fmt: skip

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

    Raises RuntimeError where shapes, dtypes or devices do not fit or, on a CPU, a window reaches
    out of the rows, and KernelsNotBuiltError, with the command that builds.
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
    taps: Sequence[int], slope: float = 1.0, count: Optional[torch.Tensor] = None,
) -> torch.Tensor:  # fmt: skip
    """`position_conv` with a weight that `packed` gave; rows past `count` are not written. Raises
    as it does."""
    require(rows.device.type)
    return torch.ops.narrowgauge.position_conv(
        rows, positions, packed_weight, bias, list(taps), slope, count=count
    )


def set_at(
    rows: torch.Tensor, positions: torch.Tensor, packed_weight: torch.Tensor, bias: torch.Tensor,
    taps: Sequence[int], slope: float, out: torch.Tensor, count: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """out[positions[i]] = result[i], with out [P, F] in other memory than rows. Raises as
    `position_conv`, and where it is not or, on a CPU, a position is listed twice."""
    require(rows.device.type)
    torch.ops.narrowgauge.position_conv_set(
        rows, positions, packed_weight, bias, list(taps), slope, out, count=count
    )


def add_at(
    rows: torch.Tensor, positions: torch.Tensor, packed_weight: torch.Tensor, bias: torch.Tensor,
    taps: Sequence[int], share: torch.Tensor, state: torch.Tensor, total: torch.Tensor,
    count: Optional[torch.Tensor] = None,
) -> None:  # fmt: skip
    """state[positions[i]] += result[i] and total[positions[i]] += share[i] · result[i], without the
    leaky ReLU; share [n], state and total [P, F], each in memory of its own. Raises as
    `position_conv`, and where it is not or, on a CPU, a position is listed twice."""
    require(rows.device.type)
    torch.ops.narrowgauge.position_conv_add(
        rows, positions, packed_weight, bias, list(taps), share, state, total, count=count
    )


def positions_near(
    positions: torch.Tensor, taps: Sequence[int], inside: torch.Tensor
) -> torch.Tensor:
    """The rows that are a tap away from one of positions and that bool [P] `inside` allows, in
    order and each once: int64 [m]. Raises as `position_conv`; on a GPU neighbours outside of the
    map are left out instead, and it waits, to learn m."""
    if positions.is_cuda:
        found, count = near_list(positions, taps, inside, len(inside))
        return found[: int(count)]
    require(positions.device.type)
    return torch.ops.narrowgauge.positions_near(positions, list(taps), inside)


def near_list(
    positions: torch.Tensor, taps: Sequence[int], inside: torch.Tensor, capacity: int,
    count: Optional[torch.Tensor] = None,
) -> Tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """What `positions_near` gives, as many as fit in int64 [capacity], the rest 0; and how many
    there are, int64 [1], which is more where they do not fit. Raises as `positions_near`."""
    require(positions.device.type)
    found, number = torch.ops.narrowgauge.positions_near_list(
        positions, list(taps), inside, capacity, count=count
    )
    return found, number


def flagged(
    flags: torch.Tensor, capacity: int, count: Optional[torch.Tensor] = None
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Where flags bool [m] are set, in order: int64 [capacity] and how many, as `near_list`;
    `count`: of the flags, how many are meant. Raises as `position_conv`."""
    require(flags.device.type)
    found, number = torch.ops.narrowgauge.positions_flagged(flags, capacity, count=count)
    return found, number


def position_conv_example(generator: torch.Generator) -> Tuple[Any, ...]:
    """Inputs for the self-check: channels and filters that fill no vector, and a last block."""
    rows = torch.randn((60, 19), generator=generator)
    weight = torch.randn((9, 19, 85), generator=generator) * 0.1
    taps = [tall * 6 + wide for tall in (-1, 0, 1) for wide in (-1, 0, 1)]
    positions = torch.randperm(46, generator=generator)[:23] + 7
    return rows, positions, weight, torch.randn(85, generator=generator), taps, 0.1
