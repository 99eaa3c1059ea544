"""A multiplier in C: compiled with a loop over all pairs around it, and run in a process of its
own, so that what crashes or never ends there does so alone.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import List, Mapping, Optional, Tuple

import numpy as np

from narrowgauge_lab.multipliers.errors import CompilerMissingError, TableSourceError
from narrowgauge_lab.multipliers.table import CODES

__all__ = ["FromC", "run_c"]

_COMPILERS = ("cc", "gcc", "clang")
_SECONDS = 60
#: Lines of a compiler's complaint that are shown.
_LINES = 12
#: `int16_t mul8s_1KV6(int8_t A, int8_t B) {`: type, name, and two parameters with their types.
_TYPE = r"(?:(?:const|unsigned|signed|long|short|int|char|u?int\d*_t|u?int_fast\d+_t)\s+)+"
_FUNCTION = re.compile(
    rf"^[ \t]*(?:(?:static|inline|extern)\s+)*(?P<result>{_TYPE})(?P<name>[A-Za-z_]\w*)\s*"
    rf"\(\s*(?P<a>{_TYPE})\w+\s*,\s*(?P<b>{_TYPE})\w+\s*\)\s*\{{",
    re.MULTILINE,
)
#: EvoApproxLib's signed multipliers, some of which take and give bits in unsigned types.
_EVOAPPROX_SIGNED = re.compile(r"mul\d+s_")
_COMMENTS = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)

_PROGRAM = """\
#include <stdint.h>
#include "{source}"
#include <stdio.h>

int main(void) {{
  static int64_t row[256];
  for (int i = 0; i < 256; ++i) {{
    for (int j = 0; j < 256; ++j) {{
      const {a} a = ({a})(i - {a_offset});
      const {b} b = ({b})(j - {b_offset});
      row[j] = (int64_t){read}{function}(a, b);
    }}
    if (fwrite(row, sizeof row[0], 256, stdout) != 256) return 3;
  }}
  return fflush(stdout) == 0 ? 0 : 3;
}}
"""


@dataclass(frozen=True)
class FromC:
    """int64 [256, 256] in the order of a Table, and whose products they are."""

    values: np.ndarray
    function: str
    a_signed: bool
    b_signed: bool


@dataclass(frozen=True)
class _Function:
    name: str
    result: str
    a: str
    b: str


def run_c(
    path: Path,
    function: str,
    signed: Optional[bool],
    env: Optional[Mapping[str, str]] = None,
    seconds: float = _SECONDS,
) -> FromC:
    """Compile and run it with the C compiler of `env` ($CC, or one on its PATH); `seconds` at most.

    Raises TableSourceError, with the compiler's words where it is not C, and CompilerMissingError.
    """
    chosen = _choose(path, _functions(path), function)
    a_signed, b_signed = (_signed(each) if signed is None else signed for each in
                          (chosen.a, chosen.b))  # fmt: skip
    if signed is None and _EVOAPPROX_SIGNED.match(chosen.name):
        a_signed = b_signed = True
    compiler = _compiler(os.environ if env is None else env)
    with tempfile.TemporaryDirectory(prefix="narrowgauge-multiplier-") as made:
        program = Path(made) / "products.c"
        program.write_text(_program(path, chosen, (a_signed, b_signed)), encoding="utf-8")
        binary = Path(made) / "products"
        _compile([*compiler, "-O1", "-w", "-o", str(binary), str(program), "-lm"], path)
        written = _run(binary, f"{path}:{chosen.name}", seconds)
    if len(written) != CODES * CODES * 8:
        raise TableSourceError(
            f"{path}:{chosen.name} does not leave its products alone",
            why=f"{len(written)} bytes came on standard output, which is for them: "
            f"{CODES * CODES * 8}",
        )
    values = np.frombuffer(written, dtype=np.int64).reshape(CODES, CODES)
    return FromC(values, chosen.name, a_signed, b_signed)


def _program(path: Path, chosen: _Function, signs: Tuple[bool, bool]) -> str:
    """Codes go through 8 bits of their kind into the function's own types. Where operands are
    signed and the result is not, it is meant as the 16 bits of a signed product."""
    kinds = ["int8_t" if signed and _signed(type_) else "uint8_t"
             for signed, type_ in zip(signs, (chosen.a, chosen.b))]  # fmt: skip
    return _PROGRAM.format(
        source=str(path.resolve()).replace("\\", "\\\\").replace('"', '\\"'),
        function=chosen.name,
        a=kinds[0],
        b=kinds[1],
        a_offset=128 if signs[0] else 0,
        b_offset=128 if signs[1] else 0,
        read="(int16_t)" if any(signs) and not _signed(chosen.result) else "",
    )


def _functions(path: Path) -> List[_Function]:
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise TableSourceError(f"{path} cannot be read", why=str(error)) from error
    found = _FUNCTION.finditer(_COMMENTS.sub(" ", text))
    return [_Function(m["name"], m["result"], m["a"], m["b"]) for m in found]


def _choose(path: Path, found: List[_Function], name: str) -> _Function:
    """By the name given; else the file's, else one that begins with `mul`, else the only one."""
    for wanted in (name,) if name else (path.stem,):
        for each in found:
            if each.name == wanted:
                return each
    candidates = [each for each in found if each.name.startswith("mul")] or found
    if not name and len(candidates) == 1:
        return candidates[0]
    listed = ", ".join(each.name for each in found) or "none"
    raise TableSourceError(
        f"{path} has no function '{name}' of two integers" if name
        else f"which function of {path} multiplies?",
        why=f"functions of two integers in it: {listed}",
        next_step=f"name it: {path}:FUNCTION",
    )  # fmt: skip


def _signed(type_: str) -> bool:
    words = type_.split()
    return "unsigned" not in words and not any(word.startswith("uint") for word in words)


def _compiler(env: Mapping[str, str]) -> List[str]:
    given = env.get("CC", "").split()
    for words in ([given] if given else []) + [[name] for name in _COMPILERS]:
        path = shutil.which(words[0], path=env.get("PATH"))
        if path is not None:
            return [path, *words[1:]]
    raise CompilerMissingError(
        "a multiplier in C needs a C compiler, and there is none",
        why=f"neither $CC nor {', '.join(_COMPILERS)} on the PATH",
        next_step="install one, or bring the table as a .npy file",
    )


def _compile(command: List[str], path: Path) -> None:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode == 0:
        return
    own = [line for line in done.stderr.splitlines() if path.name in line]
    shown = [line for line in own if "error" in line] or own or done.stderr.splitlines()
    raise TableSourceError(f"{path} does not compile", why="\n".join(shown[:_LINES]))


def _run(binary: Path, name: str, seconds: float) -> bytes:
    try:
        done = subprocess.run([str(binary)], capture_output=True, timeout=seconds)
    except subprocess.TimeoutExpired as error:
        raise TableSourceError(
            f"{name} took more than {seconds:g} s for all pairs", why="it may never end"
        ) from error
    if done.returncode < 0:
        died = signal.Signals(-done.returncode).name
        raise TableSourceError(f"{name} was killed by {died}", why="the C code itself crashes")
    if done.returncode != 0:
        raise TableSourceError(f"{name} ended with {done.returncode}", why="the C code calls exit")
    return done.stdout
