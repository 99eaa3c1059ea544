"""What each layer of a built engine runs as, from the engine inspector's JSON.

    {"Layers": [{"Name": "conv1 + relu1", "LayerType": "CaskConvolution", "TacticName": "sm80_...",
                 "Weights": {"Type": "Int8", "Count": 9408},
                 "Inputs": [{"Name": "input", "Format/Datatype": "Row major linear FP32"}], ...}]}

Until 10.x a tensor has "Format/Datatype"; from 11.0 on "DataType" and "Format". An engine that was
built without details has names only.
"""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Iterator, Mapping, Sequence, Tuple

from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.engines.tensorrt.bundle import Built

__all__ = ["count_loadables", "facts_of_network", "layer_facts"]

#: Words for types, of all versions; the first that is found counts.
_TYPES = (
    ("bf16", r"bf16|bfloat16"), ("fp16", r"fp16|half|float16"), ("fp8", r"fp8"),
    ("int8", r"int8"), ("fp32", r"fp32|float"), ("int32", r"int32"), ("int64", r"int64"),
    ("bool", r"bool"),
)  # fmt: skip


def layer_facts(information: str, built: Built, dla: int) -> Tuple[LayerFact, ...]:
    """The facts of all layers in the order in which they run. `dla`: the core, -1 for none."""
    reasons = dict(built.fallback)
    return tuple(_fact(layer, reasons, dla) for layer in _layers(information))


def facts_of_network(built: Built, dla: int) -> Tuple[LayerFact, ...]:
    """Where there is no inspector: the layers that were to be built. What they became, and in what
    precision, this TensorRT does not tell."""
    reasons = dict(built.fallback)
    on_dla = set(built.on_dla)
    return tuple(
        LayerFact(name, kind, _provider(name, reasons, dla if name in on_dla else -1), "", "")
        for name, kind in built.network
    )


def count_loadables(information: str) -> int:
    """How many pieces of an engine run on a DLA."""
    return sum(layer.get("LayerType") == "DLA" for layer in _layers(information))


def _layers(information: str) -> Iterator[Mapping[str, Any]]:
    for each in json.loads(information).get("Layers", []):
        yield each if isinstance(each, dict) else {"Name": str(each)}


def _fact(layer: Mapping[str, Any], reasons: Dict[str, str], dla: int) -> LayerFact:
    name, kind = str(layer.get("Name", "")), str(layer.get("LayerType", ""))
    kernel = str(layer.get("TacticName", ""))
    precision = _precision(layer)
    if precision == "fp32" and "tf32" in kernel.lower():
        precision = "tf32"
    provider = _provider(name, reasons, dla if kind == "DLA" else -1)
    return LayerFact(name, kind, provider, kernel, precision)


def _provider(name: str, reasons: Dict[str, str], dla: int) -> str:
    if dla >= 0:
        return f"tensorrt, DLA core {dla}"
    # Layers that were fused are called "one + another".
    for part in name.split(" + "):
        if part in reasons:
            return f"tensorrt, GPU because {reasons[part]}"
    return "tensorrt"


def _precision(layer: Mapping[str, Any]) -> str:
    """The type that a layer computes with: its weights' where it has some, else its input's."""
    weights = layer.get("Weights")
    if isinstance(weights, dict) and weights.get("Count"):
        return _type(str(weights.get("Type", "")))
    for side in ("Inputs", "Outputs"):
        tensors: Sequence[Any] = layer.get(side) or ()
        for tensor in tensors:
            found = _type(_text(tensor)) if isinstance(tensor, dict) else ""
            if found:
                return found
    return ""


def _text(tensor: Mapping[str, Any]) -> str:
    for field in ("Format/Datatype", "Format/DataType", "DataType", "Datatype"):
        if field in tensor:
            return str(tensor[field])
    return ""


def _type(text: str) -> str:
    return next((name for name, word in _TYPES if re.search(word, text, re.IGNORECASE)), "")
