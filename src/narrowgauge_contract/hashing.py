"""Content hashes of files and of source trees."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Dict, Iterator, Sequence

__all__ = ["sha256_file", "tree_files", "tree_hash"]

_LEFT_OUT = ("__pycache__", "build")
#: What belongs to a source tree; anything else (caches, build products, results) does not.
_SUFFIXES = (".py", ".cpp", ".cu", ".cuh", ".h", ".toml")


def sha256_file(path: Path) -> str:
    """The sha256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with open(path, "rb") as stream:
        for chunk in iter(lambda: stream.read(1 << 20), b""):
            digest.update(chunk)
    return digest.hexdigest()


def tree_hash(roots: Sequence[Path]) -> str:
    """One sha256 over the source files under `roots`: names relative to each root's parent.

    Equal trees give equal hashes wherever they lie and in whatever order the file system lists.
    """
    files: Dict[str, Path] = {}
    for root in roots:
        for path in tree_files(root):
            if path.suffix in _SUFFIXES and path.is_file():
                files[path.relative_to(root.parent).as_posix()] = path
    digest = hashlib.sha256()
    for name in sorted(files):
        digest.update(f"{name}\0{sha256_file(files[name])}\n".encode())
    return digest.hexdigest()


def tree_files(root: Path) -> Iterator[Path]:
    """Every file below `root`, in no order, but for hidden ones, caches and build products."""
    # Folders that are left out are not entered: a build elsewhere may be removing files there.
    for folder, folders, names in os.walk(root):
        folders[:] = [name for name in folders if name[0] != "." and name not in _LEFT_OUT]
        yield from (Path(folder, name) for name in names if name[0] != ".")
