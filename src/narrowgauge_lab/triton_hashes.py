"""What Triton hashes before it finds a kernel among those it compiled: in a set order, and once.

Nothing here imports triton: the modules with kernels do, and hand it over.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, Iterator, Mapping, Sequence, Tuple

__all__ = ["Installation", "hash_functions"]

#: What Triton reads of itself to tell its versions apart has one of these endings.
_HASHED = (".py", ".so", ".pyd")


def hash_functions(namespace: Mapping[str, Any]) -> None:
    """Hash the functions that Triton compiles among a module's `vars`, in the order of their
    definition: those that are called before those that call them.

    Triton 3.6 hashes a function together with the globals that those it calls were seen to use
    until then, so that its hash tells whether they were hashed before it. What one process compiled
    another one did not find, and compiled again: 2.2 of 3.1 s until ResNet-50 ran on an H200.
    """
    for each in namespace.values():
        # What Triton interprets has no such key; asking for it computes and keeps it.
        getattr(each, "cache_key", None)


class Installation:
    """Triton as it is installed here. `modules`: those of it in which a version may keep the
    function `triton_key`, its hash of itself.

    That takes 0.3 s, a third of the time in which an engine comes from its cache, and in a thread
    beside other work even longer. Who keeps it together with `stamp` need not wait for it again.
    """

    def __init__(self, modules: Sequence[Any]) -> None:
        self._holders = [each for each in modules if hasattr(each, "triton_key")]

    def stamp(self) -> str:
        """Of the places, sizes and times of the files that are hashed; '' where a version hashes
        itself by other means."""
        if not self._holders:
            return ""
        # …/triton/runtime/cache.py, …/triton/compiler/compiler.py
        root = Path(self._holders[0].__file__).resolve().parents[1]
        found = hashlib.sha256(str(root).encode())
        for name, size, time_ns in sorted(_files(root)):
            found.update(f"{name}\0{size}\0{time_ns}\n".encode())
        return found.hexdigest()

    def hash(self) -> str:
        """Triton's own, '' as for `stamp`."""
        return str(self._holders[0].triton_key()) if self._holders else ""

    def know(self, value: str) -> None:
        """Let Triton take `value`, of `hash` when `stamp` was the same, instead of hashing."""
        for each in self._holders:
            each.triton_key = lambda: value


def _files(folder: Path) -> Iterator[Tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        for each in entries:
            if each.is_dir(follow_symlinks=False):
                yield from _files(Path(each.path))
            elif each.name.endswith(_HASHED):
                about = each.stat()
                yield each.path, about.st_size, about.st_mtime_ns
