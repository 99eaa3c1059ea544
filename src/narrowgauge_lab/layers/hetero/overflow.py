"""Which layer and pass first gave NaN or infinity, and what became 0 by being too small.

A watch is set on a bus for the steps that are asked about; it looks at each pass's operands and
result on the host, which costs several passes over them. Underflow is the share of an operand's
values that are not 0 and become 0 in what they travel or are multiplied in, whichever rounds more;
stochastic rounding keeps their mean, and still counts.
"""

from __future__ import annotations

import dataclasses
from typing import Dict, List, Optional, Sequence, Tuple

import torch

__all__ = ["OverflowWatch", "TensorStatistics"]

#: Half the smallest positive number: what lies below it, and half to even takes a tie, becomes 0.
_SMALLEST = {"fp16": 2.0**-25, "bf16": 2.0**-134, "e4m3": 2.0**-10, "e5m2": 2.0**-17}
_LARGEST_E = {"e4m3": 448.0, "e5m2": 57344.0}


@dataclasses.dataclass(frozen=True)
class TensorStatistics:
    """One tensor of one pass. `role`: input, output, grad_output, grad_input or weight_grad.

    `amax` is of the finite values; `underflow` the share of values not 0 that become 0, None for a
    result, which is not rounded further.
    """

    layer: str
    pass_: str
    role: str
    amax: float
    nan: int
    inf: int
    underflow: Optional[float]

    @property
    def overflowed(self) -> bool:
        return self.nan + self.inf > 0


class OverflowWatch:
    """Keeps the statistics of every pass that it sees, in their order."""

    def __init__(self) -> None:
        self._seen: List[TensorStatistics] = []

    def see(
        self,
        layer: str,
        pass_: str,
        role: str,
        tensor: torch.Tensor,
        rounded_to: Sequence[str] = (),
    ) -> None:
        """A tensor of the host. `rounded_to`: the wire and the precision of an operand."""
        values = tensor.detach().float()
        finite = torch.isfinite(values)
        nan = int(torch.isnan(values).sum())
        inf = int(values.numel() - int(finite.sum()) - nan)
        magnitude = torch.where(finite, values.abs(), torch.zeros_like(values))
        amax = float(magnitude.max()) if values.numel() else 0.0
        share = _underflow(magnitude, rounded_to, role) if rounded_to else None
        self._seen.append(TensorStatistics(layer, pass_, role, amax, nan, inf, share))

    def statistics(self) -> Tuple[TensorStatistics, ...]:
        """All that was seen, in the order of the passes."""
        return tuple(self._seen)

    def first(self) -> Optional[TensorStatistics]:
        """The first *result* that is not finite, of a pass whose operands were; where there is
        none, the first tensor that is not: something outside of these layers made it."""
        clean: Dict[Tuple[str, str], bool] = {}
        for each in self._seen:
            key = (each.layer, each.pass_)
            if each.role in ("input", "grad_output"):
                clean[key] = clean.get(key, True) and not each.overflowed
            elif each.overflowed and clean.get(key, True):
                return each
        return next((each for each in self._seen if each.overflowed), None)

    def clear(self) -> None:
        self._seen = []


def _smallest(form: str, magnitude: torch.Tensor, whole: bool) -> torch.Tensor:
    """Up to what magnitude, [C] or a scalar, values of `magnitude` [B, C, ...] become 0 in a wire's
    or a precision's form; `whole`: where one scale is of all channels."""
    if form == "int8":
        return _largest(magnitude, whole) / 127 / 2
    if form in _LARGEST_E:
        return _largest(magnitude, whole) / _LARGEST_E[form] * _SMALLEST[form]
    return torch.tensor(_SMALLEST.get(form, 0.0), dtype=torch.float64)


def _largest(magnitude: torch.Tensor, whole: bool) -> torch.Tensor:
    """Per channel, or of all."""
    if whole:
        return magnitude.double().max()
    channels = magnitude.shape[1]
    return magnitude.double().transpose(0, 1).reshape(channels, -1).max(dim=1)[0]


def _underflow(magnitude: torch.Tensor, forms: Sequence[str], role: str) -> float:
    there = magnitude > 0
    count = int(there.sum())
    if not count:
        return 0.0
    wide = magnitude.double()
    lost = torch.zeros_like(there)
    for form in forms:
        if form == "fp8":
            form = "e4m3" if role == "input" else "e5m2"
        limit = _smallest(form, magnitude, whole=role == "grad_output")
        if limit.dim():
            limit = limit.view(1, -1, *(1,) * (magnitude.dim() - 2))
        lost |= there & (wide <= limit)
    return int(lost.sum()) / count
