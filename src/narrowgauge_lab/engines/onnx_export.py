"""Networks as ONNX files for the engines that read them: float32, float16, and int8 by Q/DQ nodes.

`input` and `output` have a batch dimension of any size. What is exported is the network with
BatchNorm folded, so that layers have their own names in the file.
"""

from __future__ import annotations

import copy
import re
import tempfile
from pathlib import Path
from typing import Any, Dict, List, Mapping, Sequence, Union

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import Preparation
from narrowgauge_lab.engines.cache import Cached
from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.keys import cache_key
from narrowgauge_lab.quant.calibration import QuantConfig, calibrate
from narrowgauge_lab.quant.cpu import exact_activation_bits
from narrowgauge_lab.quant.qdq import QdqStyle, export_float, export_qdq, onnx_library
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = [
    "CPU_INT8", "TENSORRT_INT8", "QdqStyle", "cached_export", "cpu_int8_config", "export",
    "export_int8", "node_layers",
]  # fmt: skip

#: Operators that keep float32 inputs in a float16 network, which `_to_float16` does not sort out.
_FLOAT32_INPUTS = ("Cast", "DequantizeLinear", "QuantizeLinear", "Resize", "Upsample")
_FLOAT16_MOST = 65504.0
#: Operators that engines merge into the layer before.
_FOLLOWING = ("Clip", "DequantizeLinear", "Mul", "QuantizeLinear", "Relu")
_LAB = Path(__file__).parents[1]
#: How torch names what it cannot export.
_OPERATOR = re.compile(r"operator '?([\w:]+)")

#: As integer operators of CPUs read it, and as TensorRT does.
CPU_INT8 = QdqStyle()
TENSORRT_INT8 = QdqStyle(signed=True, integer_bias=False)


def cpu_int8_config() -> QuantConfig:
    """Affine activations, of as many bits as this processor multiplies exactly."""
    return QuantConfig(activation_bits=exact_activation_bits())


def export(model: nn.Module, example: torch.Tensor, path: Path, precision: str = "fp32") -> None:
    """Write `model` (float32, eval, on the CPU, not changed) to `path` in fp32 or fp16; weights,
    inputs and outputs of an fp16 file are float16.

    Raises NotApplicableError where this Python has no onnx, OperatorNotTakenError where torch or
    ONNX has no such operator, BadValueError where a weight is beyond float16.
    """
    onnx = onnx_library()
    loaded = onnx.load_from_string(_exported(fold_batch_norm(model), example))
    if precision == "fp16":
        _to_float16(onnx, loaded)
    elif precision != "fp32":
        raise BadValueError(f"an ONNX file in {precision}", next_step="fp32, fp16; or export_int8")
    onnx.checker.check_model(loaded)
    onnx.save(loaded, str(path))


def export_int8(
    model: nn.Module,
    example: torch.Tensor,
    calibration: Sequence[torch.Tensor],
    path: Path,
    config: QuantConfig,
    style: QdqStyle = CPU_INT8,
) -> None:
    """Write `model` to `path` with Q/DQ nodes around its convolutions and linear layers, their
    scales from `calibration` (real images, float32 [B, C, H, W] on the CPU).

    For TensorRT: TENSORRT_INT8 with QuantConfig(activation_symmetric=True, outputs=False). Raises
    what `export` raises, and CalibrationError.
    """
    folded = fold_batch_norm(model)
    scales = calibrate(folded, calibration, config)
    try:
        export_qdq(folded, scales, _float_example(example), path, style)
    except NotApplicableError as error:
        raise _named(error, folded, example) from error


def node_layers(source: Union[Path, bytes]) -> Dict[str, str]:
    """The layer that each node of an ONNX file belongs to, by the node's name and by the names of
    what it gives: engines name what they run by either.

    A node that reads a layer's weight is that layer's; what only works on one layer's output (ReLU,
    Clip, Q/DQ) is the same layer's, since engines merge it there. Others are left out.
    """
    data = source if isinstance(source, bytes) else source.read_bytes()
    layers: Dict[str, str] = {}
    for node in onnx_library().load_from_string(data).graph.node:
        weights = [name.partition(".weight")[0] for name in node.input if ".weight" in name]
        before = [layers[node.input[0]]] if node.input and node.input[0] in layers else []
        follows = node.op_type in _FOLLOWING and not weights
        for layer in weights[:1] or (before if follows else []):
            for name in (node.name, *node.output):
                layers.setdefault(name, layer)
    return layers


