"""Pickle without code: what torch.save makes of tensors and plain containers, and nothing else.

Torch below 1.13 has no `weights_only`: its torch.load runs whatever a file says; below 2.6 there
are ways around it (CVE-2025-32434). torch.load takes the module to unpickle with as an argument,
though, and this is one.
"""

from __future__ import annotations

import collections
import pickle
import sys
import tarfile
from typing import Any, BinaryIO, ClassVar, Dict, Tuple

import torch

__all__ = ["Unpickler", "load", "load_tensors"]

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
    for name in ("_rebuild_tensor", "_rebuild_tensor_v2", "_rebuild_tensor_v3",
                 "_rebuild_parameter", "_rebuild_qtensor"):  # fmt: skip
        if hasattr(torch._utils, name):
            named["torch._utils", name] = getattr(torch._utils, name)
    if hasattr(torch, "UntypedStorage"):
        named["torch.storage", "UntypedStorage"] = torch.UntypedStorage
    for name in dir(torch):
        if isinstance(getattr(torch, name), (torch.dtype, torch.qscheme)):
            named["torch", name] = getattr(torch, name)
    named["torch.serialization", "_get_layout"] = torch.serialization._get_layout
    return named


class Unpickler(pickle._Unpickler):
    """Raises UnpicklingError for a class or function that is not in a state dict.

    Python's own loop, for its opcodes can be replaced: BUILD sets attributes of whatever is on the
    stack, such as a class of torch's, which every later use in this process would meet.
    """

    _known = _allowed()
    dispatch: ClassVar[Dict[int, Any]] = dict(pickle._Unpickler.dispatch)

    def _build(self: Any) -> None:
        """Of attributes, a state dict has those of the dictionary: its `_metadata`."""
        state, built = self.stack.pop(), self.stack[-1]
        if type(built) is not collections.OrderedDict or not isinstance(state, dict):
            raise pickle.UnpicklingError(
                f"the file wants to set attributes of a {type(built).__name__}, and a state dict "
                "has none"
            )
        built.__dict__.update({str(name): value for name, value in state.items()})

    dispatch[pickle.BUILD[0]] = _build

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


def load_tensors(stream: BinaryIO, version: Tuple[int, int]) -> Any:
    """What torch.load, of torch's version, reads from the file onto the CPU.

    Raises pickle.UnpicklingError for what is in it beside tensors, and what torch.load raises.
    """
    _refuse_code(stream)
    own: Dict[str, Any] = {"weights_only": True}
    if version < (2, 6):  # its `weights_only`, where it has one, can be got around
        own = {"pickle_module": sys.modules[__name__]}
        if version >= (1, 13):
            own["weights_only"] = False
    return torch.load(stream, map_location="cpu", **own)


def _refuse_code(stream: BinaryIO) -> None:
    """What torch.load would give to other readers than the unpickler, which run or unpack it."""
    began = stream.tell()
    if torch.serialization._is_zipfile(stream):
        # By torch's own reader, so that both see the same names.
        is_program = "constants.pkl" in torch._C.PyTorchFileReader(stream).get_all_records()
        stream.seek(began)
        if is_program:
            raise pickle.UnpicklingError("a TorchScript archive: it holds code")
        return
    try:
        tarfile.open(fileobj=stream, mode="r:").close()
    except tarfile.TarError:
        stream.seek(began)
        return
    raise pickle.UnpicklingError("a tar archive, as torch below 0.1.10 wrote: it is not read")
