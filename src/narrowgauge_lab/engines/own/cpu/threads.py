"""The number of OpenMP threads of one call, without a word to the rest of the process.

`torch.set_num_threads` is for the whole process: it also decides for threads that begin later, and
takes milliseconds in older versions of torch. OpenMP keeps the number per calling thread, and the
parallel loops of ATen and oneDNN ask OpenMP; so that is where it is set, and set back. What oneDNN
keeps between calls, it keeps by that number.
"""

from __future__ import annotations

import ctypes
import functools
import re
from pathlib import Path
from typing import Any, Callable, List, Optional, Tuple, TypeVar

import torch

from narrowgauge_lab.torch_compat import threads_may_change
from narrowgauge_lab.waiting import processors

__all__ = ["OpenMp", "find_openmp", "thread_counts", "with_threads"]

T = TypeVar("T")
Call = Callable[[torch.Tensor], T]

#: GNU's, Intel's and LLVM's runtimes, as wheels name them (libgomp-a34b3233.so.1).
_LIBRARY = re.compile(r"/lib(?:gomp|iomp5|omp)[^/\s]*\.so[^/\s]*$")


class OpenMp:
    """The OpenMP runtime that torch uses, and MKL's own number where torch shows it.

    MKL follows OpenMP unless `torch.set_num_threads` was called in the same thread, which tells MKL
    separately; so MKL is told here too.
    """

    def __init__(self, runtime: Any, mkl_set_local: Optional[Callable[[int], int]]) -> None:
        self._set: Callable[[int], None] = runtime.omp_set_num_threads
        self._mkl_set_local = mkl_set_local

    def run(self, count: int, call: Call[T], x: torch.Tensor) -> T:
        """`call(x)` with so many threads; afterwards this thread has as many as before."""
        before = torch.get_num_threads()
        if before == count:
            return call(x)
        self._set(count)
        mkl_before = self._mkl_set_local(count) if self._mkl_set_local else 0
        try:
            return call(x)
        finally:
            self._set(before)
            if self._mkl_set_local:
                self._mkl_set_local(mkl_before)


@functools.lru_cache(maxsize=None)
def find_openmp() -> Optional[OpenMp]:
    """The runtime whose number torch reports; None where no loaded library is that (torch built
    without OpenMP, or linked into something else), and where this torch's convolutions do not bear
    that the number changes. A process may hold several runtimes: each is tried."""
    if not threads_may_change():
        return None
    torch.get_num_threads()  # initialises this thread, which would write over what is tried below
    for path in _loaded(Path("/proc/self/maps")):
        try:
            runtime = ctypes.CDLL(path)
            before = int(runtime.omp_get_max_threads())
        except (OSError, AttributeError):
            continue
        runtime.omp_set_num_threads(before + 1)
        is_torchs = torch.get_num_threads() == before + 1
        runtime.omp_set_num_threads(before)
        if is_torchs:
            return OpenMp(runtime, _mkl_set_local())
    return None


def _loaded(maps: Path) -> List[str]:
    try:
        lines = maps.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in lines)
    return sorted({path for path in paths if _LIBRARY.search(path)})


def _mkl_set_local() -> Optional[Callable[[int], int]]:
    """MKL's number for this thread: gives the one before, 0 for "as OpenMP". Torch's wheels for
    x86-64 hold MKL, and those of torch 2 show the function."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function: Callable[[int], int] = ctypes.CDLL(str(library)).MKL_Set_Num_Threads_Local
    except (OSError, AttributeError):
        return None
    return function


def with_threads(call: Call[T], count: int) -> Call[T]:
    """`call` with `count` threads each time; 0, or where OpenMP is not found, with those that its
    caller has."""
    openmp = find_openmp()
    if count == 0 or openmp is None:
        return call
    return functools.partial(openmp.run, count, call)


def thread_counts(usable: int = 0) -> Tuple[int, ...]:
    """1, 2, 4 … up to the processors that this process may use, and that number itself; empty where
    the number cannot be set for one call."""
    if find_openmp() is None:
        return ()
    most = usable or processors()
    powers = [1 << power for power in range(most.bit_length())]
    return tuple(sorted({*(each for each in powers if each <= most), most}))
