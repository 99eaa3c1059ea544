"""The three algorithms that the paper compares with, by cuDNN's own call: t1, t2 and t3.

`cudnnConvolutionForward` takes an algorithm by its number; the graph API, whose engines the other
peers are, names none of them. Strict float32 (FMA, no tensor cores), in NHWC as in the artefact
and in NCHW, of which the faster one counts. The library is the one that torch has loaded.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError

from .looking import glance

__all__ = ["ALGORITHMS", "LAYOUTS", "Gemm", "Kept", "all_of", "find_cudnn"]

#: By the name of their column in the CSV; the numbers are cudnnConvolutionFwdAlgo_t's.
ALGORITHMS: Dict[str, Tuple[str, int]] = {
    "t1": ("IMPLICIT_GEMM", 0),
    "t2": ("IMPLICIT_PRECOMP_GEMM", 1),
    "t3": ("GEMM", 2),
}
_FLOAT, _CROSS_CORRELATION, _FMA_MATH = 0, 1, 3
#: Orders of memory: cudnnTensorFormat_t and torch's.
LAYOUTS: Dict[str, Tuple[int, Any]] = {
    "NHWC": (1, torch.channels_last),
    "NCHW": (0, torch.contiguous_format),
}
#: Since cuDNN 8 there is a mode that keeps products float32.
_HAS_FMA = 8000
_MAPS = Path("/proc/self/maps")
_LOADED = re.compile(r"(/\S*libcudnn\.so\S*)")
_NAMES = ("libcudnn.so.9", "libcudnn.so.8", "libcudnn.so.7")

Pair = Tuple[int, int]


@functools.lru_cache(maxsize=None)
def find_cudnn() -> ctypes.CDLL:
    """cuDNN, the one this process has loaded before any other. Raises NotApplicableError."""
    torch.backends.cudnn.version()  # loads it
    found = _LOADED.search(_MAPS.read_text(encoding="utf-8")) if _MAPS.is_file() else None
    names = ([found.group(1)] if found else []) + list(_NAMES)
    said = ""
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError as error:
            said = str(error)
    raise NotApplicableError("there is no cuDNN to call here", why=said)


class Gemm:
    """One algorithm on one problem: x [B, C, H, W], weight [N, C, k, k], y [B, N, H', W'], float32
    on one device, all in the order `layout`, one of LAYOUTS. Raises NotApplicableError where cuDNN
    has no such algorithm for it."""

    def __init__(
        self, library: ctypes.CDLL, algorithm: int, x: torch.Tensor, weight: torch.Tensor,
        stride: Pair, padding: Pair, layout: str,
    ) -> None:  # fmt: skip
        self._library, self._algorithm = library, algorithm
        self._stride, self._padding = stride, padding
        self.layout = layout
        number, self.memory = LAYOUTS[layout]
        self._prepare(number, self.memory, x, weight)

    def _prepare(self, layout: int, memory: Any, x: torch.Tensor, weight: torch.Tensor) -> None:
        self.x = x.contiguous(memory_format=memory)
        self.weight = weight.contiguous(memory_format=memory)
        sides = [
            (size + 2 * edge - kernel) // step + 1
            for size, edge, kernel, step in zip(
                x.shape[2:], self._padding, weight.shape[2:], self._stride
            )
        ]
        self.y = torch.empty(len(x), len(weight), *sides, device=x.device, memory_format=memory)
        self._handle = self._created("cudnnCreate")
        self._tensors = tuple(self._tensor(each, layout) for each in (self.x, self.y))
        self._filter = self._created("cudnnCreateFilterDescriptor")
        self._call("cudnnSetFilter4dDescriptor", self._filter, _FLOAT, layout, *weight.shape)
        self._convolution = self._created("cudnnCreateConvolutionDescriptor")
        self._call(
            "cudnnSetConvolution2dDescriptor", self._convolution, *self._padding, *self._stride,
            1, 1, _CROSS_CORRELATION, _FLOAT,
        )  # fmt: skip
        if int(self._library.cudnnGetVersion()) >= _HAS_FMA:
            self._call("cudnnSetConvolutionMathType", self._convolution, _FMA_MATH)
        size = ctypes.c_size_t()
        self._call(
            "cudnnGetConvolutionForwardWorkspaceSize", self._handle, self._tensors[0],
            self._filter, self._convolution, self._tensors[1], self._algorithm, ctypes.byref(size),
        )  # fmt: skip
        self._workspace = torch.empty(max(1, size.value), dtype=torch.uint8, device=x.device)
        self()  # an algorithm may refuse only here

    def __call__(self) -> torch.Tensor:
        """Queue it on the current stream; y, which is the same memory each time."""
        x = self.x
        if x.is_cuda:
            stream = ctypes.c_void_p(torch.cuda.current_stream(x.device).cuda_stream)
            self._call("cudnnSetStream", self._handle, stream)
        one, nothing = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._call(
            "cudnnConvolutionForward", self._handle, ctypes.byref(one), self._tensors[0],
            _pointer(x), self._filter, _pointer(self.weight), self._convolution,
            self._algorithm, _pointer(self._workspace),
            ctypes.c_size_t(self._workspace.numel()), ctypes.byref(nothing), self._tensors[1],
            _pointer(self.y),
        )  # fmt: skip
        return self.y

    def _tensor(self, tensor: torch.Tensor, layout: int) -> ctypes.c_void_p:
        made = self._created("cudnnCreateTensorDescriptor")
        self._call("cudnnSetTensor4dDescriptor", made, layout, _FLOAT, *tensor.shape)
        return made

    def _created(self, function: str) -> ctypes.c_void_p:
        made = ctypes.c_void_p()
        self._call(function, ctypes.byref(made))
        return made

    def _call(self, function: str, *arguments: Any) -> None:
        code = int(getattr(self._library, function)(*arguments))
        if code != 0:
            raise NotApplicableError(f"{function} gave status {code}")


def _pointer(tensor: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """An algorithm in its faster layout. `tried`: by layout, microseconds or why not."""

    gemm: Gemm
    tried: Dict[str, str]


def all_of(
    x: torch.Tensor, weight: torch.Tensor, stride: Pair, padding: Pair,
    library: Optional[Callable[[], ctypes.CDLL]] = None,
    seconds_of: Optional[Callable[[Gemm], float]] = None,
) -> Tuple[Dict[str, Kept], Dict[str, str]]:  # fmt: skip
    """Those that do the problem, by column, and why the others do not. `seconds_of`: what tells the
    faster layout."""
    found: Dict[str, Kept] = {}
    missing: Dict[str, str] = {}
    for column, (name, number) in ALGORITHMS.items():
        made: List[Tuple[float, Gemm]] = []
        tried: Dict[str, str] = {}
        for layout in LAYOUTS:
            try:
                loaded = (library or find_cudnn)()
                gemm = Gemm(loaded, number, x, weight, stride, padding, layout)
            except NotApplicableError as error:
                tried[layout] = f"{error.what}: {error.why}" if error.why else str(error.what)
                continue
            seconds = (seconds_of or _median)(gemm)
            tried[layout] = f"{seconds * 1e6:.2f} µs"
            made.append((seconds, gemm))
        if made:
            found[column] = Kept(min(made, key=lambda each: each[0])[1], tried)
        else:
            missing[column] = f"{name}: " + "; ".join(dict.fromkeys(tried.values()))
    return found, missing


def _median(gemm: Gemm) -> float:
    return glance(gemm, gemm.x.device)
