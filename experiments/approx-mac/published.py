"""Published kernels for any 8-bit table, as peers: the user's own copies of them, compiled here.

| peer          | what it is                                                                |
|---------------|---------------------------------------------------------------------------|
| `torchapprox` | TorchApprox (etrommer/torch-approx): a product by a table in texture memory, |
|               | or on a CPU one look-up at a time                                          |
| `adapt`       | AdaPT (dimdano/adapt): a CPU convolution by a table in its source, unfolding |
|               | included                                                                   |

Both are MIT-licensed, neither is packaged. A checkout in `published/` of this experiment's folder
is compiled as its authors compile it (their flags, torch's extension loader); without one the peer
is missing, and the record says where it belongs.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any, List, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError

from .operands import Operands
from .subject import Call
from .untiled import unfolded

__all__ = ["FOLDER", "adapt", "torchapprox"]

FOLDER = Path(__file__).parent / "published"
#: Checkout, and what of it is compiled: for any device, and with CUDA.
_TORCHAPPROX = "torch-approx", "src/torchapprox/operators/kernels"
_ADAPT = "adapt", "adapt/cpu-kernels/axx_conv2d.cpp"
#: What AdaPT's tables are made of.
_INT16 = torch.iinfo(torch.int16)


def torchapprox(operands: Operands, table: torch.Tensor) -> Call:
    """Its product, on windows unfolded beforehand: int32 [pixels of all images, F].

    `table`: int32 [256, 256], activation first, in the order of values. Raises NotApplicableError.
    """
    x, weight = operands.x, operands.weight
    if x.dtype != weight.dtype:
        raise NotApplicableError("its operands are both signed or both unsigned")
    rows = unfolded(operands).to(x.dtype).contiguous()
    weights = weight.reshape(len(weight), -1).contiguous()
    values = by_bits(table, x.dtype, weight.dtype).to(x.device).contiguous()
    gpu = x.device.type == "cuda"
    module = _torchapprox_module(gpu)
    multiply = module.matmul_cuda if gpu else module.matmul_cpu

    def call() -> torch.Tensor:
        sums = torch.empty((*rows.shape[:2], len(weights)), dtype=torch.int32, device=x.device)
        multiply(rows, weights, values, sums)
        return sums.flatten(0, 1)

    return call


def adapt(operands: Operands, table: torch.Tensor) -> Call:
    """Its convolution: int32, of the layer's shape. CPU only. Raises NotApplicableError."""
    x, weight, problem = operands.x, operands.weight, operands.problem
    if x.device.type != "cpu":
        raise NotApplicableError("it has kernels for CPUs only")
    if problem.kind == "linear":
        raise NotApplicableError("its convolution alone is a peer here")
    if x.dtype != torch.int8 or weight.dtype != torch.int8:
        raise NotApplicableError("its operands are signed")
    if not _INT16.min <= int(table.min()) <= int(table.max()) <= _INT16.max:
        raise NotApplicableError("its tables are of int16", why="this one has larger products")
    # It looks up the weight first.
    module = _adapt_module(by_bits(table, x.dtype, weight.dtype).t())
    images, weights = x.contiguous(), weight.contiguous()
    kernel = list(weight.shape[2:])

    def call() -> torch.Tensor:
        return module.forward(images, weights, kernel, list(problem.stride), list(problem.padding))

    return call


def by_bits(table: torch.Tensor, first: torch.dtype, second: torch.dtype) -> torch.Tensor:
    """The table in the order of the operands' bit patterns, as unsigned bytes count them."""
    for axis, dtype in enumerate((first, second)):
        if dtype == torch.int8:
            table = table.roll(128, axis)
    return table


def _checkout(name: str, part: str) -> Path:
    path = FOLDER / name / part
    if not path.exists():
        raise NotApplicableError(
            f"no checkout of {name} is here", why=f"it belongs into {FOLDER / name}"
        )
    return path


def _torchapprox_module(gpu: bool) -> Any:
    kernels = _checkout(*_TORCHAPPROX)
    files = [kernels / "cpu/ta_gemm_cpu.cpp"]
    flags = ["-fopenmp", "-O3"]
    if gpu:
        files += [kernels / "cuda" / f"ta_{part}" for part in _CUDA_PARTS]
        flags.append("-DTA_CUDA_EXTENSION")
    return _compiled(f"torchapprox_{'cuda' if gpu else 'cpu'}", files, flags, [])


_CUDA_PARTS = ("backend.cpp", "gemm_cuda.cu", "dwconv.cu")


def _adapt_module(table: torch.Tensor) -> Any:
    """AdaPT's kernel with a table in its source, one library for each table."""
    source = _checkout(*_ADAPT)
    lines = (",".join(map(str, row)) for row in table.tolist())
    rows = ",\n".join(f"{{{line}}}" for line in lines)
    header = f"#include <stdint.h>\nconst int16_t lut[256][256] = {{\n{rows}}};\n"
    name = f"table_{hashlib.sha256(header.encode()).hexdigest()[:12]}"
    folder = Path(tempfile.gettempdir()) / f"narrowgauge-adapt-{os.getuid()}" / name
    (folder / "axx_mults").mkdir(parents=True, exist_ok=True)
    (folder / "axx_mults" / f"{name}.h").write_text(header, encoding="ascii")
    flags = [f"-DAXX_MULT={name}", "-march=native", "-fopenmp", "-O3", f"-I{folder}"]
    return _compiled(f"adapt_{name}", [source], flags, ["-lgomp"])


def _compiled(name: str, files: Sequence[Path], flags: List[str], link: List[str]) -> Any:
    """By torch's loader, which keeps what it compiled. Raises NotApplicableError: no compiler or
    ninja, or a torch whose headers these sources no longer fit."""
    from torch.utils import cpp_extension

    try:
        return cpp_extension.load(
            name, [str(file) for file in files], extra_cflags=flags, extra_ldflags=link
        )
    except (RuntimeError, OSError) as error:
        raise NotApplicableError(
            f"{name} does not compile here", why=_first_line(str(error))
        ) from error


def _first_line(text: str) -> str:
    """The compiler's first error, or the first line."""
    lines: Tuple[str, ...] = tuple(text.splitlines()) or ("",)
    return next((line for line in lines if "error:" in line), lines[0])[:300]
