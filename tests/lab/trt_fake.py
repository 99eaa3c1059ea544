"""A stand-in for the module `tensorrt` of one version, made from what trt_dump.py wrote down of it.

It has that version's classes, members, enums and signatures, and refuses everything else: a name
that is not there, an argument of another name, number or type, a property that cannot be set. What
its methods do is in trt_world.py; where that says nothing they give a value of the right type. All
calls are recorded.
"""

from __future__ import annotations

import copy
import enum
import functools
import re
import types
from pathlib import Path
from typing import Any, Callable, ClassVar, Dict, List, NamedTuple, Optional, Sequence, Tuple

import numpy as np
import trt_dump

DUMPS = Path(__file__).parents[1] / "data" / "trt_api"

#: C++ names that some signatures give for classes that Python knows by another.
_NAMES = {"IEngineInspector": "EngineInspector", "IParserError": "ParserError"}


class Argument(NamedTuple):
    name: str
    kind: str
    optional: bool


class Signature(NamedTuple):
    arguments: Tuple[Argument, ...]
    result: str


class Call(NamedTuple):
    """A call as it was made: `IBuilderConfig.set_flag` of an object, with its arguments by name."""

    name: str
    owner: Any
    arguments: Dict[str, Any]


def versions() -> List[str]:
    """Of all dumps of TensorRT itself, oldest first."""
    names = [path.name[len("trt-") : -len(".json.gz")] for path in DUMPS.glob("trt-[0-9]*.json.gz")]
    return sorted(names, key=lambda name: tuple(map(int, name.split("."))))


def load_dump(version: str) -> Dict[str, Any]:
    return copy.deepcopy(_read(version))


def reduced(dump: Dict[str, Any], members: Sequence[str], enums: Sequence[str]) -> Dict[str, Any]:
    """A dump without some members ("IBuilderConfig.set_memory_pool_limit") and enums or their
    members ("MemoryPoolType", "ProfilingVerbosity.DETAILED")."""
    for each in members:
        owner, _, name = each.partition(".")
        del dump["classes"][owner]["members"][name]
    for each in enums:
        owner, _, name = each.partition(".")
        if name:
            del dump["enums"][owner][name]
        else:
            del dump["enums"][owner]
    return dump


@functools.lru_cache(maxsize=None)
def _read(version: str) -> Dict[str, Any]:
    return trt_dump.read(DUMPS / f"trt-{version}.json.gz")


def make_module(found: Dict[str, Any], world: Any) -> types.ModuleType:
    """The module; `world` has what its methods do, and is told the module and each call."""
    module = types.ModuleType("tensorrt")
    module.__version__ = found["version"]  # type: ignore[attr-defined]
    for name, members in found["enums"].items():
        setattr(module, name, _make_enum(name, tuple(members.items())))
    for name in _by_base(found["classes"]):
        setattr(module, name, _make_class(module, name, found["classes"][name], world))
    severity = module.Severity
    del module.Severity
    module.ILogger.Severity = severity
    for each in severity:
        setattr(module.ILogger, each.name, each)
    world.module = module
    return module


class _Int:
    """An enum of pybind11 turns into its number when asked, and is none."""

    def __int__(self) -> int:
        return int(self.value)  # type: ignore[attr-defined]


@functools.lru_cache(maxsize=None)
def _make_enum(name: str, members: Any) -> Any:
    return enum.Enum(name, members, type=_Int)  # type: ignore[call-overload]


def _by_base(classes: Dict[str, Any]) -> List[str]:
    return sorted(classes, key=lambda name: len(classes[name]["bases"]))


class _Meta(type):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        if not vars(made).get("_ready"):
            raise TypeError(f"{cls.__name__}.__init__() must be called when overriding __init__")
        return made


class Object(metaclass=_Meta):
    """Base of all generated classes."""

    _members: ClassVar[Dict[str, Any]] = {}
    _generated = True

    def __setattr__(self, name: str, value: Any) -> None:
        member = self._members.get(name)
        if member == "settable property":
            self._values[name] = value
            self._world.record(f"{self._name}.{name}=", self, {"value": value})
        elif member == "property":
            raise AttributeError(f"can't set attribute {name} of {self._name}")
        elif member is None and "_generated" in vars(type(self)):
            raise AttributeError(f"{self._name} has no attribute {name}")
        else:  # of a class that was derived in Python
            object.__setattr__(self, name, value)


def new(kind: Any, **values: Any) -> Any:
    """An object that TensorRT itself makes, with values of its properties."""
    made = object.__new__(kind)
    made.__dict__.update(_ready=True, _values=values)
    return made


def _make_class(module: Any, name: str, described: Dict[str, Any], world: Any) -> Any:
    bases = [getattr(module, each) for each in described["bases"] if hasattr(module, each)]
    members = described["members"]
    space: Dict[str, Any] = {
        "_members": members, "_name": name, "_world": world, "_generated": True,
        "__init__": _make_init(module, name, members.get("__init__") or [], world),
    }  # fmt: skip
    for member, what in members.items():
        if member == "__init__":
            continue
        if isinstance(what, list):
            space[member] = _make_method(module, name, member, what, world)
        elif what.endswith("property"):
            space[member] = _make_property(name, member, world)
    if name == "IHostMemory":  # it has the buffer protocol, which `bytes` uses
        space["__bytes__"] = lambda self: self._values["content"]
    return _Meta(name, tuple(bases[:1]) or (Object,), space)


