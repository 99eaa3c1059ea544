"""Find and load the built libraries. torch is imported when something is loaded, not before."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, Dict, Mapping, Optional, Set

from narrowgauge_kernels.errors import KernelsNotBuiltError
from narrowgauge_kernels.sources import (
    FORMAT,
    Library,
    default_directory,
    library_name,
    source_hash,
)

__all__ = ["build_hash", "check", "has_kernels", "is_built", "library_directory", "load", "require"]

#: The one directory whose libraries are in this process. torch keeps registrations for the life of
#: the process, so this cannot be an argument; a second directory is refused, not swapped in.
_loaded: Dict[str, Any] = {"directory": None, "devices": set()}


def library_directory(env: Optional[Mapping[str, str]] = None) -> Path:
    """Where the libraries for this interpreter's torch are: NARROWGAUGE_KERNELS, or the default."""
    import torch

    told = (os.environ if env is None else env).get("NARROWGAUGE_KERNELS")
    return Path(told) if told else default_directory(torch.__version__)


def build_hash(directory: Optional[Path] = None) -> str:
    """One hash of what was built: sources, torch, compilers, flags, capabilities; no path or clock.

    Raises KernelsNotBuiltError.
    """
    description = _description(directory or library_directory())
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


def is_built(directory: Optional[Path] = None) -> bool:
    """Whether `load` would find libraries for this torch made from these sources."""
    try:
        check(directory or library_directory())
    except KernelsNotBuiltError:
        return False
    return True


def load(directory: Optional[Path] = None) -> Path:
    """Make `torch.ops.narrowgauge` available; the directory it came from. Loading twice is free.

    Raises KernelsNotBuiltError, with the command that builds, when the libraries are missing, for
    another torch, or older than their sources, and when another directory is loaded already.
    """
    import torch

    chosen = (directory or library_directory()).resolve()
    if _loaded["directory"] == chosen:
        return chosen
    if _loaded["directory"] is not None:
        raise KernelsNotBuiltError(
            f"kernels from {_loaded['directory']} are in this process already",
            why="torch keeps one implementation of an operator for the life of a process",
            next_step="load one directory, or use two processes",
        )
    description = check(chosen)
    devices: Set[str] = set()
    for name in description["libraries"]:
        path = chosen / library_name(Library(name))
        try:
            torch.ops.load_library(str(path))
        except OSError as error:
            raise KernelsNotBuiltError(
                f"{path} does not load", why=str(error), next_step=_command(chosen)
            ) from error
        devices.add(name)
    _loaded.update(directory=chosen, devices=devices)
    return chosen


def require(device_type: str) -> None:
    """Load, and check that there are kernels for this type of device (`cpu`, `cuda`).

    The meta device needs shapes only, which the CPU library knows.
    Raises KernelsNotBuiltError.
    """
    directory = _loaded["directory"] or load()
    if device_type == Library.CUDA.value and device_type not in _loaded["devices"]:
        raise KernelsNotBuiltError(
            f"the kernels in {directory} are built for the CPU only",
            next_step=_command(directory, cuda="auto"),
        )


def has_kernels(device_type: str) -> bool:
    """Whether `require` finds kernels for this type of device."""
    try:
        require(device_type)
    except KernelsNotBuiltError:
        return False
    return True


def check(directory: Path) -> Dict[str, Any]:
    """The description of libraries that `load` may load, as in build.json.

    Raises KernelsNotBuiltError when missing, for another torch, or older than their sources.
    """
    import torch

    description = _description(directory)
    built_for = description["torch"]["version"]
    if built_for != torch.__version__:
        raise KernelsNotBuiltError(
            f"the kernels in {directory} are built for torch {built_for}",
            why=f"this is torch {torch.__version__}",
            next_step=_command(directory),
        )
    if description["source_hash"] != source_hash():
        raise KernelsNotBuiltError(
            f"the kernels in {directory} are older than their sources",
            next_step=_command(directory, cuda=" ".join(description["cuda_architectures"])),
        )
    missing = [name for name in description["libraries"] if not _path(directory, name).is_file()]
    if missing:
        raise KernelsNotBuiltError(
            f"{directory} lacks {', '.join(_path(directory, name).name for name in missing)}",
            next_step=_command(directory),
        )
    return description


def _description(directory: Path) -> Dict[str, Any]:
    why = ""
    try:
        description = json.loads((directory / "build.json").read_text(encoding="utf-8"))
        if description["format"] == FORMAT:
            return description
        why = f"its build.json has format {description['format']}, this reads {FORMAT}"
    except FileNotFoundError:
        pass
    except (OSError, ValueError, TypeError, KeyError) as error:
        why = f"its build.json is damaged: {error!r}"
    raise KernelsNotBuiltError(
        f"no kernels are built in {directory}", why=why, next_step=_command(directory)
    )


def _path(directory: Path, name: str) -> Path:
    return directory / library_name(Library(name))


def _command(directory: Path, cuda: str = "") -> str:
    """The line that builds for this interpreter into this directory."""
    import sys

    import torch

    words = [sys.executable, "-m", "narrowgauge_kernels.build"]
    if cuda:
        words += ["--cuda", f"'{cuda}'" if " " in cuda else cuda]
    if directory.resolve() != default_directory(torch.__version__).resolve():
        words += ["--out", str(directory)]
    source = Path(__file__).parent.parent
    return f"PYTHONPATH={source} " + " ".join(words)
