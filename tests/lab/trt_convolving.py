"""The stand-in for TensorRT with engines that compute what their network says: convolutions,
deconvolutions, shuffles and products, in float64. It keeps TensorRT's rules about those, too."""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Sequence, Set

import numpy as np
import torch
from torch.nn import functional
from trt_fake import new
from trt_world import World, _read, _write

_TYPES = {"FLOAT": np.float32, "HALF": np.float16}
_DEFAULTS = {
    "stride_nd": (1, 1), "dilation_nd": (1, 1), "pre_padding": (0, 0), "post_padding": (0, 0),
    "num_groups": 1,
}  # fmt: skip
#: Inputs and named weights of one call, by name.
Feed = Dict[str, torch.Tensor]
Evaluate = Callable[[Feed], torch.Tensor]


def convolved(said: Dict[str, Any], x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    (top, left), (bottom, right) = said["pre_padding"], said["post_padding"]
    x = functional.pad(x, (left, right, top, bottom))
    kernel = kernel.view(said["maps"], x.shape[1] // said["num_groups"], *said["window"])
    return functional.conv2d(
        x, kernel, None, said["stride_nd"], 0, said["dilation_nd"], said["num_groups"]
    )


def deconvolved(said: Dict[str, Any], x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
    (top, left), (bottom, right) = said["pre_padding"], said["post_padding"]
    kernel = kernel.view(x.shape[1], said["maps"] // said["num_groups"], *said["window"])
    y = functional.conv_transpose2d(
        x, kernel, None, said["stride_nd"], 0, 0, said["num_groups"], said["dilation_nd"]
    )
    return y[:, :, top : y.shape[2] - bottom, left : y.shape[3] - right]


class Convolving(World):
    """`programs`: the networks that were built, by the number that their plans have."""

    def __init__(self, version: str, **without: Any) -> None:
        super().__init__(version, **without)
        self.programs: List[Any] = []

    # Defining

    def _add_input(self, network: Any, name: str, dtype: Any, shape: Any) -> Any:
        source = super()._add_input(network, name, dtype, shape)
        source._values["evaluate"] = lambda feed: feed[name]
        return source

    def _made(
        self, network: Any, kind: str, type_: str, reads: Sequence[Any], evaluate: Any, **said: Any
    ) -> Any:
        """A layer whose output is `evaluate(its values, feed, values of what it reads)`."""
        layer = new(getattr(self.module, kind), name="", num_inputs=len(reads), num_outputs=1,
                    type=getattr(self.module.LayerType, type_), **said)  # fmt: skip

        def output(feed: Feed) -> torch.Tensor:
            read = [each._values["evaluate"](feed) for each in reads]
            result: torch.Tensor = evaluate(layer._values, feed, *read)
            return result

        tensor = new(self.module.ITensor, name="", is_shape_tensor=False, evaluate=output)
        layer._values["sides"] = [list(reads), [tensor]]
        network._values["layers"].append(layer)
        return layer

    def _with_kernel(
        self, network: Any, kind: str, type_: str, how: Any, source: Any, kernel: Any, **said: Any
    ) -> Any:
        def evaluate(said: Dict[str, Any], feed: Feed, x: torch.Tensor) -> torch.Tensor:
            named = network._values["names"].items()
            name = next((name for name, value in named if value is kernel), None)
            weight = _tensor(kernel._values["array"]) if name is None else feed[name]
            result: torch.Tensor = how(said, x, weight)
            return result

        return self._made(network, kind, type_, [source], evaluate, **_DEFAULTS, **said)

    def INetworkDefinition_add_convolution_nd(  # noqa: N802
        self, network: Any, input: Any, num_output_maps: int, kernel_shape: Any, kernel: Any,  # noqa: A002
        bias: Any = None,
    ) -> Any:  # fmt: skip
        assert bias is None
        return self._with_kernel(
            network, "IConvolutionLayer", "CONVOLUTION", convolved, input, kernel,
            maps=num_output_maps, window=tuple(kernel_shape),
        )  # fmt: skip

    def INetworkDefinition_add_deconvolution_nd(  # noqa: N802
        self, network: Any, input: Any, num_output_maps: int, kernel_shape: Any, kernel: Any,  # noqa: A002
        bias: Any = None,
    ) -> Any:  # fmt: skip
        assert bias is None
        return self._with_kernel(
            network, "IDeconvolutionLayer", "DECONVOLUTION", deconvolved, input, kernel,
            maps=num_output_maps, window=tuple(kernel_shape),
        )  # fmt: skip

    def INetworkDefinition_add_shuffle(self, network: Any, input: Any) -> Any:  # noqa: A002, N802
        def evaluate(said: Dict[str, Any], _feed: Feed, x: torch.Tensor) -> torch.Tensor:
            order = said["first_transpose"]._values["order"]
            return x.permute(order).reshape(said["reshape_dims"])

        return self._made(network, "IShuffleLayer", "SHUFFLE", [input], evaluate)

    def Permutation_init(self, permutation: Any, arg0: Sequence[int]) -> None:  # noqa: N802
        permutation._values["order"] = tuple(arg0)

    def INetworkDefinition_add_matrix_multiply(  # noqa: N802
        self, network: Any, input0: Any, op0: Any, input1: Any, op1: Any
    ) -> Any:
        def evaluate(_said: Any, _feed: Feed, one: torch.Tensor, two: torch.Tensor) -> torch.Tensor:
            turned = [each.transpose(1, 2) if op.name == "TRANSPOSE" else each
                      for each, op in ((one, op0), (two, op1))]  # fmt: skip
            return torch.matmul(*turned)

        return self._made(
            network, "IMatrixMultiplyLayer", "MATRIX_MULTIPLY", [input0, input1], evaluate
        )

    def INetworkDefinition_mark_output(self, network: Any, tensor: Any) -> None:  # noqa: N802
        network._values["output"] = tensor

    # Building

    def IOptimizationProfile_set_shape(  # noqa: N802
        self, profile: Any, input: str, min: Any, opt: Any, max: Any  # noqa: A002
    ) -> None:  # fmt: skip
        profile._values.setdefault("shapes", (min, opt, max))
        profile._values.setdefault("named", {})[input] = (min, opt, max)

    def Builder_build_serialized_network(  # noqa: N802
        self, builder: Any, network: Any, config: Any, kernel_text: Any = None
    ) -> Any:
        refusal = _refusal(network, config._values["profiles"][0])
        if refusal:
            self._say(builder._values["logger"], refusal)
            return None
        built = super().Builder_build_serialized_network(builder, network, config, kernel_text)
        if built is None:
            return None
        plan = json.loads(built._values["content"][4:].decode())
        plan["program"], plan["named"] = (
            len(self.programs),
            config._values["profiles"][0]._values["named"],
        )
        plan["weights"] = sorted(network._values["names"])
        self.programs.append(network)
        return new(self.module.IHostMemory, content=b"PLAN" + json.dumps(plan).encode())

    def IBuilderConfig_can_run_on_DLA(self, config: Any, layer: Any) -> bool:  # noqa: N802
        return layer.type.name in self.dla_takes

    # Running

    def Runtime_deserialize_cuda_engine(self, runtime: Any, serialized_engine: Any) -> Any:  # noqa: N802
        engine = super().Runtime_deserialize_cuda_engine(runtime, serialized_engine)
        if engine is None:
            return None
        network = self.programs[engine._values["plan"]["program"]]
        inputs = [each.name for each in network._values["inputs"]]
        engine._values.update(
            network=network, num_io_tensors=len(inputs) + 1, num_bindings=len(inputs) + 1,
            # Not in the order that they were defined in: nobody promises that.
            tensors=["output", *reversed(inputs)],
            weights={name: _tensor(value._values["array"])
                     for name, value in network._values["names"].items()},
        )  # fmt: skip
        return engine

    def ICudaEngine_get_tensor_name(self, engine: Any, index: int) -> str:  # noqa: N802
        return str(engine._values["tensors"][index])

    ICudaEngine_get_binding_name = ICudaEngine_get_tensor_name

    def ICudaEngine_get_tensor_mode(self, engine: Any, name: str) -> Any:  # noqa: N802
        modes = self.module.TensorIOMode
        return modes.OUTPUT if name == "output" else modes.INPUT

    def ICudaEngine_binding_is_input(self, engine: Any, index: int) -> bool:  # noqa: N802
        return bool(engine._values["tensors"][index] != "output")

    def ICudaEngine_get_tensor_dtype(self, engine: Any, name: str) -> Any:  # noqa: N802
        plan = engine._values["plan"]
        return getattr(self.module.DataType, plan["result" if name == "output" else "type"])

    def ICudaEngine_get_binding_dtype(self, engine: Any, index: int) -> Any:  # noqa: N802
        return self.ICudaEngine_get_tensor_dtype(engine, engine._values["tensors"][index])

    def ICudaEngine_get_tensor_shape(self, engine: Any, name: str) -> Any:  # noqa: N802
        inputs = engine._values["network"]._values["inputs"]
        return next(each._values["shape"] for each in inputs if each.name == name)

    def ICudaEngine_get_binding_shape(self, engine: Any, index: int) -> Any:  # noqa: N802
        return self.ICudaEngine_get_tensor_shape(engine, engine._values["tensors"][index])

    def ICudaEngine_create_execution_context(self, engine: Any) -> Any:  # noqa: N802
        context = super().ICudaEngine_create_execution_context(engine)
        context._values.update(engine=engine, shapes={})
        return context

    def IExecutionContext_set_input_shape(self, context: Any, name: str, shape: Any) -> bool:  # noqa: N802
        least, _, most = context._values["plan"]["named"][name]
        context._values["shapes"][name] = tuple(shape)
        return all(a <= b <= c for a, b, c in zip(least, shape, most))

    def IExecutionContext_set_binding_shape(  # noqa: N802
        self, context: Any, binding: int, shape: Any
    ) -> bool:
        name = context._values["engine"]._values["tensors"][binding]
        return self.IExecutionContext_set_input_shape(context, name, shape)

    def IExecutionContext_get_tensor_shape(self, context: Any, name: str) -> Any:  # noqa: N802
        shapes = context._values["shapes"].items()
        return tuple(
            self._run(context, {each: torch.zeros(s).double() for each, s in shapes}).shape
        )

    def IExecutionContext_get_binding_shape(self, context: Any, binding: int) -> Any:  # noqa: N802
        return self.IExecutionContext_get_tensor_shape(context, "output")

    def _run(self, context: Any, feed: Feed) -> torch.Tensor:
        values = context._values["engine"]._values
        output = values["network"]._values["output"]
        result: torch.Tensor = output._values["evaluate"]({**values["weights"], **feed})
        return result

    def IExecutionContext_execute_async_v3(self, context: Any, stream_handle: int) -> bool:  # noqa: N802
        return self._compute(context, context._values["where"], stream_handle)

    def IExecutionContext_execute_async_v2(  # noqa: N802
        self, context: Any, bindings: List[int], stream_handle: int, input_consumed: Any = None
    ) -> bool:
        names = context._values["engine"]._values["tensors"]
        return self._compute(context, dict(zip(names, bindings)), stream_handle)

    def _compute(self, context: Any, where: Dict[str, int], stream: int) -> bool:
        self.streams.append(stream)
        plan, shapes = context._values["plan"], context._values["shapes"]
        feed = {name: torch.from_numpy(_read(where[name], shape, plan["type"]).astype(np.float64))
                for name, shape in shapes.items()}  # fmt: skip
        _write(where["output"], self._run(context, feed).numpy().astype(_TYPES[plan["result"]]))
        return True

    # Refitting

    def Refitter_refit_cuda_engine(self, refitter: Any) -> bool:  # noqa: N802
        weights = refitter._values["engine"]._values["weights"]
        given = refitter._values["given"]
        weights.update({name: _tensor(array) for name, array in given.items()})
        return super().Refitter_refit_cuda_engine(refitter)


def _tensor(array: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(array.astype(np.float64))


def _refusal(network: Any, profile: Any) -> str:
    """What TensorRT says of a network that it does not build, by the real builder's words."""
    profiled: Set[str] = set(profile._values["named"])
    for each in network._values["inputs"]:
        if -1 in each._values["shape"] and each.name not in profiled:
            return f"Network has dynamic inputs, but no profile for {each.name}"
    for layer in network._values["layers"]:
        said = layer._values
        if min((*said.get("pre_padding", ()), *said.get("post_padding", ()), 0)) < 0:
            return "API Usage Error (Parameter check failed, condition: allDimsGtEq(padding, 0))"
        strided = max(said.get("stride_nd", (1,))) > 1 and max(said.get("dilation_nd", (1,))) > 1
        if strided and layer.type.name == "DECONVOLUTION":
            return "Strided & Dilated Deconv are currently not supported"
    return ""
