"""A float model and its scales as an ONNX file with QuantizeLinear and DequantizeLinear nodes.

torch exports the float model; the nodes are put around each quantised layer here, the way TensorRT
and ONNX Runtime read them: weights and biases as stored integers, activations quantised in front of
the layer and after it. This is the one module that imports onnx.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import warnings
from pathlib import Path
from typing import Any, Dict, List, Mapping

import numpy as np
import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_lab.quant.layers import LayerScales, layers_of
from narrowgauge_lab.quant.parameters import QuantParams

__all__ = ["OPSET", "QdqStyle", "export_float", "export_qdq", "onnx_library", "operator_counts"]

#: The first with scales along an axis; old enough for TensorRT 8.
OPSET = 13


@dataclasses.dataclass(frozen=True)
class QdqStyle:
    """How what is rounded is written down.

    `signed`: activations as int8 with zero point 0, which is all that TensorRT reads; they have to
    be symmetric. Otherwise as uint8. `integer_bias`: biases as int32 in steps of the products, as
    ONNX Runtime's integer operators add them; TensorRT reads float biases only.
    """

    signed: bool = False
    integer_bias: bool = True


def export_qdq(
    model: nn.Module,
    scales: Mapping[str, LayerScales],
    example: torch.Tensor,
    path: Path,
    style: QdqStyle = QdqStyle(),
) -> None:
    """Write `model` (BatchNorm folded, in eval mode) to `path`; `input` and `output` have a batch
    dimension of any size.

    Raises NotApplicableError where this Python has no onnx or torch cannot export the model,
    BadValueError where a layer is not found in what torch exports, or has an affine weight.
    """
    onnx = onnx_library()
    exported = onnx.load_from_string(export_float(model, example))
    rewriter = _Rewriter(onnx, exported.graph, layers_of(model), style)
    for name, each in scales.items():
        rewriter.quantise(name, each)
    rewriter.finish()
    onnx.checker.check_model(exported)
    onnx.save(exported, str(path))


def operator_counts(path: Path) -> Dict[str, int]:
    """How often each operator stands in an ONNX file."""
    counts: Dict[str, int] = {}
    for node in onnx_library().load(str(path)).graph.node:
        counts[node.op_type] = counts.get(node.op_type, 0) + 1
    return counts


def onnx_library() -> Any:
    """onnx, with the submodules used here. Raises NotApplicableError where this Python has none."""
    try:
        import onnx
        import onnx.checker
        import onnx.helper
        import onnx.numpy_helper
    except ImportError as error:
        raise NotApplicableError(
            "this Python has no onnx",
            why=str(error),
            next_step="pip install onnx",
        ) from error
    return onnx


def export_float(model: nn.Module, example: torch.Tensor) -> bytes:
    """The float model as torch writes it, every parameter under its own name, but for those of a
    convolution that torch merged with the BatchNorm behind it. `input` and `output` have a batch
    dimension of any size. Raises BadValueError, NotApplicableError.
    """
    if model.training:
        raise BadValueError(
            "a model in training mode is not what will run", next_step="model.eval()"
        )
    stream = io.BytesIO()
    batch = {"input": {0: "batch"}, "output": {0: "batch"}}
    # Since 2.5 `dynamo` chooses between two exporters; the newer renames parameters.
    chooses = "dynamo" in torch.onnx.export.__code__.co_varnames
    # The exporter prints the whole graph where it cannot go on.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        for about in ("You are using the legacy TorchScript-based", "The feature will be removed"):
            warnings.filterwarnings("ignore", message=about, category=DeprecationWarning)
        try:
            torch.onnx.export(
                model,
                (example,),
                stream,
                opset_version=OPSET,
                do_constant_folding=False,
                input_names=["input"],
                output_names=["output"],
                dynamic_axes=batch,
                **({"dynamo": False} if chooses else {}),
            )
        except RuntimeError as error:  # of which torch's own export errors are
            raise NotApplicableError(
                f"torch cannot export this {type(model).__name__} to ONNX",
                why=str(error).splitlines()[0],
                next_step="replace the operator that it names",
            ) from error
    return stream.getvalue()


class _Rewriter:
    """Puts the nodes into one graph."""

    def __init__(
        self, onnx: Any, graph: Any, layers: Dict[str, nn.Module], style: QdqStyle
    ) -> None:
        self.onnx = onnx
        self.graph = graph
        self.layers = layers
        self.style = style
        self.stored = {each.name: each for each in graph.initializer}
        #: Original position of a node -> new ones in front of it, and behind it.
        self.before: Dict[str, List[Any]] = {}
        self.after: Dict[str, List[Any]] = {}

    def quantise(self, name: str, scales: LayerScales) -> None:
        """Round the inputs, weight, bias and output of every node that uses the layer's weight."""
        weight_name = f"{name}.weight" if name else "weight"
        layer = self.layers.get(name)
        nodes = [node for node in self.graph.node if weight_name in node.input]
        if layer is None or not nodes or not self._holds(weight_name, layer.weight):
            raise BadValueError(
                f"torch's ONNX export has no {weight_name} as it was calibrated",
                why="it is no layer of this model, its inputs are not of two dimensions (a linear "
                "layer), or it was merged with the BatchNorm behind it",
                next_step="fold BatchNorm before calibrating: transforms.fold_batch_norm(model)",
            )
        weight = self._store(weight_name, scales.weight, layer.weight)
        for number, node in enumerate(nodes):
            if node.op_type not in ("Conv", "ConvTranspose", "Gemm"):
                raise NotApplicableError(
                    f"layer {name} is exported as {node.op_type}, not as a layer of its own",
                    next_step="leave it in float: QuantConfig(skip=(...))",
                )
            tag = f"{name}.{number}"
            made = self.before.setdefault(node.output[0], [])
            node.input[0] = self._round(f"{tag}.input", node.input[0], scales.input, made)
            node.input[1] = weight
            if len(node.input) > 2 and layer.bias is not None and self.style.integer_bias:
                node.input[2] = self._store_bias(node.input[2], layer, scales)
            if scales.output is not None:
                self._round_output(f"{tag}.output", node, scales.output)

    def _holds(self, name: str, weight: torch.Tensor) -> bool:
        """Whether the export still stores `weight` under this name."""
        stored = self.onnx.numpy_helper.to_array(self.stored[name])
        return np.array_equal(stored, weight.detach().cpu().numpy())

    def finish(self) -> None:
        """The nodes in an order in which each is computed before it is used."""
        nodes = list(self.graph.node)
        del self.graph.node[:]
        for node in nodes:
            # The key of a node whose output was renamed is its new name.
            self.graph.node.extend(self.before.get(node.output[0], []))
            self.graph.node.append(node)
            self.graph.node.extend(self.after.get(node.output[0], []))
        self._drop_unused()

    def _drop_unused(self) -> None:
        used = {name for node in self.graph.node for name in node.input}
        kept = [each for each in self.graph.initializer if each.name in used]
        del self.graph.initializer[:]
        self.graph.initializer.extend(kept)

    def _round(self, tag: str, source: str, params: QuantParams, made: List[Any]) -> str:
        """An input: saturated where its format has fewer values than a byte, and rounded."""
        result, clipped = f"{tag}.rounded", f"{tag}.clipped"
        clip = self._clip(tag, source, params, clipped)
        made += [*clip, *self._pair(tag, clipped if clip else source, params, result)]
        return result

    def _round_output(self, tag: str, node: Any, params: QuantParams) -> None:
        """The node gets a new output; the old name is that of the rounded one."""
        old, raw, rounded = node.output[0], f"{tag}.raw", f"{tag}.rounded"
        node.output[0] = raw
        self.before[raw] = self.before.pop(old)
        # Saturated after rounding: only a layer that a QuantizeLinear follows at once runs in int8.
        clip = self._clip(tag, rounded, params, old)
        self.after[raw] = [*self._pair(tag, raw, params, rounded if clip else old), *clip]

    def _clip(self, tag: str, source: str, params: QuantParams, result: str) -> List[Any]:
        if params.quant_max - params.quant_min == 255:
            return []
        zero, step = int(params.zero_point), float(params.scale)
        ends = [
            self._keep(f"{tag}.{which}", np.array((end - zero) * step, dtype=np.float32))
            for which, end in (("low", params.quant_min), ("high", params.quant_max))
        ]
        return [self._node("Clip", [source, *ends], result)]

    def _pair(self, tag: str, source: str, params: QuantParams, result: str) -> List[Any]:
        scale = self._keep(f"{tag}.scale", np.array(float(params.scale), dtype=np.float32))
        if self.style.signed:
            if not params.symmetric:
                raise BadValueError(
                    f"{tag} is affine, and is to be written as signed integers",
                    next_step="calibrate with QuantConfig(activation_symmetric=True)",
                )
            point = np.array(0, dtype=np.int8)
        else:
            # Unsigned bytes from 0: what fewer bits leave unused lies above.
            shift = -params.quant_min if params.symmetric else 0
            point = np.array(int(params.zero_point) + shift, dtype=np.uint8)
        parameters = [scale, self._keep(f"{tag}.zero_point", point)]
        integers = f"{tag}.integers"
        return [
            self._node("QuantizeLinear", [source, *parameters], integers),
            self._node("DequantizeLinear", [integers, *parameters], result),
        ]

    def _store(self, name: str, params: QuantParams, weight: torch.Tensor) -> str:
        """A weight as int8 and the node that dequantises it; the name of what that gives."""
        if not params.symmetric:
            raise BadValueError(
                f"{name} is affine", next_step="calibrate with QuantConfig(weight_symmetric=True)"
            )
        integers = params.quantize(weight.detach().float().cpu()).numpy().astype(np.int8)
        scale = params.scale.cpu().numpy()
        return self._stored(name, integers, scale, params.axis, np.int8)

    def _store_bias(self, name: str, layer: nn.Module, scales: LayerScales) -> str:
        """A bias as int32 in steps of input scale times weight scale, as int8 execution adds it."""
        result = f"{name}.rounded"
        if result in self.stored:
            return result
        weight = scales.weight
        if type(layer) not in (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d) and layer.groups > 1:
            return name  # scales per output and group differ from those of the outputs
        step = (scales.input.scale.double() * weight.scale.double()).cpu().numpy()
        exact = layer.bias.detach().double().cpu().numpy()
        limits = np.iinfo(np.int32)
        integers = np.clip(np.rint(exact / step), limits.min, limits.max).astype(np.int32)
        axis = 0 if weight.axis is not None else None
        return self._stored(name, integers, step.astype(np.float32), axis, np.int32)

    def _stored(self, name: str, integers: Any, scale: Any, axis: Any, dtype: Any) -> str:
        result = f"{name}.rounded"
        inputs = [
            self._keep(f"{name}.integers", integers),
            self._keep(f"{name}.scale", scale),
            self._keep(f"{name}.zero_point", np.zeros(scale.shape, dtype=dtype)),
        ]
        node = self._node("DequantizeLinear", inputs, result)
        if axis is not None:
            node.attribute.append(self.onnx.helper.make_attribute("axis", axis))
        # Stored values need nothing, so they may stand first.
        self.graph.node.insert(0, node)
        self.stored[result] = node
        return result

    def _keep(self, name: str, value: Any) -> str:
        if name not in self.stored:
            tensor = self.onnx.numpy_helper.from_array(np.asarray(value), name)
            self.graph.initializer.append(tensor)
            self.stored[name] = tensor
        return name

    def _node(self, kind: str, inputs: List[str], result: str) -> Any:
        return self.onnx.helper.make_node(kind, inputs, [result], name=result)
