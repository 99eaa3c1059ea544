"""Machine code of many sources at once, made in processes of their own while others are timed.

NVRTC compiles one source at a time in a process, however many threads ask it to; a source takes one
or two seconds, and timing it a tenth of that.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import subprocess
import sys
import threading
from types import TracebackType
from typing import Any, Callable, Iterator, Optional, Sequence, Set, Type

from narrowgauge_kernels.errors import KernelsError
from narrowgauge_kernels.sparse.compiling import compile_source

__all__ = ["Ahead"]


class Ahead:
    """Compiles sources for a capability, in their order, into the cache; a context.

    `sources` are made when their turn comes. `workers`: how many at once; 0: one for each processor
    of this process but one, which times. `compile_`: what a worker calls with a source and the
    capability; by default a process of its own. What cannot be compiled is left to whoever needs
    it, who gets the error.
    """

    def __init__(
        self,
        sources: Sequence[Callable[[], str]],
        arch: str,
        workers: int = 0,
        compile_: Optional[Callable[[str, str], None]] = None,
    ) -> None:
        self._children: Set[Any] = set()
        self._lock = threading.Lock()
        self._over = False
        self._arch = arch
        self._compile = compile_ or self._in_process
        self._pool = concurrent.futures.ThreadPoolExecutor(
            workers or max(1, len(os.sched_getaffinity(0)) - 1)
        )
        self._begun = [self._pool.submit(self._one, source) for source in sources]

    def wait(self, number: int) -> None:
        """Until the source of that number was compiled or given up."""
        self._begun[number].result()

    @contextlib.contextmanager
    def still(self) -> Iterator[None]:
        """While nothing is made or begun here; what was begun compiles on. Not for long."""
        with self._lock:
            yield

    def __enter__(self) -> Ahead:
        return self

    def __exit__(
        self,
        kind: Optional[Type[BaseException]],
        error: Optional[BaseException],
        traceback: Optional[TracebackType],
    ) -> None:
        with self._lock:
            self._over = True
            for child in self._children:
                child.terminate()
        self._pool.shutdown()

    def _one(self, source: Callable[[], str]) -> None:
        with self._lock:
            if self._over:
                return
            text = source()
        self._compile(text, self._arch)

    def _in_process(self, source: str, arch: str) -> None:
        with self._lock:
            if self._over:
                return
            child = subprocess.Popen(
                [sys.executable, "-m", __name__, arch], stdin=subprocess.PIPE, text=True,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
            self._children.add(child)
        child.communicate(source)
        with self._lock:
            self._children.remove(child)


if __name__ == "__main__":
    try:
        compile_source(sys.stdin.read(), sys.argv[1])
    except KernelsError:
        sys.exit(1)
