"""Dynamic quantisation: weights rounded beforehand, inputs by the range of each batch. For linear
layers only; convolutions stay in float.

A convolution reads maps whose range depends on the image, and torch's own dynamic quantisation of
convolutional networks loses all they know (pytorch/ao#4292): there is no such option here. The
range is of what goes through together, so answers depend on the batch.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, Optional

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.quant.calibration import QuantConfig
from narrowgauge_lab.quant.converted import Converted
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.quant.fake import fake_quantize
from narrowgauge_lab.quant.parameters import QuantParams, parameters_of
from narrowgauge_lab.quant.x86 import choose_engine, packed_operator
from narrowgauge_lab.transforms.conversion import Rule, convert

__all__ = ["DynamicLinear", "Int8DynamicLinear", "dynamic", "dynamic_int8", "linear_layers"]


def linear_layers(model: nn.Module) -> Dict[str, nn.Linear]:
    """What is quantised dynamically, by name: exactly nn.Linear."""
    return {name: layer for name, layer in model.named_modules() if type(layer) is nn.Linear}


class DynamicLinear(nn.Module):
    """A linear layer on rounded weights and on inputs rounded by their own range, affine, in float
    arithmetic; its output is not rounded. Takes and gives float32 [..., features]."""

    def __init__(self, layer: nn.Linear, weight: QuantParams, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("weight", fake_quantize(layer.weight.detach(), weight))
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach().clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.numel() == 0:
            return F.linear(x, self.weight, self.bias)
        params = parameters_of((x.min(), x.max()), self.bits, symmetric=False)
        return F.linear(fake_quantize(x, params), self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"inputs of {self.bits} bits by each batch"


class Int8DynamicLinear(Converted):
    """The same in int8 by torch's engine: float32 in, float32 out."""

    def __init__(self, layer: nn.Linear, weight: QuantParams, engine: str, bits: int) -> None:
        super().__init__()
        self.engine = engine
        #: Seven bits where eight would saturate inside of a product.
        self._reduced = bits < 8
        self._run, self._packed = packed_operator(layer, weight, engine, "linear_dynamic")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._run(x, self._packed, self._reduced)

    def extra_repr(self) -> str:
        return f"engine={self.engine}"


def dynamic(model: nn.Module, config: Optional[QuantConfig] = None) -> nn.Module:
    """A copy of `model` in eval mode, its linear layers replaced by DynamicLinear; of `config` the
    bits and what it says of weights count. Raises NotApplicableError where it has none."""
    config = config or QuantConfig()
    return _with(
        model, lambda layer: DynamicLinear(layer, config.weight(layer), config.activation_bits)
    )


def dynamic_int8(
    model: nn.Module, config: Optional[QuantConfig] = None, engine: Optional[str] = None
) -> nn.Module:
    """The same by Int8DynamicLinear. Raises NotApplicableError too where this processor has no
    engine, BadValueError for inputs of other bits than it takes: 8, or 7 without AVX-512 VNNI."""
    config = config or QuantConfig(activation_bits=exact_activation_bits())
    bits = exact_activation_bits()
    if config.activation_bits != bits:
        raise BadValueError(
            f"inputs of {config.activation_bits} bits by torch's dynamic int8 engine",
            why=f"it takes their range and rounds them itself, to {bits} bits on this processor",
            next_step=f"calibrate with QuantConfig(activation_bits={bits}), or simulate other bits "
            "by quant.dynamic.dynamic",
        )
    chosen = engine or choose_engine()
    return _with(model, lambda layer: Int8DynamicLinear(layer, config.weight(layer), chosen, bits))


def _with(model: nn.Module, make: Callable[[Any], nn.Module]) -> nn.Module:
    if not linear_layers(model):
        raise NotApplicableError(
            f"this {type(model).__name__} has no linear layer to quantise dynamically",
            why="convolutions are not: the range of their maps depends on the image",
            next_step="quantise it statically: quant.calibration.calibrate",
        )
    rule = Rule(make=lambda _, layer: make(layer), type=nn.Linear)
    with in_eval_mode(model):
        return convert(model, [rule])