def _make_property(owner: str, name: str, world: Any) -> property:
    def read(self: Any) -> Any:
        asked = getattr(world, f"{owner}_{name}", None)
        if name in self._values:
            return self._values[name]
        if asked is None:
            raise AssertionError(f"nobody says what {owner}.{name} is")
        return asked(self)

    # Setting goes through __setattr__; that there is a setter is to be seen all the same.
    return property(read, lambda self, value: object.__setattr__(self, name, value))


def _make_init(module: Any, owner: str, texts: List[str], world: Any) -> Callable[..., None]:
    signatures = [parse_signature(text) for text in texts]

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        if not signatures:
            raise TypeError(f"{owner}: No constructor defined!")
        bound, _ = bind(module, owner, signatures, args, kwargs)
        object.__setattr__(self, "_values", {})
        world.record(owner, self, bound)
        act = getattr(world, f"{owner}_init", None)
        if act is not None:
            act(self, **bound)
        object.__setattr__(self, "_ready", True)

    return init


def _make_method(
    module: Any, owner: str, name: str, texts: List[str], world: Any
) -> Callable[..., Any]:
    signatures = [parse_signature(text) for text in texts]

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound, signature = bind(module, f"{owner}.{name}", signatures, args, kwargs)
        world.record(f"{owner}.{name}", self, bound)
        act = _behaviour(world, type(self), name)
        if act is not None:
            return act(self, **bound)
        return _default(module, signature.result)

    return method


def _behaviour(world: Any, kind: type, name: str) -> Optional[Callable[..., Any]]:
    """What the world says of the method for the class or, if nothing, for its bases."""
    names = [f"{each.__name__}_{name}" for each in kind.__mro__]
    return next((getattr(world, each) for each in names if hasattr(world, each)), None)


def _default(module: Any, result: str) -> Any:
    plain = {"bool": True, "None": None, "int": 0, "str": ""}
    if result in plain:
        return plain[result]
    if hasattr(module, result):
        return new(getattr(module, result))
    raise AssertionError(f"nobody says what to give for {result}")


@functools.lru_cache(maxsize=None)
def parse_signature(text: str) -> Signature:
    """`name(self: Builder, flags: int = 0) -> INetworkDefinition`, as pybind11 writes it."""
    found = re.fullmatch(r"\w+\((.*)\)(?: -> (.*))?", text)
    assert found, text
    arguments = []
    for part in _split(found.group(1)):
        name, _, rest = part.partition(": ")
        kind, equals, _default_text = rest.partition(" = ")
        if name != "self":
            arguments.append(Argument(name, kind, bool(equals)))
    result = (found.group(2) or "None").rpartition("::")[2]
    return Signature(tuple(arguments), _NAMES.get(result, result))


def _split(text: str) -> List[str]:
    """At commas that are in no bracket."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "[(<") - (letter in "])>")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [part.strip() for part in parts if part.strip()]


def bind(
    module: Any, name: str, signatures: List[Signature], args: Any, kwargs: Any
) -> Tuple[Dict[str, Any], Signature]:
    """The arguments by name, as the first fitting signature has them. TypeError where none fits."""
    for signature in signatures:
        bound = _fit(module, signature, args, kwargs)
        if bound is not None:
            return bound, signature
    listed = "\n".join(map(str, signatures))
    raise TypeError(f"{name}(): incompatible function arguments {args} {kwargs}\n{listed}")


def _fit(module: Any, signature: Signature, args: Any, kwargs: Any) -> Optional[Dict[str, Any]]:
    names = [each.name for each in signature.arguments]
    if len(args) > len(names) or set(kwargs) - set(names[len(args) :]):
        return None
    bound = {**dict(zip(names, args)), **kwargs}
    for each in signature.arguments:
        if each.name not in bound:
            if not each.optional:
                return None
        elif not _is(module, bound[each.name], each.kind, each.optional):
            return None
    return bound


def _is(module: Any, value: Any, kind: str, optional: bool) -> bool:
    if value is None and optional:
        return True
    simple: Dict[str, Any] = {
        "str": str, "bool": bool, "numpy.ndarray": np.ndarray, "tuple": tuple, "list": list,
    }  # fmt: skip
    if kind in simple:
        return isinstance(value, simple[kind])
    if kind in ("int", "typing.SupportsInt", "SupportsInt"):
        return isinstance(value, int) and not isinstance(value, bool)
    if "Buffer" in kind or kind == "buffer":
        return isinstance(value, (bytes, bytearray, memoryview)) or hasattr(value, "__bytes__")
    if kind in ("Dims", "DimsHW"):
        return isinstance(value, (tuple, list)) and all(type(each) is int for each in value)
    inner = re.fullmatch(r"(?:List|list|Sequence|\w[\w.]*Sequence)\[(.*)\]", kind)
    if inner:
        listed = isinstance(value, (list, tuple))
        return listed and all(_is(module, each, inner.group(1), False) for each in value)
    owner: Any = module
    for part in kind.rpartition("::")[2].split("."):
        owner = getattr(owner, _NAMES.get(part, part), None)
    if owner is None:
        # A class that is not in the dump: nothing of ours can be one.
        return False
    return isinstance(value, owner)
