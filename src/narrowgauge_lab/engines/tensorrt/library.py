"""NVIDIA's Python bindings. The one module that imports tensorrt, when an engine is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

from narrowgauge_lab.engines.errors import EngineMissingError
from narrowgauge_lab.engines.tensorrt.failures import make_logger
from narrowgauge_lab.engines.tensorrt.features import Features, detect

__all__ = ["Library", "load", "opened", "why_missing"]

_GET = "it comes with NVIDIA's containers and with JetPack, and from nvidia.com for other hosts"


@dataclasses.dataclass(frozen=True)
class Library:
    """The module, what it can do, and the logger that keeps what it says."""

    trt: Any
    features: Features
    said: Any


def opened(module: Any = None) -> Library:
    """`module`, or the installed tensorrt. Raises EngineMissingError."""
    trt = load() if module is None else module
    return Library(trt, detect(trt), make_logger(trt))


def load() -> Any:
    """The module `tensorrt`. Raises EngineMissingError."""
    try:
        import tensorrt
    # Bindings that do not find their libraries say so by either.
    except (ImportError, OSError) as error:
        absent = isinstance(error, ModuleNotFoundError) and error.name == "tensorrt"
        what = "tensorrt is not installed" if absent else "tensorrt cannot be imported"
        raise EngineMissingError(what, why="" if absent else str(error), next_step=_GET) from error
    if not hasattr(tensorrt, "Builder"):  # placeholders of package indices, folders of that name
        raise EngineMissingError(
            "the tensorrt that is installed is not NVIDIA's",
            why=f"{getattr(tensorrt, '__file__', None) or 'it'} has no Builder",
            next_step=_GET,
        )
    return tensorrt


def why_missing() -> str:
    """Why there is no TensorRT for this Python, or nothing."""
    try:
        load()
    except EngineMissingError as error:
        reason = f" ({error.why})" if error.why else ""
        return f"{error.what}{reason}: {error.next_step}"
    return ""
