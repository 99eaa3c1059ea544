"""The scales of a fake-quantised model executed in int8 by torch's own CPU engine.

The operators are called directly, layer by layer: activations are quantised in front of each layer
and dequantised after it, what is between the layers stays in float32. torch's model-level tools
(torch.quantization, torch.ao.quantization) bring observers and rewriting of their own, and are
deprecated; their operators, which do the work, are not.
"""

from __future__ import annotations

import platform
from typing import Any, Callable, Dict, Mapping, Optional, Tuple, Type

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.quant.converted import Converted
from narrowgauge_lab.quant.cpu import exact_activation_bits, require_exact
from narrowgauge_lab.quant.layers import LayerScales, layers_of
from narrowgauge_lab.quant.parameters import QuantParams
from narrowgauge_lab.torch_compat import quantized_tensors
from narrowgauge_lab.transforms.conversion import Rule, convert

__all__ = ["Int8Layer", "choose_engine", "packed_operator", "to_int8"]

#: By machine, best first: `x86` chooses between FBGEMM and oneDNN, `qnnpack` is for ARM.
_ENGINES = {
    "x86_64": ("x86", "fbgemm"),
    "amd64": ("x86", "fbgemm"),
    "aarch64": ("qnnpack",),
    "arm64": ("qnnpack",),
}
_DIMENSIONS: Dict[Type[nn.Module], int] = {nn.Conv1d: 1, nn.Conv2d: 2, nn.Conv3d: 3}


def choose_engine(machine: str = platform.machine()) -> str:
    """The engine that this torch has for this processor. Raises NotApplicableError."""
    there = torch.backends.quantized.supported_engines
    for name in _ENGINES.get(machine.lower(), ()):
        if name in there:
            return name
    raise NotApplicableError(
        f"this torch has no int8 engine for {machine}",
        why=f"it has {', '.join(there) or 'none'}",
        next_step="use the ONNX Runtime adapter, or measure on x86-64 or arm64",
    )


class Int8Layer(Converted):
    """A convolution or linear layer whose products are of integers: float32 in, float32 out."""

    def __init__(self, name: str, layer: nn.Module, scales: LayerScales, engine: str) -> None:
        super().__init__()
        if scales.output is None:
            raise BadValueError(
                f"the output of layer {name} has no scale",
                why="the int8 engine rounds what it gives",
                next_step="calibrate with QuantConfig(outputs=True)",
            )
        self.engine = engine
        self.input = _Activation(scales.input)
        self.output = _Activation(scales.output)
        self._run, self._packed = _pack(name, layer, scales.weight, engine)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        quantised = torch.quantize_per_tensor(
            self.input.clamp(x), self.input.scale, self.input.zero_point, torch.quint8
        )
        result = self._run(quantised, self._packed, self.output.scale, self.output.zero_point)
        return self.output.clamp(result.dequantize())

    def extra_repr(self) -> str:
        return f"engine={self.engine}"


class _Activation:
    """Per-tensor parameters as the engine takes them: unsigned bytes, the ends of the range apart
    (formats of fewer bits, and signed ones, use part of the 256 values)."""

    def __init__(self, params: QuantParams) -> None:
        shift = -params.quant_min if params.symmetric else 0
        zero_point = int(params.zero_point)
        self.scale = float(params.scale)
        self.zero_point = zero_point + shift
        self.low = (params.quant_min - zero_point) * self.scale
        self.high = (params.quant_max - zero_point) * self.scale

    def clamp(self, x: torch.Tensor) -> torch.Tensor:
        return x.clamp(self.low, self.high)


def _pack(
    name: str, layer: nn.Module, params: QuantParams, engine: str
) -> Tuple[Callable[..., torch.Tensor], Any]:
    """The engine's operator for `layer` and the layer's tensors as it keeps them."""
    if not params.symmetric:
        raise BadValueError(
            f"the weight of layer {name} is affine",
            next_step="calibrate with QuantConfig(weight_symmetric=True)",
        )
    dimensions = _DIMENSIONS.get(type(layer))
    if dimensions is None and type(layer) is not nn.Linear:
        raise NotApplicableError(
            f"the int8 engine has no {type(layer).__name__} (layer {name})",
            next_step="leave it in float: QuantConfig(skip=(...)), or use ONNX Runtime",
        )
    if dimensions and (layer.padding_mode != "zeros" or isinstance(layer.padding, str)):
        raise NotApplicableError(
            f"the int8 engine pads with a number of zeros, layer {name} by {layer.padding}, "
            f"{layer.padding_mode}",
            next_step="leave it in float: QuantConfig(skip=(...)), or use ONNX Runtime",
        )
    weight = _quantized_weight(layer.weight, params)
    bias = None if layer.bias is None else layer.bias.detach().float()
    ops = torch.ops.quantized
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = engine
    try:
        # The packed weight belongs to the engine that packed it, and runs there ever after.
        if not dimensions:
            return _operator("linear"), ops.linear_prepack(weight, bias)
        prepack = getattr(ops, f"conv{dimensions}d_prepack")
        place = [list(each) for each in (layer.stride, layer.padding, layer.dilation)]
        packed = prepack(weight, bias, *place, layer.groups)
        return _operator(f"conv{dimensions}d"), packed
    finally:
        torch.backends.quantized.engine = before


def packed_operator(
    layer: nn.Linear, params: QuantParams, engine: str, operator: str
) -> Tuple[Callable[..., torch.Tensor], Any]:
    """Another operator of torch's that takes a packed linear layer, and the layer so packed."""
    return _operator(operator), _pack("of a linear operator", layer, params, engine)[1]


def _operator(name: str) -> Callable[..., torch.Tensor]:
    """Looked up at each call, as torch's own modules do: before torch 2.0, whoever watches which
    operators run can stand only there (measure.tracing)."""

    def run(*arguments: Any) -> torch.Tensor:
        result: torch.Tensor = getattr(torch.ops.quantized, name)(*arguments)
        return result

    return run


def _quantized_weight(weight: torch.Tensor, params: QuantParams) -> torch.Tensor:
    # From the values of the integers: also those of a range that clips, or of fewer bits.
    values = params.dequantize(params.quantize(weight.detach().float()))
    with quantized_tensors():
        if params.axis is None:
            return torch.quantize_per_tensor(values, float(params.scale), 0, torch.qint8)
        zeros = torch.zeros(len(params.scale), dtype=torch.int64)
        scales = params.scale.double()
        return torch.quantize_per_channel(values, scales, zeros, params.axis, torch.qint8)


def to_int8(
    model: nn.Module, scales: Mapping[str, LayerScales], engine: Optional[str] = None
) -> nn.Module:
    """A copy of `model` in eval mode, the layers named in `scales` replaced by Int8Layer. It stays
    there: putting it into training mode raises ConvertedModelError.

    It computes what `fake_quantized(model, scales)` computes, but for sums in int32 instead of
    float32 (QNNPACK rounds biases to theirs too), which can move a result that is next to a tie by
    one step of the layer's output.

    Raises BadValueError where the activations' bits are too many for this processor,
    NotApplicableError where a layer has no int8 operator.
    """
    unknown = [name for name in scales if name not in layers_of(model)]
    if unknown:
        raise BadValueError(f"scales for {', '.join(unknown)}, which are no layers of this model")
    require_exact(scales, exact_activation_bits())
    chosen = engine or choose_engine()
    rule = Rule(
        make=lambda name, layer: Int8Layer(name, layer, scales[name], chosen),
        where=lambda name, _: name in scales,
    )
    with in_eval_mode(model):  # which the new layers take over
        return convert(model, [rule])
