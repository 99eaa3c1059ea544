"""Libraries that TensorRT's Python bindings, or TensorRT, link to and that are not at hand: stubs
with the symbols that they ask for, each of which returns null. Needs a C compiler and binutils."""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Dict, List, Set

#: What stands in for NVIDIA's; all else comes with the system or with the wheel.
_NVIDIA = re.compile(r"lib(?:nv\w+|cublas\w*|cudnn\w*)\.so\.\d+")
_SYMBOL = re.compile(
    r"\bU ((?:create|init|shutdown|getP|getB|getNv|cublas|cudnn|_ZN\d+nv)\w*)(?:@(\S+))?$"
)


def make_stubs(libraries: List[Path], folder: Path) -> None:
    """Compile into `folder` what `libraries` need and is not among them."""
    present = {library.name for library in libraries}
    needed: Set[str] = set()
    symbols: Dict[str, Set[str]] = defaultdict(set)
    for library in libraries:
        listed = _run("readelf", "-d", str(library))
        needed.update(_NVIDIA.findall("\n".join(x for x in listed.splitlines() if "NEEDED" in x)))
        for line in _run("nm", "-D", "--undefined-only", str(library)).splitlines():
            found = _SYMBOL.search(line)
            if found:
                symbols[found.group(2) or ""].add(found.group(1))
    folder.mkdir(parents=True, exist_ok=True)
    # Symbols without a version may come from any library, and from several.
    for name in sorted(needed - present):
        _compile(name, symbols.get(name) or symbols[""], name if name in symbols else "", folder)


def _compile(name: str, symbols: Set[str], version: str, folder: Path) -> None:
    source = folder / f"{name}.c"
    source.write_text("".join(f"void *{each}(void) {{ return 0; }}\n" for each in sorted(symbols)))
    words = ["cc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{name}"]
    if version:
        script = folder / f"{name}.map"
        script.write_text(f"{version} {{ global: *; }};\n")
        words.append(f"-Wl,--version-script,{script}")
    subprocess.run([*words, "-o", str(folder / name), str(source)], check=True)


def _run(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout
