"""What one version of TensorRT can do, found in its classes and enums; versions are not compared.

8.2 brought the engine inspector, 8.4 memory pools, 8.5 tensors by name with `execute_async_v3`, 8.6
auxiliary streams and the optimisation level, 10.0 strongly typed networks and refitting on a
stream. 11.0 took away precisions by builder flag, calibrators, EXPLICIT_BATCH, and input types that
can be set.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, FrozenSet

import torch

__all__ = ["Features", "data_types", "detect", "precisions"]

#: Precisions that a builder flag allows, by the flag's name.
_FLAGS = {"fp16": "FP16", "bf16": "BF16", "int8": "INT8"}


@dataclasses.dataclass(frozen=True)
class Features:
    """`weak`: precisions that builder flags allow in a network without types of its own; `strong`:
    a network's own types decide, which is the only way where `weak` is empty."""

    version: str
    weak: FrozenSet[str]
    strong: bool
    explicit_batch: bool
    calibrators: bool
    memory_pools: bool
    tensors_by_name: bool
    inspector: bool
    stream_refit: bool
    aux_streams: bool
    optimization_level: bool


def detect(trt: Any) -> Features:
    """Features of the module `tensorrt`, or of one that looks like it."""
    flags, kinds = trt.BuilderFlag, trt.NetworkDefinitionCreationFlag
    config, context = trt.IBuilderConfig, trt.IExecutionContext
    weak = frozenset(name for name, flag in _FLAGS.items() if hasattr(flags, flag))
    return Features(
        version=str(trt.__version__),
        weak=weak,
        # The flag may go where there is no other kind of network any more.
        strong=hasattr(kinds, "STRONGLY_TYPED") or not weak,
        explicit_batch=hasattr(kinds, "EXPLICIT_BATCH"),
        calibrators=hasattr(trt, "IInt8EntropyCalibrator2") and "int8" in weak,
        memory_pools=hasattr(config, "set_memory_pool_limit"),
        tensors_by_name=hasattr(context, "set_tensor_address")
        and hasattr(context, "execute_async_v3"),
        inspector=hasattr(trt.ICudaEngine, "create_engine_inspector"),
        stream_refit=hasattr(trt.Refitter, "refit_cuda_engine_async"),
        aux_streams=hasattr(config, "max_aux_streams"),
        optimization_level=hasattr(config, "builder_optimization_level"),
    )


def precisions(features: Features) -> FrozenSet[str]:
    """What a network can be asked to run in. A strongly typed one has the types of its ONNX file:
    we write none in bf16 or float8."""
    strong = {"fp16", "int8"} if features.strong else set()
    return frozenset({"fp32", "tf32", *features.weak, *strong})


def data_types(trt: Any) -> Dict[Any, torch.dtype]:
    """torch's types by TensorRT's, of those that images and logits come in."""
    names = {"FLOAT": torch.float32, "HALF": torch.float16, "BF16": torch.bfloat16}
    known = trt.DataType
    return {getattr(known, name): dtype for name, dtype in names.items() if hasattr(known, name)}
