"""Frozen dataclasses to JSON and back, strictly.

JSON has no NaN and no infinity, and a diverged loss is exactly what a record must keep, so a float
that is not finite travels as one of the strings in `_NON_FINITE`.
Decoding refuses unknown keys, missing keys and wrong types, and says where in the document it was.
"""

from __future__ import annotations

import dataclasses
import enum
import errno
import functools
import json
import math
import os
import types
import typing
from pathlib import Path
from typing import Any, Dict, Tuple, Type, TypeVar, Union

from narrowgauge_contract.errors import DamagedRecordError, NarrowgaugeError, nearest

__all__ = ["LATER", "decode", "dumps", "encode", "read_json", "write_atomic", "write_json_atomic"]

T = TypeVar("T")

#: `Optional[X]`, and the host's `X | None`, which Python 3.8 does not have.
_UNIONS = (Union, getattr(types, "UnionType", Union))
#: Metadata of a field that came after documents had been written: it is left out where it holds its
#: default, so that those documents still read and write as the same bytes.
LATER = types.MappingProxyType({"later": True})
_NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


def encode(value: Any) -> Any:
    """Turn a dataclass tree into what `json.dumps` takes; non-finite floats become strings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            field.name: encode(getattr(value, field.name))
            for field in dataclasses.fields(value)
            if not ("later" in field.metadata and getattr(value, field.name) == field.default)
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, float):
        return value if math.isfinite(value) else _non_finite_name(value)
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [encode(item) for item in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    raise TypeError(f"cannot put a {type(value).__name__} into a document: {value!r}")


def _non_finite_name(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def dumps(value: Any, *, indent: Union[int, None] = 2) -> str:
    """Serialise deterministically: sorted keys, no clock, a newline at the end."""
    return json.dumps(encode(value), indent=indent, sort_keys=True, allow_nan=False) + "\n"


def decode(cls: Type[T], data: Any, where: str = "document") -> T:
    """Build `cls` from parsed JSON.

    Raises DamagedRecordError with the place (`where.field[3]`) of the first thing that is wrong.
    """
    return typing.cast(T, _decode(cls, data, where))


def _decode(hint: Any, data: Any, where: str) -> Any:
    shape, item = _kind(hint)
    if shape == "any":
        return data
    if shape == "union":
        return _decode_union(hint, data, where)
    if shape == "tuple":
        _expect(isinstance(data, list), where, "a list", data)
        if item is float and all(type(part) is float for part in data):
            return tuple(data)  # samples: most of a record, and nothing to see in one of them
        return tuple(_decode(item, part, f"{where}[{i}]") for i, part in enumerate(data))
    if shape == "dict":
        _expect(isinstance(data, dict), where, "a table", data)
        if item is Any:
            return dict(data)
        return {key: _decode(item, part, f"{where}.{key}") for key, part in data.items()}
    if shape == "dataclass":
        return _decode_dataclass(hint, data, where)
    return _decode_scalar(hint, data, where)


@functools.lru_cache(maxsize=None)
def _kind(hint: Any) -> Tuple[str, Any]:
    """What is to be done for a type hint, and the hint of its items; asking typing is slow."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return "any", None
    if origin in _UNIONS:
        return "union", None
    if origin is tuple:
        return "tuple", typing.get_args(hint)[0]
    if origin is dict:
        return "dict", typing.get_args(hint)[1]
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return "dataclass", None
    return "scalar", None


def _decode_union(hint: Any, data: Any, where: str) -> Any:
    options = typing.get_args(hint)
    if data is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) == 1:
        return _decode(rest[0], data, where)
    # Only unions of scalars are used in the contract; the first that accepts the value wins.
    for option in rest:
        try:
            return _decode(option, data, where)
        except NarrowgaugeError:
            continue
    raise _wrong(where, " or ".join(getattr(option, "__name__", "?") for option in rest), data)


def _decode_scalar(hint: Any, data: Any, where: str) -> Any:
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        known = [member.value for member in hint]
        if data not in known:
            raise _wrong(where, "one of " + ", ".join(map(str, known)), data)
        return hint(data)
    if hint is float:
        if isinstance(data, str) and data in _NON_FINITE:
            return _NON_FINITE[data]
        _expect(isinstance(data, (int, float)) and not isinstance(data, bool), where, "float", data)
        try:
            return float(data)
        except OverflowError:
            raise _wrong(where, "float", data) from None
    if hint is int:
        _expect(isinstance(data, int) and not isinstance(data, bool), where, "int", data)
        return data
    _expect(isinstance(data, hint), where, hint.__name__, data)
    return data


def _decode_dataclass(cls: Any, data: Any, where: str) -> Any:
    _expect(isinstance(data, dict), where, "a table", data)
    hints, fields = _shape(cls)
    for key in data:
        if key not in fields:
            close = nearest(key, fields)
            raise DamagedRecordError(
                f"{where} has the unknown field '{key}'",
                why=f"{cls.__name__} has: {', '.join(sorted(fields))}",
                next_step=f"did you mean '{close}'?" if close else "",
            )
    values: Dict[str, Any] = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _decode(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise DamagedRecordError(f"{where} lacks the field '{name}'")
    return cls(**values)


@functools.lru_cache(maxsize=None)
def _shape(cls: Any) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """Type hints and fields of a dataclass; resolving the hints anew costs 100 us per event."""
    return typing.get_type_hints(cls), {field.name: field for field in dataclasses.fields(cls)}


def _expect(condition: bool, where: str, wanted: str, data: Any) -> None:
    if not condition:
        raise _wrong(where, wanted, data)


def _wrong(where: str, wanted: str, data: Any) -> DamagedRecordError:
    shown = repr(data)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return DamagedRecordError(f"{where} should be {wanted}, not {shown}")


def read_json(path: Path) -> Any:
    """Parse a JSON file; a truncated or foreign one is a DamagedRecordError that names it."""
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DamagedRecordError(f"{path} is not text", why=str(error)) from error
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DamagedRecordError(
            f"{path} is truncated or not JSON",
            why=f"{error.msg} at line {error.lineno}, column {error.colno}; {len(text)} characters",
            next_step="the events beside it may still hold the run: narrowgauge attach RUN",
        ) from error


def write_json_atomic(path: Path, value: Any) -> None:
    """Write the whole document or nothing. Raises what `write_atomic` raises."""
    write_atomic(path, dumps(value).encode("utf-8"))


def write_atomic(path: Path, content: bytes) -> None:
    """Write the whole file or nothing, and for good: temporary file, fsync, rename, fsync.

    What a kill leaves is `.NAME.PID.tmp` beside it.
    Raises OSError as the file system gave it; callers at the edge name it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if temporary.exists():
            temporary.unlink()
        raise
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` outlast a power cut, where its file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # What some network and FUSE file systems answer; the file itself is written by then.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)
