"""Generated convolutions without a GPU: a machine of emulated threads, inputs, and float64 answers.

`Emulated` stands where `launching.CudaMachine` stands: it compiles the same source for the CPU
(tests/kernels/emulated/sparse.h) and runs the same launches with the same arguments.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import subprocess
from pathlib import Path

import torch
import torch.nn.functional as F

from narrowgauge_kernels.sparse.driver import Pointer
from narrowgauge_kernels.sparse.launching import Convolution
from narrowgauge_kernels.sparse.shapes import Tile, Variant

EMULATED = Path(__file__).parent / "emulated"
CSRC = Path(__file__).parents[2] / "src" / "narrowgauge_kernels" / "csrc"
_FLAGS = ["-O0", "-std=c++14", "-Wall", "-Wextra", "-Werror", "-Wno-unknown-pragmas"]
#: Declared in front of a template that is never made; a dense kernel of a sparse source.
_FLAGS += ["-fPIC", "-Wno-unused-function"]


class Emulated:
    """A machine whose device is the CPU. `backwards` runs the blocks of a launch in that order."""

    def __init__(self, folder, arch="9.0"):
        self.folder, self.capability, self.backwards = folder, arch, False
        self.launched, self.library, self.recording = [], None, False
        # Parsed once for all sources, which takes the compiler longer than any of them.
        self._gcc(
            "-I", CSRC, "-x", "c++-header", EMULATED / "sparse.h", "-o", folder / "sparse.h.gch"
        )

    def arch(self, device):
        return self.capability

    def check(self, tensor):
        assert tensor.device.type == "cpu"

    def guard(self, device):
        return contextlib.nullcontext()

    def located(self, device):
        return device

    def capturing(self):
        return self.recording

    def function(self, source, kernel, device):
        library = self.folder / f"{hashlib.sha256(source.encode()).hexdigest()[:16]}.so"
        if not library.exists():
            self._compile(source, library)
        self.library = ctypes.CDLL(str(library))
        found = getattr(self.library, f"run_{kernel.kernel}")
        found.argtypes = [ctypes.c_uint, ctypes.c_uint, *[ctypes.c_int] * 3, ctypes.c_void_p]
        return found

    def products(self):
        """Tensor-core products of the last launches' library, since this was last asked."""
        return self.library.take_products()

    def _compile(self, source, library):
        lines = source.splitlines()
        # The line in front of a kernel's name says whether the blocks of a cell are a cluster.
        names = {
            line.partition("(")[0]: "NARROWGAUGE_CLUSTER" in before
            for before, line in zip(lines, lines[1:])
            if line.startswith(_KERNELS)
        }
        calls = "".join(
            f'extern "C" void run_{name}(unsigned int cells, unsigned int slices, int threads,\n'
            "    int shared_bytes, int backwards, const std::uint64_t* values) {\n"
            f"  launch({name}, cells, slices, {'slices' if clustered else '1'}, threads,\n"
            "         shared_bytes, backwards != 0, values);\n}\n"
            for name, clustered in names.items()
        )
        text = library.with_suffix(".cpp")
        text.write_text(source + calls)
        self._gcc("-I", self.folder, "-include", "sparse.h", "-shared", text, "-o", library)

    def _gcc(self, *words):
        done = subprocess.run(
            ["g++", *_FLAGS, *map(str, words)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert done.returncode == 0, done.stdout[:4000]

    def launch(self, function, kernel, device, arguments):
        values = [each.address if isinstance(each, Pointer) else each for each in arguments]
        array = (ctypes.c_uint64 * len(values))(*values)
        self.launched.append(kernel.kernel)
        function(*kernel.grid, kernel.threads, kernel.shared_bytes, self.backwards, array)


_KERNELS = ("sparse_convolve(", "dense_convolve(", "sparse_produce(", "sparse_reduce(")


def operands(shape, zeros=0.6, seed=0, dtype=torch.float32, blocky=False):
    """x with a share of values that a ReLU makes zero, weight and bias."""
    generator = torch.Generator().manual_seed(seed)
    sizes = (shape.batch, shape.channels, shape.height, shape.width)
    x = torch.randn(sizes, generator=generator).abs() + 0.01
    mask = torch.rand(sizes, generator=generator) < zeros
    if blocky:  # whole channels of an image
        mask = (torch.rand(sizes[:2], generator=generator) < zeros)[:, :, None, None].expand(sizes)
    x = torch.where(mask, -x, x)
    weight = torch.randn(
        (shape.filters, shape.channels, shape.kernel, shape.kernel), generator=generator
    )
    bias = torch.randn(shape.filters, generator=generator)
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def expected(shape, variant, x, weight, bias=None):
    """In float64."""
    wide = x.double()
    wide = F.relu(wide) if variant.relu_input else wide
    y = F.conv2d(
        wide, weight.double(), None if bias is None else bias.double(), shape.stride, shape.padding
    )
    return F.relu(y) if variant.relu_output else y


def run(machine, shape, tile, variant, x, weight, bias=None, crossover=0.0):
    """A fresh convolution's result."""
    return Convolution(shape, tile, variant, crossover, machine)(x, weight, bias)


def tolerance(variant, y):
    """For sums of a few hundred products of the precision."""
    unit = {"fp32": 2e-6, "tf32": 2e-3, "fp16": 2e-3}[variant.precision]
    return unit * float(y.abs().max())


__all__ = ["Emulated", "Tile", "Variant", "expected", "operands", "run", "tolerance"]
