"""What each layer alone loses by quantisation: the table that partial quantisation starts from."""

from __future__ import annotations

import dataclasses
from typing import Callable, Mapping, Tuple

from torch import nn

from narrowgauge_lab.quant.layers import LayerScales, fake_quantized

__all__ = ["Sensitivity", "SensitivityRow", "sensitivity"]


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """One layer quantised, all others in float. `loss` is the float score minus `score`."""

    layer: str
    score: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Sensitivity:
    """Scores, larger is better: of the float model, of the whole one quantised, of each layer
    alone, the one that loses most first. Of equal losses the model's order stays."""

    floating: float
    quantized: float
    rows: Tuple[SensitivityRow, ...]


def sensitivity(
    model: nn.Module,
    scales: Mapping[str, LayerScales],
    evaluate: Callable[[nn.Module], float],
) -> Sensitivity:
    """Evaluate `model` in float, quantised, and with each layer of `scales` quantised alone."""
    floating = float(evaluate(model))
    quantized = float(evaluate(fake_quantized(model, scales)))
    rows = []
    for name, one in scales.items():
        score = float(evaluate(fake_quantized(model, {name: one})))
        rows.append(SensitivityRow(name, score, floating - score))
    return Sensitivity(floating, quantized, tuple(sorted(rows, key=lambda row: -row.loss)))
