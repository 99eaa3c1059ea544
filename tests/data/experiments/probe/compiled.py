"""What users compile inside, without CUDA: a functor of their own, and an extension of torch."""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from pathlib import Path

from narrowgauge_lab.context import RowContext

#: An approximate multiplier: the lower half of each factor is dropped.
_FUNCTOR = """
extern "C" int multiply(int a, int b) { return (a & ~15) * (b & ~15); }
"""
_EXTENSION = """
#include <torch/extension.h>
at::Tensor twice(const at::Tensor& a) { return a + a; }
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("twice", &twice); }
"""
#: The compiler's optimiser takes most of the time, and is not what is tried here.
_FLAGS = ["-O0"]


def functor(ctx: RowContext) -> None:
    """Compile the functor with the image's g++ where users would, and call it."""
    with tempfile.TemporaryDirectory(dir="/cache") as folder:
        source, library = Path(folder, "functor.cpp"), Path(folder, "functor.so")
        source.write_text(_FUNCTOR)
        subprocess.check_call(["g++", "-shared", "-fPIC", str(source), "-o", str(library)])
        ctx.fact("product", ctypes.CDLL(str(library)).multiply(100, 200))


def extension(ctx: RowContext) -> None:
    """Build an extension that Python imports: that takes ninja and Python's headers."""
    import torch
    from torch.utils import cpp_extension

    built = cpp_extension.load_inline("probe_extension", [_EXTENSION], extra_cflags=_FLAGS)
    ctx.fact("twice", built.twice(torch.ones(2)).tolist())
    ctx.fact("built_in", str(Path(built.__file__).parent))
