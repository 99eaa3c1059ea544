"""What a built engine depends on: all of it, hashed, so that no engine is used for another network,
question or machine."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import json
import os
import platform
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.hashing import tree_hash
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import Preparation

__all__ = ["CacheKey", "cache_key", "content_hash", "device_fields", "model_hash"]

_ENGINES_FOLDER = Path(__file__).parent
#: Large tensors are hashed in pieces of this many bytes, side by side.
_PIECE = 8 << 20
_PLAIN = (bool, int, float, str, type(None), torch.dtype)


@dataclasses.dataclass(frozen=True)
class CacheKey:
    """`asked`: the question (engine, network, weights, shapes, precision, options, calibration).
    `here`: what answers it (versions, device, driver, our own source)."""

    asked: Mapping[str, str]
    here: Mapping[str, str]

    @property
    def digest(self) -> str:
        return _sha256(json.dumps([dict(self.asked), dict(self.here)], sort_keys=True).encode())

    @property
    def engine(self) -> str:
        return self.asked["engine"]


def cache_key(
    engine: str,
    versions: Mapping[str, str],
    model: nn.Module,
    example: torch.Tensor,
    wanted: Preparation,
    options: Mapping[str, Scalar],
    sources: Sequence[Path] = (),
) -> CacheKey:
    """The key of what `engine` makes of `model` for `wanted`.

    `versions`: of the engine's libraries, by name. `options`: all of them, as `Engine.chosen` gives
    them. `sources`: folders of our own code that decide what is built, beside this package.
    """
    asked = {
        "engine": engine,
        "network": model_hash(model),
        "weights": content_hash([*model.named_parameters(), *_buffers(model)]),
        "example": f"{tuple(example.shape)} {example.dtype}",
        "batches": str(tuple(wanted.batches)),
        "precision": wanted.precision,
        "options": json.dumps(dict(options), sort_keys=True),
        "calibration": content_hash([("", each) for each in wanted.calibration]),
    }
    here = {
        **{f"version of {name}": version for name, version in versions.items()},
        "version of torch": str(torch.__version__),
        **device_fields(wanted.device),
        "source": _source_hash((_ENGINES_FOLDER, *sources)),
    }
    return CacheKey(asked, here)


@functools.lru_cache(maxsize=None)
def _source_hash(folders: Tuple[Path, ...]) -> str:
    """Once per process: what it has imported does not change any more."""
    return tree_hash(folders)


def device_fields(device: torch.device) -> Dict[str, str]:
    """The device, its capability and its driver; of a CPU its name and instruction sets."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {
            "device": str(properties.name),
            "capability": f"{properties.major}.{properties.minor}",
            "memory of the device": str(properties.total_memory),
            "driver": _driver(),
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),
        }
    name, flags = _processor()
    return {"device": name, "instruction sets": flags, "processors": str(os.cpu_count())}


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str:
    """The NVIDIA driver's version; on a Jetson, whose driver has no such file, the kernel's."""
    try:
        found = re.search(r"\b\d{3,}\.\d+(?:\.\d+)?\b", path.read_text(encoding="utf-8"))
    except OSError:
        found = None
    return found.group() if found else platform.release()


def _processor(path: Path = Path("/proc/cpuinfo")) -> Tuple[str, str]:
    """Its name, and a hash of what it can (arm64 calls that Features)."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return platform.machine(), ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    words = " ".join(sorted(flags.group(1).split())) if flags else ""
    return (name.group(1) if name else platform.machine()), _sha256(words.encode())[:16]


def model_hash(model: nn.Module) -> str:
    """What `model` computes, its weights apart: its modules with their plain attributes, and its
    code. The code is fx's where fx can trace it, and the classes' source where not. Hooks may have
    no part in it: the registry keeps nothing of a network that has any."""
    lines = [
        f"{name} {type(module).__module__}.{type(module).__qualname__} {_attributes(module)}"
        for name, module in model.named_modules()
    ]
    return _sha256("\n".join([*lines, _code(model)]).encode())


def _attributes(module: nn.Module) -> str:
    """Those that are plain values, or made of such: stride, eps, ceil_mode and the like."""
    found = {
        name: repr(value)
        for name, value in vars(module).items()
        if not name.startswith("_") and _is_plain(value)
    }
    return json.dumps(found, sort_keys=True)


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    return isinstance(value, _PLAIN)


def _code(model: nn.Module) -> str:
    from torch import fx

    try:
        graph = fx.Tracer().trace(model)
        for node in graph.nodes:
            node.type = None  # torch 1.8 cannot write down annotations that are strings
        code = graph.python_code("self")
        return str(getattr(code, "src", code))  # torch 1.8 gives the text itself
    # What fx cannot follow it refuses with all sorts of errors, of which the forward's own may be.
    except Exception:
        classes = {type(module) for module in model.modules()}
        ours = [each for each in classes if not each.__module__.startswith("torch.")]
        return "\n".join(sorted(_source(each) for each in ours))


def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # made where there is no file: its name has to do
        return f"{kind.__module__}.{kind.__qualname__}"


def _buffers(model: nn.Module) -> Iterator[Tuple[str, torch.Tensor]]:
    # Not the counter of batches that training has seen: it changes nothing.
    for name, buffer in model.named_buffers():
        if not name.endswith("num_batches_tracked"):
            yield name, buffer


def content_hash(tensors: Sequence[Tuple[str, torch.Tensor]]) -> str:
    """One sha256 over names, types, shapes and values, whatever the strides.

    Tensors are hashed in pieces by several threads: those of VGG are 0.5 GB.
    """
    heads: List[str] = []
    pieces: List[memoryview] = []
    for name, tensor in tensors:
        heads.append(f"{name} {tensor.dtype} {tuple(tensor.shape)}")
        values = tensor.detach().cpu().contiguous().reshape(-1)
        if values.dtype == torch.bfloat16:  # numpy has none
            values = values.view(torch.int16)
        if values.numel():
            data = memoryview(values.numpy()).cast("B")
            pieces += [data[at : at + _PIECE] for at in range(0, len(data), _PIECE)]
    with ThreadPoolExecutor(min(16, os.cpu_count() or 1)) as pool:
        digests = list(pool.map(_sha256, pieces))
    return _sha256("\n".join([*heads, *digests]).encode())


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()
