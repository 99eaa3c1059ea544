"""What TensorRT's Python bindings of one version offer, written down from the bindings themselves.

    python tests/lab/trt_dump.py tests/data/trt_api/trt-10.3.json.gz [tensorrt_rtx]

The quick tier builds its stand-ins for `tensorrt` from these files; the slow tier checks that they
still say what the real wheels do. Only classes that engines are built and run with are kept, each
with all of its members. Runs on Python 3.8 without torch.
"""

from __future__ import annotations

import gzip
import importlib
import inspect
import json
import re
import sys
from pathlib import Path
from typing import Any, Dict, List, Union

CLASSES = (
    "Builder", "Dims", "EngineInspector", "IBuilderConfig", "IConvolutionLayer", "ICudaEngine",
    "IDeconvolutionLayer", "IExecutionContext", "IHostMemory", "IInt8Calibrator",
    "IInt8EntropyCalibrator2", "IInt8MinMaxCalibrator", "ILayer", "ILogger", "IMatrixMultiplyLayer",
    "INetworkDefinition", "IOptimizationProfile", "IShuffleLayer", "ITensor", "ITimingCache",
    "OnnxParser", "ParserError", "Permutation", "Refitter", "Runtime", "Weights",
)  # fmt: skip
ENUMS = (
    "BuilderFlag", "CalibrationAlgoType", "DataType", "DeviceType", "ErrorCode",
    "LayerInformationFormat", "LayerType", "MatrixOperation", "MemoryPoolType",
    "NetworkDefinitionCreationFlag", "OnnxParserFlag", "ProfilingVerbosity", "Severity",
    "TensorIOMode", "TensorLocation", "WeightsRole",
)  # fmt: skip

#: Signatures, or "property" (which cannot be set), "settable property", or the type of a value.
Member = Union[str, List[str]]


def dump(module: Any) -> Dict[str, Any]:
    """Classes with their bases and members, enums with their values."""
    classes = {name: _class(getattr(module, name)) for name in CLASSES if hasattr(module, name)}
    enums = {name: _enum(module, name) for name in ENUMS}
    return {
        "version": str(module.__version__),
        "classes": classes,
        "enums": {name: members for name, members in enums.items() if members},
    }


def write(found: Dict[str, Any], path: Path) -> None:
    text = json.dumps(found, sort_keys=True, separators=(",", ":"))
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


def read(path: Path) -> Dict[str, Any]:
    found: Dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()).decode())
    return found


def _enum(module: Any, name: str) -> Dict[str, int]:
    owner = module.ILogger if name == "Severity" else module
    kind = getattr(owner, name, None)
    return {} if kind is None else {k: int(v) for k, v in kind.__members__.items()}


def _class(kind: type) -> Dict[str, Any]:
    # pybind11's own base and Python's say nothing about TensorRT.
    bases = [base.__name__ for base in kind.__mro__[1:] if base.__name__[:8] != "pybind11"][:-1]
    members: Dict[str, Member] = {}
    for each in reversed(kind.__mro__[:-1]):
        if each.__name__[:8] != "pybind11":
            members.update({name: _member(value) for name, value in vars(each).items()
                            if _public(name)})  # fmt: skip
    return {"bases": bases, "members": members}


def _public(name: str) -> bool:
    return not name.startswith("_") or name in ("__init__", "__len__", "__getitem__")


def _member(value: Any) -> Member:
    if isinstance(value, property):
        return "property" if value.fset is None else "settable property"
    if callable(value) and not inspect.isclass(value):
        lines = (value.__doc__ or "").splitlines()
        found = [line.strip() for line in lines if re.match(r"\s*(\d+\. )?\w+\(.*\)", line)]
        # Overloads are listed after a first line that promises anything.
        return [_short(line) for line in found[1:] or found]
    return type(value).__name__


def _short(signature: str) -> str:
    """Without the number of an overload, and module names in front of types."""
    signature = re.sub(r"^\d+\. ", "", signature)
    return re.sub(r"\b(?:\w+\.)+(?=[A-Z]\w*)(?!\w+\.\w+: )", _kept, signature)


def _kept(found: Any) -> str:
    """`ILogger.Severity.` and the like are part of a name; `tensorrt.tensorrt.` is not."""
    return re.sub(r"^(?:[a-z_]\w*\.)+", "", found.group())


if __name__ == "__main__":
    write(dump(importlib.import_module((sys.argv[2:] or ["tensorrt"])[0])), Path(sys.argv[1]))
