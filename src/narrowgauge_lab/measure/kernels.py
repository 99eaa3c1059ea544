"""Which GPU kernels a call launches, and what their names say of tensor cores.

A name is evidence, not proof: libraries rename their kernels, and a compiler's kernel may multiply
on tensor cores without a word of it. What an operator was given, `probe.observe` says.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import torch_compat

__all__ = ["Kernel", "kernel_names", "uses_tensor_cores"]

#: Shapes of the instructions (884 Volta, 1688 Turing, 16816 Ampere), their names, operands that
#: only they take, and families of kernels that have no other path (nvjet: cuBLAS on Hopper).
_TENSOR_CORES = re.compile(
    r"tensorop|[hsbi]?(?:884|1688|16816|16832)(?:gemm|cudnn|fprop|dgrad|wgrad|_)"
    r"|hmma|imma|wgmma|gmma|mma_sync|nvjet|tf32|flash_(?:fwd|bwd)"
    r"|xmma_\w*(?:f16f16|bf16bf16|i8i8|e4m3|e5m2)",
    re.IGNORECASE,
)
#: Plain arithmetic: single and double precision without an instruction shape, and what multiplies
#: nothing.
_PLAIN = re.compile(
    r"sgemm|simt|dgemm|ffma|scudnn|xmma_\w*(?:f32f32_f32f32|f64f64)|winograd.*<float"
    r"|elementwise|reduce|pool|softmax|batch_?norm|bn_fw|bn_bw|nchwtonhwc|nhwctonchw|transpose"
    r"|copy|fill|cat|indexing|vectorized|triton_(?:poi|red|per)_",
    re.IGNORECASE,
)
#: Convolutions and products by name, and everything that Triton made: no telling.
_PRODUCT = re.compile(
    r"gemm|gemv|conv|mma|winograd|cutlass|_mm_|fprop|attention|cudnn_generated|triton",
    re.IGNORECASE,
)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel of one name; `seconds` is the sum over its `calls`.

    `tensor_cores` is what the name says; None: nothing.
    """

    name: str
    calls: int
    seconds: float
    tensor_cores: Optional[bool]


def kernel_names(call: Callable[[], Any]) -> Tuple[Kernel, ...]:
    """The kernels of one run of `call`, the longest first; replayed graphs and compiled code too.

    Raises NotApplicableError where there is no CUDA device, or no profiler in this torch.
    """
    if not torch.cuda.is_available():
        raise NotApplicableError(
            "there are no GPU kernels to name", why="torch finds no CUDA device here"
        )
    if not torch_compat.profiler_available():
        raise NotApplicableError(
            "GPU kernels cannot be named", why="this torch was built without its profiler"
        )
    if torch_compat.profiling():
        raise NotApplicableError(
            "GPU kernels cannot be named while the row is profiled",
            why="torch has one profiler per thread",
            next_step="run without -p profile=torch",
        )
    torch.cuda.synchronize()
    with torch_compat.make_profiler(cuda=True) as taken:
        call()
        torch.cuda.synchronize()
    return _summed(list(taken.events()))


def _summed(events: List[Any]) -> Tuple[Kernel, ...]:
    """Kernels among a profile's events; ranges that code marked appear on the GPU as well."""
    marks = {event.name for event in events if not _on_gpu(event)}
    found: Dict[str, List[float]] = {}
    for event in events:
        moved = event.name.startswith(("Memcpy", "Memset"))
        if _on_gpu(event) and not moved and event.name not in marks:
            found.setdefault(event.name, []).append(event.time_range.elapsed_us() / 1e6)
    kernels = [
        Kernel(name, len(times), sum(times), uses_tensor_cores(name))
        for name, times in found.items()
    ]
    return tuple(sorted(kernels, key=lambda kernel: -kernel.seconds))


def _on_gpu(event: Any) -> bool:
    return str(event.device_type).endswith("CUDA")


def uses_tensor_cores(name: str) -> Optional[bool]:
    """What a kernel's name says of tensor cores; None for a product that does not say.

    Kernels that are no product at all are False.
    """
    if _TENSOR_CORES.search(name):
        return True
    if _PLAIN.search(name):
        return False
    return None if _PRODUCT.search(name) else False
