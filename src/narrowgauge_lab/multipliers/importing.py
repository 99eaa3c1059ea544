"""Tables from elsewhere: a .npy file, a multiplier in C, a Python function.

What is C or Python here is the user's own code and is run: in a process of its own where it is C,
in this one where it is Python.
"""

from __future__ import annotations

import importlib.util
import operator
from pathlib import Path
from typing import Any, Callable, Optional

import numpy as np

from narrowgauge_lab.multipliers.c_source import run_c
from narrowgauge_lab.multipliers.errors import TableSourceError
from narrowgauge_lab.multipliers.families import named
from narrowgauge_lab.multipliers.table import CODES, Table, codes, make_table

__all__ = ["find_table", "from_c", "from_npy", "from_python", "is_file"]

_MODULE = "narrowgauge_user_multiplier"


def is_file(text: str) -> bool:
    """Whether the text names a file, or a function in one, rather than a table that is built in."""
    return _path(text).suffix in (".npy", ".c", ".py")


def find_table(text: str, signed: Optional[bool] = None) -> Table:
    """The table of a name that is built in, of `FILE.npy`, `FILE.c[:function]` or
    `FILE.py:function`.

    `signed` says of a file whether its operands are; None: as the function's types say in C, and
    else unsigned. A built-in name says so itself. Raises UnknownNameError, TableError,
    TableSourceError, CompilerMissingError.
    """
    path = _path(text)
    function = text[len(str(path)) + 1 :]
    if path.suffix == ".npy":
        return from_npy(path, signed=bool(signed))
    if path.suffix == ".c":
        return from_c(path, function, signed=signed)
    if path.suffix == ".py":
        return from_python(path, function, signed=bool(signed))
    return named(text)


def from_npy(path: Path, *, signed: bool = False) -> Table:
    """Of an array of integers [256, 256] that `numpy.save` wrote. Raises TableError for another
    array, TableSourceError for what is no such file."""
    _require(path)
    try:
        values = np.load(str(path), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise TableSourceError(
            f"{path} cannot be read as an array",
            why=str(error),
            next_step="write it with numpy.save, as integers [256, 256]",
        ) from error
    return _table(path, values, signed, signed)


def from_c(path: Path, function: str = "", *, signed: Optional[bool] = None) -> Table:
    """Of a function of two numbers in C, as EvoApproxLib has them; without a name, of the one that
    is called as the file, or whose name begins with `mul`, or that is the only one.

    An operand is signed where its type is; both are where the function is `mul8s_…`. `signed`
    overrules that: codes are passed as the types take their 8 bits, and of an unsigned result of
    signed operands the low 16 bits are read as signed. Raises TableSourceError,
    CompilerMissingError.
    """
    _require(path)
    found = run_c(path, function, signed)
    return _table(path, found.values, found.a_signed, found.b_signed, found.function)


def from_python(path: Path, function: str, *, signed: bool = False) -> Table:
    """Of a Python function (a, b) -> int, called for all pairs. Raises TableSourceError."""
    _require(path)
    multiply = _function(path, function)
    side = codes(signed).tolist()
    values = np.empty((CODES, CODES), dtype=object)
    for i, a in enumerate(side):
        for j, b in enumerate(side):
            values[i, j] = _called(multiply, a, b, f"{path}:{function}")
    try:
        numbers = values.astype(np.int64)
    except OverflowError as error:
        raise TableSourceError(
            f"{path}:{function} gives products that 64 bits do not hold"
        ) from error
    return _table(path, numbers, signed, signed, function)


def _path(text: str) -> Path:
    """Without the function behind a colon."""
    name, colon, function = text.rpartition(":")
    if colon and Path(name).suffix in (".c", ".py") and "/" not in function:
        return Path(name)
    return Path(text)


def _require(path: Path) -> None:
    if not path.is_file():
        raise TableSourceError(
            f"{path} is not there",
            why=f"it was looked for in {Path.cwd()}" if not path.is_absolute() else "",
        )


def _table(
    path: Path, values: np.ndarray, a_signed: bool, b_signed: bool, function: str = ""
) -> Table:
    source = f"{path.name}:{function}" if function else path.name
    name = function or path.stem
    return make_table(name, values, a_signed=a_signed, b_signed=b_signed, source=source)


def _function(path: Path, name: str) -> Callable[[int, int], Any]:
    if not name:
        raise TableSourceError(
            f"{path} may have many functions", next_step=f"name one: {path}:multiply"
        )
    spec = importlib.util.spec_from_file_location(_MODULE, str(path))
    if spec is None or spec.loader is None:
        raise TableSourceError(f"{path} cannot be loaded as Python")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever the user's code raises
        raise TableSourceError(f"{path} cannot be imported", why=_said(error)) from error
    found = getattr(module, name, None)
    if not callable(found):
        raise TableSourceError(f"{path} has no function '{name}'")
    multiply: Callable[[int, int], Any] = found
    return multiply


def _called(multiply: Callable[[int, int], Any], a: int, b: int, name: str) -> int:
    try:
        return operator.index(multiply(a, b))
    except Exception as error:  # whatever the user's code raises
        raise TableSourceError(
            f"{name} gives no integer for ({a}, {b})", why=_said(error)
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