def cached_export(
    engine: str,
    versions: Mapping[str, str],
    model: nn.Module,
    example: torch.Tensor,
    wanted: Preparation,
    options: Mapping[str, Scalar],
) -> Cached:
    """The ONNX file of `model` in the precision asked for, as bytes, from the cache where there is
    one: calibration takes longer than anything that an engine does with the file. int8 as CPUs read
    it; bf16 and tf32 are float32 files."""
    key = cache_key(
        engine, versions, model, example, wanted, options, [_LAB / "quant", _LAB / "transforms"]
    )

    def build() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "network.onnx"
            if wanted.precision == "int8":
                export_int8(model, example, wanted.calibration, path, cpu_int8_config())
            else:
                export(model, example, path, "fp16" if wanted.precision == "fp16" else "fp32")
            return path.read_bytes()

    if wanted.cache is None:
        return Cached(build(), False, key.digest)
    return wanted.cache.fetch(key, build)


def _exported(model: nn.Module, example: torch.Tensor) -> bytes:
    try:
        return export_float(model, _float_example(example))
    except NotApplicableError as error:
        raise _named(error, model, example) from error


def _float_example(example: torch.Tensor) -> torch.Tensor:
    """One image of its shape: the exporter runs the network on it. Its values do not matter, and an
    empty batch would leave shapes open."""
    return torch.zeros(max(1, example.shape[0]), *example.shape[1:])


def _named(
    error: NotApplicableError, model: nn.Module, example: torch.Tensor
) -> NotApplicableError:
    """The same refusal with the operator and the layer: the first layer that is refused alone. What
    is no layer, torch itself may name; where onnx is missing it stays as it is."""
    if error.what.startswith("this Python has no"):
        return error
    for name, layer, x in _leaf_calls(model, _float_example(example)):
        try:
            export_float(copy.deepcopy(layer), x)
        except NotApplicableError as refused:
            return OperatorNotTakenError("ONNX", type(layer).__name__, name, refused.why)
    found = _OPERATOR.search(error.why)
    return OperatorNotTakenError("ONNX", found.group(1), "", error.why) if found else error


def _leaf_calls(model: nn.Module, example: torch.Tensor) -> List[Any]:
    """(name, module, its input) of each module without children that gets one tensor."""
    calls: List[Any] = []

    def note(name: str) -> Any:
        def hook(layer: nn.Module, inputs: Any) -> None:
            if len(inputs) == 1 and isinstance(inputs[0], torch.Tensor):
                calls.append((name, layer, inputs[0]))

        return hook

    leaves = [(n, m) for n, m in model.named_modules() if next(m.children(), None) is None]
    handles = [layer.register_forward_pre_hook(note(name)) for name, layer in leaves]
    try:
        with torch.no_grad():
            model(example)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _to_float16(onnx: Any, loaded: Any) -> None:
    """Rewrite a float32 file in place: every float32 tensor becomes float16. By rewriting rather
    than by exporting a half network, which needs float16 convolutions on the CPU."""
    graph = loaded.graph
    for node in graph.node:
        layer = node.name
        if node.op_type in _FLOAT32_INPUTS:
            raise OperatorNotTakenError("ONNX in float16", node.op_type, layer)
        for attribute in node.attribute:
            if attribute.HasField("t"):
                _halve(onnx, attribute.t, layer)
    for tensor in graph.initializer:
        _halve(onnx, tensor, tensor.name)
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    for value in (*graph.input, *graph.output):
        if value.type.tensor_type.elem_type == single:
            value.type.tensor_type.elem_type = half
    del graph.value_info[:]


def _halve(onnx: Any, tensor: Any, name: str) -> None:
    if tensor.data_type != onnx.TensorProto.FLOAT:
        return
    values = onnx.numpy_helper.to_array(tensor)
    if values.size and float(np.abs(values).max()) > _FLOAT16_MOST:
        raise BadValueError(
            f"{name} holds {float(np.abs(values).max()):g}",
            why=f"float16 ends at {_FLOAT16_MOST:g}",
            next_step="run this network in bf16 or fp32",
        )
    tensor.CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float16), tensor.name))
