"""What Triton hashes before it finds a kernel among those it compiled: here in a set order, early.

Nothing here imports triton: the modules with kernels do, and hand it over.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Iterable, Mapping

__all__ = ["hash_functions", "hash_installation"]

#: Seconds that a thread may keep the interpreter from another meanwhile. Triton reads its library in
#: 400 pieces, and waits before each for a thread that runs Python: 4.9 s altogether with Python's own
#: 5 ms beside one that never pauses, 0.5 s with this, 0.3 s alone (two cores of a server).
_TURN_S = 1e-4


def hash_functions(namespace: Mapping[str, Any]) -> None:
    """Hash the functions that Triton compiles among a module's `vars`, in the order of their
    definition: those that are called before those that call them.

    Triton 3.6 hashes a function together with the globals that those it calls were seen to use until
    then, so that its hash tells whether they were hashed before it. What one process compiled
    another one did not find, and compiled again: 2.2 of 3.1 seconds until ResNet-50 ran on an H200.
    """
    for each in namespace.values():
        # What Triton interprets has no such key; asking for it computes and keeps it.
        getattr(each, "cache_key", None)


def hash_installation(modules: Iterable[Any]) -> threading.Thread:
    """A thread in which Triton hashes its own half gigabyte, once per process, as the first kernel
    would wait for it to: that can pass beside other work. `modules`: those of Triton's in which its
    version may keep the function; it keeps its result."""
    found = (getattr(module, "triton_key", None) for module in modules)
    key = next(filter(None, found), None)

    def run() -> None:
        if key is None:
            return
        before = sys.getswitchinterval()
        sys.setswitchinterval(_TURN_S)
        try:
            key()
        finally:
            sys.setswitchinterval(before)

    thread = threading.Thread(target=run, name="triton-key")
    thread.start()
    return thread
