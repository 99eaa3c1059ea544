"""Quantisation-aware training: a fake-quantised network whose steps are trained with its weights.

    net = trainable(model, calibrate(model, batches, config))
    …any training of `net`…
    model, scales = float_of(net), scales_of(net)      # to convert, or to fake-quantise plainly

The gradient by the values is straight-through (arXiv 1712.05877): 1 inside of the range and 0
outside. That by a step is what rounding leaves inside and the end of the range outside (learned
step sizes, arXiv 1902.08153); what is trained is the logarithm of the step over the calibrated one,
so that a step stays positive and updates are relative to it (arXiv 1903.08066). Zero points stay.
Fold BatchNorm before: what is rounded in training has to be what is rounded afterwards.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, Mapping

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.converted import require_trainable
from narrowgauge_lab.quant.fake import FakeQuantizer
from narrowgauge_lab.quant.layers import FakeQuantizedLayer, LayerScales, fake_quantized
from narrowgauge_lab.quant.parameters import QuantParams, integer_range
from narrowgauge_lab.transforms.conversion import Rule, convert

__all__ = ["TrainedQuantizer", "float_of", "scales_of", "trainable"]

_PLACES = ("input_quantizer", "weight_quantizer", "output_quantizer")


class TrainedQuantizer(nn.Module):
    """Rounding of float32 tensors whose step is calibrated · exp(`log_step`), which is trained.

    To begin with it gives what `fake_quantize` gives, to the bit.
    """

    def __init__(self, params: QuantParams) -> None:
        super().__init__()
        self.format = (params.bits, params.axis, params.symmetric, params.narrow)
        self.register_buffer("scale", params.scale.clone())
        self.register_buffer("zero_point", params.zero_point.clone())
        self.log_step = nn.Parameter(torch.zeros_like(params.scale))

    @property
    def params(self) -> QuantParams:
        """As trained until now."""
        scale = self.scale * self.log_step.detach().exp()
        return QuantParams(scale, self.zero_point, *self.format)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        step, zero, axis = self.scale * self.log_step.exp(), self.zero_point, self.format[1]
        if axis is not None:
            shape = [1] * x.dim()
            shape[axis] = -1
            step, zero = step.reshape(shape), zero.reshape(shape)
        least, most = integer_range(self.format[0], *self.format[2:])
        low, high = (least - zero).float(), (most - zero).float()
        # By the reciprocal, as everything here rounds. Comparisons keep NaN in every torch.
        steps = x * (1.0 / step)
        inside = torch.where(steps < low, low, torch.where(steps > high, high, steps))
        # The rounded value, with the gradient of the one before.
        return (inside + (inside.detach().round() - inside.detach())) * step

    def extra_repr(self) -> str:
        return f"{self.format[0]} bits, trained step"


def trainable(model: nn.Module, scales: Mapping[str, LayerScales], steps: bool = True) -> nn.Module:
    """A copy of `model` in training mode with the layers named in `scales` rounded, BatchNorm and
    dropout as the model has them. `steps`: whether the steps are trained too; otherwise they stay
    as calibrated, and only weights and biases are.

    Parameters keep their names. Raises ConvertedModelError for a model whose layers run integers
    already, UsageError where nothing of it can be trained, and what `fake_quantized` raises.
    """
    require_trainable(model)
    net = fake_quantized(model, scales)
    if steps:
        for layer in _layers(net).values():
            for name in _PLACES:
                quantizer = getattr(layer, name)
                if isinstance(quantizer, FakeQuantizer):
                    setattr(layer, name, TrainedQuantizer(quantizer.params))
    return net.to(next(model.parameters()).device).train()


def scales_of(net: nn.Module) -> Dict[str, LayerScales]:
    """The scales that a network of `trainable` has come to. Raises BadValueError for another."""
    return {
        name: LayerScales(*(_params(getattr(layer, place)) for place in _PLACES))
        for name, layer in _required(net).items()
    }


def float_of(net: nn.Module) -> nn.Module:
    """A copy of a network of `trainable` in eval mode, its layers those of the float network with
    the trained weights, not rounded: what `to_int8`, `export_qdq` and `fake_quantized` take, with
    `scales_of`. Raises BadValueError for another network."""
    _required(net)
    rule = Rule(make=lambda _, layer: _floated(layer), type=FakeQuantizedLayer)
    return convert(net, [rule]).eval()


def _params(quantizer: nn.Module) -> Any:
    """None of an output that stays in float."""
    found = getattr(quantizer, "params", None)
    # Of tensors that training goes on changing.
    return found and dataclasses.replace(
        found, scale=found.scale.detach().clone(), zero_point=found.zero_point.clone()
    )


def _floated(layer: nn.Module) -> nn.Module:
    (bare,) = layer._bare
    new = copy.copy(bare)
    new._parameters = type(bare._parameters)()
    for name in ("weight", "bias"):
        value = getattr(layer, name)
        new.register_parameter(name, None if value is None else nn.Parameter(value.detach()))
    return new


def _layers(net: nn.Module) -> Dict[str, FakeQuantizedLayer]:
    return {n: m for n, m in net.named_modules() if isinstance(m, FakeQuantizedLayer)}


def _required(net: nn.Module) -> Dict[str, FakeQuantizedLayer]:
    found = _layers(net)
    if not found:
        raise BadValueError(
            f"this {type(net).__name__} has no fake-quantised layer",
            next_step="give what quant.qat.trainable made, before it is converted",
        )
    return found
