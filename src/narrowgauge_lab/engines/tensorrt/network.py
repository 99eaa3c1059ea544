"""Networks for the builder: from an ONNX file, or one convolution defined directly."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.tensorrt.failures import failure
from narrowgauge_lab.engines.tensorrt.features import data_types
from narrowgauge_lab.engines.tensorrt.library import Library
from narrowgauge_lab.engines.tensorrt.onnx_nodes import node_names
from narrowgauge_lab.errors import OutOfMemoryError

__all__ = [
    "ConvolutionSpec", "Definition", "create_network", "define_convolution", "parse", "weights_of",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Definition:
    """`network`, and what it refers to and does not own: it has to live until the build is done."""

    network: Any
    owned: Tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class ConvolutionSpec:
    """One convolution with a replaceable kernel, as a pass of training needs it.

    `image` (height, width) of an input of `inputs` channels. `pre` and `post`: padding before and
    after each dimension; of a transposed convolution, what is cut away. The kernel is [outputs,
    inputs / groups, h, w], that of a transposed one [inputs, outputs / groups, h, w].
    """

    inputs: int
    outputs: int
    image: Tuple[int, int]
    kernel: Tuple[int, int]
    stride: Tuple[int, int] = (1, 1)
    pre: Tuple[int, int] = (0, 0)
    post: Tuple[int, int] = (0, 0)
    dilation: Tuple[int, int] = (1, 1)
    groups: int = 1
    transposed: bool = False
    bias: bool = False

    def weight_shape(self) -> Tuple[int, int, int, int]:
        first, second = (
            (self.inputs, self.outputs) if self.transposed else (self.outputs, self.inputs)
        )
        return (first, second // self.groups, *self.kernel)


def create_network(library: Library, builder: Any, strong: bool) -> Any:
    kinds = library.trt.NetworkDefinitionCreationFlag
    flags = 1 << int(kinds.EXPLICIT_BATCH) if library.features.explicit_batch else 0
    if strong and hasattr(kinds, "STRONGLY_TYPED"):
        flags |= 1 << int(kinds.STRONGLY_TYPED)
    network = builder.create_network(flags)
    if network is None:
        raise failure("TensorRT makes no network", library.said.take())
    return network


def parse(library: Library, builder: Any, model: bytes, strong: bool) -> Definition:
    """The network of an ONNX file. Raises OperatorNotTakenError, naming operator and layer."""
    network = create_network(library, builder, strong)
    parser = library.trt.OnnxParser(network, library.said)
    if not parser.parse(model):
        raise _refusal(library.trt, parser, model, library.said.take())
    # Until 8.x its weights are the parser's and the file's.
    return Definition(network, (parser, model))


def _refusal(trt: Any, parser: Any, model: bytes, said: str) -> Exception:
    errors = [parser.get_error(i) for i in range(parser.num_errors)]
    if any(each.code() == trt.ErrorCode.MEM_ALLOC_FAILED for each in errors):
        return OutOfMemoryError("memory ran out while TensorRT read the network", why=said)
    for each in errors:
        name, operator = _node(each, model)
        if operator:
            return OperatorNotTakenError("tensorrt", operator, name, each.desc())
    why = "\n".join(str(each.desc()) for each in errors) or said
    return failure("TensorRT cannot read the network", why)


def _node(error: Any, model: bytes) -> Tuple[str, str]:
    """Name and operator of the node that an error is about; nothing where it is about none."""
    if hasattr(error, "node_operator"):
        return str(error.node_name()), str(error.node_operator())
    number = int(error.node())
    try:
        nodes = node_names(model)
    except ValueError:
        return "", ""
    return nodes[number] if 0 <= number < len(nodes) else ("", "")


def define_convolution(
    library: Library,
    builder: Any,
    spec: ConvolutionSpec,
    weights: Mapping[str, torch.Tensor],
    strong: bool,
) -> Definition:
    """`weights`: "kernel", and "bias" where the spec has one, under which names they can be
    refitted; their dtype is that of the input. The batch may be of any size."""
    trt, said = library.trt, library.said
    network = create_network(library, builder, strong)
    kept: List[Any] = []
    given: Dict[str, Any] = {}
    for name, tensor in weights.items():
        value, owner = weights_of(trt, tensor)
        given[name] = value
        kept += [value, owner]
    types = {dtype: each for each, dtype in data_types(trt).items()}
    source = network.add_input(
        name="input", dtype=types[weights["kernel"].dtype], shape=(-1, spec.inputs, *spec.image)
    )
    make = network.add_deconvolution_nd if spec.transposed else network.add_convolution_nd
    layer = make(source, spec.outputs, spec.kernel, given["kernel"], given.get("bias"))
    if layer is None:
        raise failure("TensorRT takes no such convolution", said.take())
    layer.name = "convolution"
    layer.stride_nd, layer.dilation_nd = spec.stride, spec.dilation
    layer.pre_padding, layer.post_padding = spec.pre, spec.post
    layer.num_groups = spec.groups
    for name, value in given.items():
        if not network.set_weights_name(value, name):
            raise failure(f"TensorRT does not name the {name}", said.take())
    output = layer.get_output(0)
    output.name = "output"
    network.mark_output(output)
    return Definition(network, tuple(kept))


def weights_of(trt: Any, tensor: torch.Tensor) -> Tuple[Any, torch.Tensor]:
    """TensorRT's view of a tensor, on the CPU or on a GPU, and the tensor whose memory it looks at,
    which has to outlive it."""
    owner = tensor.detach().contiguous()
    if owner.device.type == "cpu" and owner.dtype != torch.bfloat16:  # numpy has none
        return trt.Weights(owner.numpy()), owner
    types = {dtype: each for each, dtype in data_types(trt).items()}
    if owner.dtype not in types:
        raise NotApplicableError(f"TensorRT {trt.__version__} has no weights of {owner.dtype}")
    return trt.Weights(types[owner.dtype], owner.data_ptr(), owner.numel()), owner
