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
from typing import Any, Callable, Dict, Tuple, Type, TypeVar, Union

from narrowgauge_contract.errors import DamagedRecordError, nearest

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


class _MisfitError(Exception):
    """What does not fit a type. The place in the document is put together on the way up, from the
    innermost field to the document, so that what fits costs no words."""

    def __init__(self, what: str, why: str = "", next_step: str = "") -> None:
        super().__init__(what)
        self.place = ""
        self.why = why
        self.next_step = next_step

    def within(self, step: str) -> _MisfitError:
        self.place = step + self.place
        return self


Decoder = Callable[[Any], Any]


def decode(cls: Type[T], data: Any, where: str = "document") -> T:
    """Build `cls` from parsed JSON.

    Raises DamagedRecordError with the place (`where.field[3]`) of the first thing that is wrong.
    """
    hint: Any = cls
    try:
        return typing.cast(T, _decoder(hint)(data))
    except _MisfitError as found:
        raise DamagedRecordError(
            f"{where}{found.place} {found}", why=found.why, next_step=found.next_step
        ) from None


@functools.lru_cache(maxsize=None)
def _decoder(hint: Any) -> Decoder:
    """What decodes a type, made once: to look at the hint of each value takes longer than to decode
    it. It returns the value, or raises _MisfitError."""
    origin = typing.get_origin(hint)
    if hint is Any:
        return lambda data: data
    if origin in _UNIONS:
        return _union_decoder(typing.get_args(hint))
    if origin is tuple:
        return _tuple_decoder(typing.get_args(hint)[0])
    if origin is dict:
        return _dict_decoder(typing.get_args(hint)[1])
    if isinstance(hint, type) and dataclasses.is_dataclass(hint):
        return _dataclass_decoder(hint)
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _enum_decoder(hint)
    return _float if hint is float else _plain_decoder(hint)


def _union_decoder(options: Tuple[Any, ...]) -> Decoder:
    rest = [option for option in options if option is not type(None)]
    optional = len(rest) < len(options)
    decoders = [_decoder(option) for option in rest]
    names = " or ".join(getattr(option, "__name__", "?") for option in rest)

    def decode_union(data: Any) -> Any:
        if data is None and optional:
            return None
        if len(decoders) == 1:
            return decoders[0](data)
        # Only unions of scalars are used in the contract; the first that accepts the value wins.
        for each in decoders:
            try:
                return each(data)
            except _MisfitError:
                continue
        raise _wrong(names, data)

    return decode_union


def _tuple_decoder(item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_tuple(data: Any) -> Any:
        if not isinstance(data, list):
            raise _wrong("a list", data)
        if item is float and all(type(part) is float for part in data):
            return tuple(data)  # samples: most of a record, and nothing to see in one of them
        found = []
        for part in data:
            try:
                found.append(decode_item(part))
            except _MisfitError as misfit:
                raise misfit.within(f"[{len(found)}]") from None
        return tuple(found)

    return decode_tuple


def _dict_decoder(item: Any) -> Decoder:
    decode_item = _decoder(item)

    def decode_dict(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _wrong("a table", data)
        if item is Any:
            return dict(data)
        found = {}
        for key, part in data.items():
            try:
                found[key] = decode_item(part)
            except _MisfitError as misfit:
                raise misfit.within(f".{key}") from None
        return found

    return decode_dict


def _enum_decoder(hint: Any) -> Decoder:
    known = {member.value: member for member in hint}

    def decode_enum(data: Any) -> Any:
        # A list is equal to no value, and cannot be asked for.
        if isinstance(data, (list, dict)) or data not in known:
            raise _wrong("one of " + ", ".join(map(str, known)), data)
        return known[data]

    return decode_enum


def _float(data: Any) -> Any:
    if isinstance(data, str) and data in _NON_FINITE:
        return _NON_FINITE[data]
    if not isinstance(data, (int, float)) or isinstance(data, bool):
        raise _wrong("float", data)
    try:
        return float(data)
    except OverflowError:
        raise _wrong("float", data) from None


def _plain_decoder(hint: Any) -> Decoder:
    def decode_plain(data: Any) -> Any:
        if not isinstance(data, hint) or (hint is int and isinstance(data, bool)):
            raise _wrong(hint.__name__, data)
        return data

    return decode_plain


def _dataclass_decoder(cls: Any) -> Decoder:
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # A scalar that is exactly of its type needs no call.
    steps = [
        (name, hints[name] if hints[name] in _SCALARS else None, _decoder(hints[name]), field)
        for name, field in fields.items()
    ]
    build = _checked(cls) if hasattr(cls, "__post_init__") else _filled(cls)

    def decode_dataclass(data: Any) -> Any:
        if not isinstance(data, dict):
            raise _wrong("a table", data)
        if not fields.keys() >= data.keys():
            raise _unknown(cls, fields, data)
        values = {}
        for name, exact, decode_value, field in steps:
            if name not in data:
                values[name] = _default_of(field)
                continue
            value = data[name]
            if type(value) is not exact:
                try:
                    value = decode_value(value)
                except _MisfitError as misfit:
                    raise misfit.within(f".{name}") from None
            values[name] = value
        return build(values)

    return decode_dataclass


_SCALARS = (bool, float, int, str)


def _filled(cls: Any) -> Callable[[Dict[str, Any]], Any]:
    """Builds an instance from the values of all fields. The `__init__` of a frozen dataclass sets
    them one by one past its own lock, which would be half of the time that a record takes."""

    def build(values: Dict[str, Any]) -> Any:
        made = object.__new__(cls)
        made.__dict__.update(values)
        return made

    return build


def _checked(cls: Any) -> Callable[[Dict[str, Any]], Any]:
    return lambda values: cls(**values)


def _default_of(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    raise _MisfitError(f"lacks the field '{field.name}'")


def _unknown(cls: Any, fields: Dict[str, Any], data: Dict[str, Any]) -> _MisfitError:
    key = next(key for key in data if key not in fields)
    close = nearest(key, fields)
    return _MisfitError(
        f"has the unknown field '{key}'",
        why=f"{cls.__name__} has: {', '.join(sorted(fields))}",
        next_step=f"did you mean '{close}'?" if close else "",
    )


def _wrong(wanted: str, data: Any) -> _MisfitError:
    shown = repr(data)
    if len(shown) > 80:
        shown = shown[:77] + "..."
    return _MisfitError(f"should be {wanted}, not {shown}")


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
