"""Products of codes as a sum of few exact ones, of codes that are looked up in lists first."""

from __future__ import annotations

import dataclasses
import functools
from typing import Optional, Sequence, Tuple

import torch

from narrowgauge_kernels.codes import CodeMac
from narrowgauge_lab.layers.manual import kernels
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.multipliers.terms import Factored, factor_type

__all__ = ["Factor", "exact", "factor_on", "factored_sums"]

_DTYPES = {"int8": torch.int8, "uint8": torch.uint8}
_MIDDLE = 128


@dataclasses.dataclass(frozen=True, eq=False)
class Factor:
    """A `Factored` term with its lists on a device, and the exact multiplier of what they give."""

    coefficient: int
    a_values: torch.Tensor
    b_values: torch.Tensor
    a_numbers: Tuple[int, ...]
    mac: CodeMac


def factor_on(term: Factored, device: torch.device) -> Factor:
    """A proved term, whose lists therefore fit a byte."""
    lists = []
    for values in (term.a_values, term.b_values):
        name = factor_type(values)
        assert name is not None
        lists.append(torch.tensor(values, dtype=_DTYPES[name], device=device))
    a, b = lists
    signs = [each.dtype == torch.int8 for each in lists]
    return Factor(term.coefficient, a, b, term.a_values, exact(signs[0], signs[1]))


@functools.lru_cache(maxsize=None)
def exact(a_signed: bool, b_signed: bool) -> CodeMac:
    """The exact multiplier of such codes; making one multiplies all of them."""
    return CodeMac("exact_int8", None, a_signed, b_signed)


def factored_sums(
    problem: Problem,
    x: torch.Tensor,
    weight: torch.Tensor,
    factors: Sequence[Factor],
    x_zero: int,
) -> torch.Tensor:
    """As `kernels.code_sums` by the table that `factors` make. Sums wrap around in int32 on the
    way, and are right at the end, which the caller sees to fits."""
    places = [_places(each) for each in (x, weight)]
    zero_at = x_zero + (_MIDDLE if x.dtype == torch.int8 else 0)
    total: Optional[torch.Tensor] = None
    for factor in factors:
        # Indexing keeps the strides of what it is indexed by, channels_last among them.
        image, kernel = factor.a_values[places[0]], factor.b_values[places[1]]
        zero = factor.a_numbers[zero_at]
        part = kernels.code_sums(problem, image, kernel, factor.mac, zero).mul_(factor.coefficient)
        total = part if total is None else total.add_(part)
    assert total is not None
    return total


def _places(codes: torch.Tensor) -> torch.Tensor:
    places = codes.long()
    return places.add_(_MIDDLE) if codes.dtype == torch.int8 else places
