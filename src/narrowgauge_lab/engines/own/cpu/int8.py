"""int8 on a CPU: torch's quantised operators, with scales from real images."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.engines.onnx_export import cpu_int8_config
from narrowgauge_lab.engines.own.cpu.forms import Form
from narrowgauge_lab.quant.calibration import calibrate
from narrowgauge_lab.quant.layers import LayerScales, layers_of
from narrowgauge_lab.quant.parameters import QuantParams
from narrowgauge_lab.quant.x86 import Int8Layer, to_int8
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["INT8", "Int8Forms", "activation_scales"]

INT8 = "int8"


def activation_scales(
    model: nn.Module, images: Tuple[torch.Tensor, ...]
) -> Dict[str, Dict[str, Any]]:
    """What calibration finds for inputs and outputs of each layer of `model`, as JSON has it.

    Weights' scales follow from the weights. Raises CalibrationError without images.
    """
    scales = calibrate(fold_batch_norm(model), images, cpu_int8_config())
    return {
        name: {"input": _to_dict(each.input), "output": _to_dict(each.output)}
        for name, each in scales.items()
    }


class Int8Forms:
    """Makes the int8 form of `model` (eval, float32; not changed) from its activations' scales."""

    names = (INT8,)

    def __init__(self, model: nn.Module, scales: Mapping[str, Mapping[str, Any]]) -> None:
        self._folded = fold_batch_norm(model)
        self._scales = scales

    def make(self, name: str) -> Form:
        """The form; there is one. Activations are channels_last, as torch's operators keep them.
        Raises NotApplicableError where a layer has no int8 operator."""
        assert name == INT8
        config, layers = cpu_int8_config(), layers_of(self._folded)
        scales = {
            layer: LayerScales(
                _params(each["input"]), config.weight(layers[layer]), _params(each["output"])
            )
            for layer, each in self._scales.items()
        }
        network = to_int8(self._folded, scales)

        def call(x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = network(x.contiguous(memory_format=torch.channels_last))
            return result

        bits = config.activation_bits
        return Form(call, tuple(_facts(network, bits)))


def _facts(network: nn.Module, bits: int) -> Tuple[LayerFact, ...]:
    return tuple(
        LayerFact(name, "Int8Layer", f"torch {layer.engine}", f"activations of {bits} bits", INT8)
        for name, layer in network.named_modules()
        if isinstance(layer, Int8Layer)
    )


def _to_dict(params: Any) -> Dict[str, Any]:
    """Per tensor: scale and zero point are one number each. A double holds a float32 exactly."""
    assert isinstance(params, QuantParams)
    assert params.axis is None
    found = {name.name: getattr(params, name.name) for name in dataclasses.fields(params)}
    return {**found, "scale": float(params.scale), "zero_point": int(params.zero_point)}


def _params(found: Mapping[str, Any]) -> QuantParams:
    return QuantParams(
        torch.tensor(found["scale"], dtype=torch.float32),
        torch.tensor(found["zero_point"], dtype=torch.int32),
        found["bits"], found["axis"], found["symmetric"], found["narrow"],
    )  # fmt: skip
