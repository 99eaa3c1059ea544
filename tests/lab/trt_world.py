"""What the stand-in of trt_fake.py does: a TensorRT that builds no kernels, keeps TensorRT's rules
about what may be asked of it, and runs an "engine" that adds up the pixels of each image.

Tests set what there is (DLA cores, layers, operators that the parser refuses) and read `calls`.
"""

from __future__ import annotations

import ctypes
import json
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

import numpy as np
import trt_fake
from trt_fake import Call, new

CLASSES = 5
_DTYPES = {"FLOAT": np.float32, "HALF": np.float16, "INT8": np.int8, "BF16": np.uint16}

#: (name, type, tensors read, tensors written)
LayerRow = Tuple[str, str, Sequence[str], Sequence[str]]


class World:
    """State of one stand-in. A method `Class_name` is what that class's method or property does."""

    def __init__(self, version: str, **without: Any) -> None:
        self.calls: List[Call] = []
        self.module: Any = None
        self.gpu = True
        self.fast = True
        self.dla_cores = 0
        self.dla_takes: Set[str] = set()
        self.file_type = "FLOAT"
        self.image = (3, 8, 8)
        self.layers: List[LayerRow] = [
            ("conv1", "CONVOLUTION", ["input"], ["a"]), ("relu1", "ACTIVATION", ["a"], ["b"]),
            ("fc", "FULLY_CONNECTED", ["b"], ["output"]),
        ]  # fmt: skip
        #: (error code, description, node number, node name, operator) of parser errors.
        self.refuses: List[Tuple[str, str, int, str, str]] = []
        self.weights = ["conv1.weight", "conv1.bias"]
        self.missing: Dict[str, List[str]] = {}
        self.build_says = ""
        self.before_build: Callable[[], Any] = lambda: None
        self.run_says = ""
        self.refuses_plans = 0
        self.images_seen: List[np.ndarray] = []
        #: What a calibration writes.
        self.table = b"table"
        self.refitted: Dict[str, np.ndarray] = {}
        self.streams: List[int] = []
        dump = trt_fake.load_dump(version)
        self.trt = trt_fake.make_module(
            dump if not without else trt_fake.reduced(dump, **without), self
        )

    def record(self, name: str, owner: Any, arguments: Dict[str, Any]) -> None:
        self.calls.append(Call(name, owner, arguments))

    def made(self, name: str) -> List[Dict[str, Any]]:
        """The arguments of all calls of this name."""
        return [call.arguments for call in self.calls if call.name == name]

    def flags(self) -> Set[str]:
        """Builder flags that the last build had."""
        config = next(c.arguments["config"] for c in reversed(self.calls) if "config" in c.arguments
                      and c.name == "Builder.build_serialized_network")  # fmt: skip
        return {flag.name for flag in config._values["set"]}

    def _say(self, logger: Any, text: str) -> None:
        logger.log(self.module.ILogger.Severity.ERROR, text)

    # Building

    def Builder_init(self, builder: Any, logger: Any) -> None:  # noqa: N802
        if not self.gpu:
            self._say(logger, "CUDA initialization failure with error: 35")
            raise TypeError("pybind11::init(): factory function returned nullptr")
        builder._values.update(
            logger=logger, num_DLA_cores=self.dla_cores, platform_has_fast_fp16=self.fast,
            platform_has_fast_int8=self.fast,
        )  # fmt: skip

    def Builder_create_network(self, builder: Any, flags: int = 0) -> Any:  # noqa: N802
        known = {1 << int(each) for each in self.module.NetworkDefinitionCreationFlag}
        if flags & ~sum(known):
            self._say(builder._values["logger"], "API Usage Error (Parameter check failed)")
            return None
        return new(self.module.INetworkDefinition, made_with=flags, inputs=[], layers=[], names={})

    def Builder_create_builder_config(self, builder: Any) -> Any:  # noqa: N802
        return new(self.module.IBuilderConfig, set={self.module.BuilderFlag.TF32}, profiles=[],
                   devices={}, limits={}, int8_calibrator=None, timing=None)  # fmt: skip

    def OnnxParser_init(self, parser: Any, network: Any, logger: Any) -> None:  # noqa: N802
        parser._values.update(network=network, logger=logger, num_errors=len(self.refuses))

    def OnnxParser_parse(self, parser: Any, model: bytes, path: str = "") -> bool:  # noqa: N802
        network = parser._values["network"]
        kinds = self.module.NetworkDefinitionCreationFlag
        if hasattr(kinds, "EXPLICIT_BATCH"):
            assert network._values["made_with"] & 1 << int(kinds.EXPLICIT_BATCH)
        assert model, "an empty file"
        if self.refuses:
            return False
        dtype = getattr(self.module.DataType, self.file_type)
        self._add_input(network, "input", dtype, (-1, *self.image))
        for row in self.layers:
            self._add_layer(network, *row)
        return True

    def OnnxParser_get_error(self, parser: Any, index: int) -> Any:  # noqa: N802
        code, text, number, name, operator = self.refuses[index]
        return new(self.module.ParserError, code=getattr(self.module.ErrorCode, code), desc=text,
                   node=number, node_name=name, node_operator=operator)  # fmt: skip

    def ParserError_code(self, error: Any) -> Any:  # noqa: N802
        return error._values["code"]

    def ParserError_desc(self, error: Any) -> str:  # noqa: N802
        return str(error._values["desc"])

    def ParserError_node(self, error: Any) -> int:  # noqa: N802
        return int(error._values["node"])

    def ParserError_node_name(self, error: Any) -> str:  # noqa: N802
        return str(error._values["node_name"])

    def ParserError_node_operator(self, error: Any) -> str:  # noqa: N802
        return str(error._values["node_operator"])

    def _add_input(self, network: Any, name: str, dtype: Any, shape: Any) -> Any:
        tensor = new(self.module.ITensor, name=name, dtype=dtype, shape=shape,
                     is_shape_tensor=False)  # fmt: skip
        network._values["inputs"].append(tensor)
        return tensor

    def _add_layer(
        self, network: Any, name: str, kind: str, reads: Sequence[str], writes: Sequence[str]
    ) -> Any:
        kinds = self.module.LayerType
        known = getattr(kinds, kind, None) or kinds.MATRIX_MULTIPLY
        sides = [
            [new(self.module.ITensor, name=each, is_shape_tensor=each.startswith("shape"))
             for each in side] for side in (reads, writes)
        ]  # fmt: skip
        layer = new(self.module.ILayer, name=name, type=known, sides=sides,
                    num_inputs=len(reads), num_outputs=len(writes))  # fmt: skip
        network._values["layers"].append(layer)
        return layer

    def INetworkDefinition_add_input(  # noqa: N802
        self, network: Any, name: str, dtype: Any, shape: Any
    ) -> Any:
        return self._add_input(network, name, dtype, shape)

    def INetworkDefinition_add_convolution_nd(  # noqa: N802
        self, network: Any, input: Any, num_output_maps: int, kernel_shape: Any, kernel: Any,  # noqa: A002
        bias: Any = None,
    ) -> Any:  # fmt: skip
        return self._convolution(network, self.module.IConvolutionLayer, num_output_maps)

    def INetworkDefinition_add_deconvolution_nd(  # noqa: N802
        self, network: Any, input: Any, num_output_maps: int, kernel_shape: Any, kernel: Any,  # noqa: A002
        bias: Any = None,
    ) -> Any:  # fmt: skip
        return self._convolution(network, self.module.IDeconvolutionLayer, num_output_maps)

    def _convolution(self, network: Any, kind: Any, outputs: int) -> Any:
        output = new(self.module.ITensor, name="", is_shape_tensor=False)
        layer = new(kind, type=self.module.LayerType.CONVOLUTION, num_inputs=1, num_outputs=1,
                    sides=[network._values["inputs"], [output]], name="")  # fmt: skip
        network._values["layers"].append(layer)
        return layer

    def INetworkDefinition_set_weights_name(  # noqa: N802
        self, network: Any, weights: Any, name: str
    ) -> bool:
        network._values["names"][name] = weights
        return True

    def INetworkDefinition_num_layers(self, network: Any) -> int:  # noqa: N802
        return len(network._values["layers"])

    def INetworkDefinition_get_layer(self, network: Any, index: int) -> Any:  # noqa: N802
        return network._values["layers"][index]

    def INetworkDefinition_num_inputs(self, network: Any) -> int:  # noqa: N802
        return len(network._values["inputs"])

    def INetworkDefinition_get_input(self, network: Any, index: int) -> Any:  # noqa: N802
        return network._values["inputs"][index]

    def ILayer_get_input(self, layer: Any, index: int) -> Any:  # noqa: N802
        return layer._values["sides"][0][index]

    def ILayer_get_output(self, layer: Any, index: int) -> Any:  # noqa: N802
        return layer._values["sides"][1][index]

    # Configuring

    def IBuilderConfig_set_flag(self, config: Any, flag: Any) -> None:  # noqa: N802
        config._values["set"].add(flag)

    def IBuilderConfig_clear_flag(self, config: Any, flag: Any) -> None:  # noqa: N802
        config._values["set"].discard(flag)

    def IBuilderConfig_add_optimization_profile(self, config: Any, profile: Any) -> int:  # noqa: N802
        config._values["profiles"].append(profile)
        return len(config._values["profiles"]) - 1

    def IOptimizationProfile_set_shape(  # noqa: N802
        self, profile: Any, input: str, min: Any, opt: Any, max: Any  # noqa: A002
    ) -> None:  # fmt: skip
        profile._values["shapes"] = (min, opt, max)

    def IBuilderConfig_can_run_on_DLA(self, config: Any, layer: Any) -> bool:  # noqa: N802
        return layer.name in self.dla_takes

    def IBuilderConfig_set_device_type(self, config: Any, layer: Any, device_type: Any) -> None:  # noqa: N802
        config._values["devices"][layer.name] = device_type.name

    def IBuilderConfig_create_timing_cache(  # noqa: N802
        self, config: Any, serialized_timing_cache: bytes
    ) -> Any:
        return new(self.module.ITimingCache, content=bytes(serialized_timing_cache))

    def IBuilderConfig_set_timing_cache(  # noqa: N802
        self, config: Any, cache: Any, ignore_mismatch: bool
    ) -> bool:
        content = cache._values["content"]
        if content and not content.startswith(self._timings()):
            return False
        config._values["timing"] = cache
        return True

    def _timings(self) -> bytes:
        return f"timings of {self.module.__version__}:".encode()

    def IBuilderConfig_get_timing_cache(self, config: Any) -> Any:  # noqa: N802
        return config._values["timing"]

    def ITimingCache_serialize(self, cache: Any) -> Any:  # noqa: N802
        old = cache._values["content"] or self._timings()
        return new(self.module.IHostMemory, content=old + b"x")

    def Builder_build_serialized_network(  # noqa: N802
        self, builder: Any, network: Any, config: Any, kernel_text: Any = None
    ) -> Any:
        self.before_build()
        if self.build_says:
            self._say(builder._values["logger"], self.build_says)
            return None
        shapes = config._values["profiles"][0]._values["shapes"]
        calibrator = config._values["int8_calibrator"]
        if calibrator is not None:
            self._calibrate(calibrator)
        source = network._values["inputs"][0]
        plan = {
            "version": self.module.__version__, "type": source._values["dtype"].name,
            "result": self.file_type,
            "shapes": shapes, "refit": "REFIT" in {f.name for f in config._values["set"]},
            "weights": sorted(network._values["names"]) or self.weights,
            "devices": config._values["devices"],
        }  # fmt: skip
        return new(self.module.IHostMemory, content=b"PLAN" + json.dumps(plan).encode())

    def _calibrate(self, calibrator: Any) -> None:
        """As TensorRT: an exception in a calibrator is printed, and ends the images."""
        if calibrator.read_calibration_cache() is not None:
            return
        count = calibrator.get_batch_size() * int(np.prod(self.image))
        while True:
            pointers = calibrator.get_batch(["input"])
            if pointers is None:
                break
            self.images_seen.append(_read(pointers[0], (count,), "FLOAT"))
        calibrator.write_calibration_cache(self.table)

    # Running

    def Runtime_init(self, runtime: Any, logger: Any) -> None:  # noqa: N802
        runtime._values["logger"] = logger

    def Runtime_deserialize_cuda_engine(self, runtime: Any, serialized_engine: Any) -> Any:  # noqa: N802
        content = bytes(serialized_engine)
        plan = json.loads(content[4:].decode()) if content.startswith(b"PLAN") else {}
        self.refuses_plans -= 1
        if self.refuses_plans >= 0 or plan.get("version") != self.module.__version__:
            self._say(runtime._values["logger"], "Serialization Error: magic tag does not match")
            return None
        return new(self.module.ICudaEngine, plan=plan, logger=runtime._values["logger"],
                   refittable=plan["refit"], num_io_tensors=2, num_bindings=2)  # fmt: skip

    def ICudaEngine_get_tensor_name(self, engine: Any, index: int) -> str:  # noqa: N802
        return ("input", "output")[index]

    def ICudaEngine_get_tensor_mode(self, engine: Any, name: str) -> Any:  # noqa: N802
        modes = self.module.TensorIOMode
        return modes.INPUT if name == "input" else modes.OUTPUT

    def ICudaEngine_get_tensor_dtype(self, engine: Any, name: str) -> Any:  # noqa: N802
        plan = engine._values["plan"]
        return getattr(self.module.DataType, plan["type" if name == "input" else "result"])

    def ICudaEngine_binding_is_input(self, engine: Any, index: int) -> bool:  # noqa: N802
        return index == 0

    def ICudaEngine_get_binding_dtype(self, engine: Any, index: int) -> Any:  # noqa: N802
        return self.ICudaEngine_get_tensor_dtype(engine, ("input", "output")[index])

    def ICudaEngine_create_execution_context(self, engine: Any) -> Any:  # noqa: N802
        return new(self.module.IExecutionContext, plan=engine._values["plan"], shape=None,
                   logger=engine._values["logger"], where={})  # fmt: skip

    def IExecutionContext_set_input_shape(self, context: Any, name: str, shape: Any) -> bool:  # noqa: N802
        assert name == "input"
        return self._set_shape(context, shape)

    def IExecutionContext_set_binding_shape(  # noqa: N802
        self, context: Any, binding: int, shape: Any
    ) -> bool:
        assert binding == 0
        return self._set_shape(context, shape)

    def _set_shape(self, context: Any, shape: Any) -> bool:
        least, _, most = context._values["plan"]["shapes"]
        if not all(a <= b <= c for a, b, c in zip(least, shape, most)):
            return False
        context._values["shape"] = tuple(shape)
        return True

    def IExecutionContext_get_tensor_shape(self, context: Any, name: str) -> Any:  # noqa: N802
        return (context._values["shape"][0], CLASSES)

    def IExecutionContext_get_binding_shape(self, context: Any, binding: int) -> Any:  # noqa: N802
        return (context._values["shape"][0], CLASSES)

    def IExecutionContext_set_tensor_address(self, context: Any, name: str, memory: int) -> bool:  # noqa: N802
        context._values["where"][name] = memory
        return True

    def IExecutionContext_execute_async_v3(self, context: Any, stream_handle: int) -> bool:  # noqa: N802
        where = context._values["where"]
        return self._execute(context, where["input"], where["output"], stream_handle)

    def IExecutionContext_execute_async_v2(  # noqa: N802
        self, context: Any, bindings: List[int], stream_handle: int, input_consumed: Any = None
    ) -> bool:
        return self._execute(context, *bindings, stream_handle)

    def _execute(self, context: Any, source: int, result: int, stream: int) -> bool:
        """Sums of the pixels, plus the class's number."""
        if self.run_says:
            self._say(context._values["logger"], self.run_says)
            return False
        self.streams.append(stream)
        shape, plan = context._values["shape"], context._values["plan"]
        kind = plan["type"]
        images = _read(source, shape, kind).astype(np.float64)
        sums = images.reshape(shape[0], -1).sum(1, keepdims=True) + np.arange(CLASSES)
        _write(result, sums.astype(_DTYPES[plan["result"]]))
        return True

    def EngineInspector_get_engine_information(self, inspector: Any, format: Any) -> str:  # noqa: A002, N802
        assert "execution_context" in inspector._values
        kind = {"Format/Datatype": "Row major linear FP16 format"}
        rows = [{"Name": name, "LayerType": each, "Inputs": [kind], "TacticName": f"k_{name}"}
                for name, each, _, _ in self.layers]  # fmt: skip
        return json.dumps({"Layers": rows})

    # Refitting

    def Refitter_init(self, refitter: Any, engine: Any, logger: Any) -> None:  # noqa: N802
        refitter._values.update(engine=engine, given={})

    def Refitter_get_all_weights(self, refitter: Any) -> List[str]:  # noqa: N802
        return list(refitter._values["engine"]._values["plan"]["weights"])

    def Refitter_set_named_weights(  # noqa: N802
        self, refitter: Any, name: str, weights: Any, location: Optional[Any] = None
    ) -> bool:
        refitter._values["given"][name] = weights._values["array"].copy()
        return True

    def Refitter_get_missing_weights(self, refitter: Any) -> List[str]:  # noqa: N802
        given = refitter._values["given"]
        wanted = [each for name in given for each in self.missing.get(name, [])]
        return [each for each in wanted if each not in given]

    def Refitter_refit_cuda_engine(self, refitter: Any) -> bool:  # noqa: N802
        self.refitted = dict(refitter._values["given"])
        refitter._values["given"] = {}
        return True

    def Weights_init(  # noqa: N802
        self, weights: Any, a: Any = None, type: Any = None, ptr: int = 0, count: int = 0  # noqa: A002
    ) -> None:  # fmt: skip
        weights._values["array"] = a if a is not None else _read(ptr, (count,), type.name)


def _read(address: int, shape: Sequence[int], kind: str) -> np.ndarray:
    """A copy of what lies at an address."""
    dtype = np.dtype(_DTYPES[kind])
    size = int(np.prod(shape)) * dtype.itemsize
    data = ctypes.string_at(address, size)
    return np.frombuffer(data, dtype).reshape(shape).copy()


def _write(address: int, values: np.ndarray) -> None:
    data = np.ascontiguousarray(values).tobytes()
    ctypes.memmove(address, data, len(data))
