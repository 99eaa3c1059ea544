"""Pickle without code: what torch.save makes of tensors and plain containers, and nothing else.

Torch below 1.13 has no `weights_only`: its torch.load runs whatever a file says. It takes the
module to unpickle with as an argument, though, and this is one.
"""

from __future__ import annotations

import collections
import pickle
from typing import Any, BinaryIO, Dict, Tuple

import torch

__all__ = ["Unpickler", "load"]

_STORAGES = tuple(
    f"{kind}Storage"
    for kind in (
        "Double", "Float", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool",
        "ComplexFloat", "ComplexDouble", "QInt8", "QUInt8", "QInt32",
    )
)  # fmt: skip


def _allowed() -> Dict[Tuple[str, str], Any]:
    named: Dict[Tuple[str, str], Any] = {
        ("collections", "OrderedDict"): collections.OrderedDict,
        ("torch", "Size"): torch.Size,
        ("torch", "device"): torch.device,
    }
    for name in _STORAGES:
        if hasattr(torch, name):
            named["torch", name] = getattr(torch, name)
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_parameter", "_rebuild_qtensor"):
        if hasattr(torch._utils, name):
            named["torch._utils", name] = getattr(torch._utils, name)
    for name in dir(torch):
        if isinstance(getattr(torch, name), (torch.dtype, torch.qscheme)):
            named["torch", name] = getattr(torch, name)
    named["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    return named


class Unpickler(pickle.Unpickler):
    """Raises UnpicklingError for a class or function that is not in a state dict."""

    _known = _allowed()

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(
                f"the file wants to use {module}.{name}, which is neither a tensor nor a plain "
                "container, and might run anything"
            )
        return self._known[module, name]


def load(stream: BinaryIO, encoding: str = "ASCII") -> Any:
    """As pickle.load."""
    return Unpickler(stream, encoding=encoding).load()
