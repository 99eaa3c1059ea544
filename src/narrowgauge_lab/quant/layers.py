"""The fake-quantised model: inputs, outputs and weights of convolutions and linear layers rounded.

What it computes in float is what int8 execution computes in integers, so it is both the reference
of the adapters and the model to train on (straight-through).
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Dict, Mapping, Optional

import torch
from torch import nn
from torch.nn import functional as F

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.fake import FakeQuantizer
from narrowgauge_lab.quant.parameters import QuantParams
from narrowgauge_lab.transforms.conversion import Rule, convert

__all__ = ["LAYERS", "FakeQuantizedLayer", "LayerScales", "fake_quantized", "layers_of"]

_CONVOLUTIONS = {nn.Conv1d: F.conv1d, nn.Conv2d: F.conv2d, nn.Conv3d: F.conv3d}
_TRANSPOSED = {
    nn.ConvTranspose1d: F.conv_transpose1d,
    nn.ConvTranspose2d: F.conv_transpose2d,
    nn.ConvTranspose3d: F.conv_transpose3d,
}
#: What is quantised, by exact type: a subclass may compute something else.
LAYERS = (*_CONVOLUTIONS, *_TRANSPOSED, nn.Linear)


@dataclasses.dataclass(frozen=True, eq=False)
class LayerScales:
    """How one layer is quantised; `output` None leaves its output in float."""

    input: QuantParams
    weight: QuantParams
    output: Optional[QuantParams]


def layers_of(model: nn.Module) -> Dict[str, nn.Module]:
    """The layers that can be quantised, by name."""
    return {name: module for name, module in model.named_modules() if type(module) in LAYERS}


class FakeQuantizedLayer(nn.Module):
    """A convolution or linear layer on rounded inputs and weights, its output rounded too.

    `weight` and `bias` keep their names and stay in float: they are what training changes.
    """

    def __init__(self, layer: nn.Module, scales: LayerScales) -> None:
        super().__init__()
        self.weight = layer.weight
        self.bias = layer.bias
        #: The layer's own settings and arithmetic, without its tensors; hidden from modules().
        self._bare = (_without_tensors(layer),)
        self.input_quantizer = FakeQuantizer(scales.input)
        self.weight_quantizer = FakeQuantizer(scales.weight)
        self.output_quantizer = FakeQuantizer(scales.output) if scales.output else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (bare,) = self._bare
        weight = self.weight_quantizer(self.weight)
        result = _apply(bare, self.input_quantizer(x), weight, self.bias)
        return self.output_quantizer(result)


def _without_tensors(layer: nn.Module) -> nn.Module:
    bare = copy.copy(layer)
    bare._parameters = type(layer._parameters)()
    return bare


def _apply(
    layer: nn.Module, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
) -> torch.Tensor:
    """What `layer` computes, with another weight."""
    if type(layer) is nn.Linear:
        return F.linear(x, weight, bias)
    if type(layer) in _TRANSPOSED:
        function = _TRANSPOSED[type(layer)]
        place = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
        return function(x, weight, bias, *place)
    padding = layer.padding
    if layer.padding_mode != "zeros":
        x = F.pad(x, layer._reversed_padding_repeated_twice, mode=layer.padding_mode)
        padding = 0
    function = _CONVOLUTIONS[type(layer)]
    return function(x, weight, bias, layer.stride, padding, layer.dilation, layer.groups)


def fake_quantized(model: nn.Module, scales: Mapping[str, LayerScales]) -> nn.Module:
    """A copy of `model` with the layers named in `scales` (as `calibrate` gives them) quantised.

    Its state_dict has the names of the model's, and buffers for the scales. Raises BadValueError
    where a name is no layer of this model.
    """
    known = layers_of(model)
    unknown = [name for name in scales if name not in known]
    if unknown or not scales:
        raise BadValueError(
            f"scales for {', '.join(unknown)}, which are no layers of this model"
            if unknown
            else "no scales to quantise a model with",
            next_step="give the scales that `calibrate` made of this very model",
        )
    rule = Rule(
        make=lambda name, layer: FakeQuantizedLayer(layer, scales[name]),
        where=lambda name, _: name in scales,
    )
    return convert(model, [rule])
