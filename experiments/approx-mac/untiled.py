"""A layer as the original computed it: unfolded first, then a dot product for each result alone.

Written anew. On CUDA a thread for each result, blocks of 8×8×8 over filters, pixels and images,
operands read from global memory; unlike the original's it runs on the current stream and waits for
nothing. On a CPU, where the original's loops call torch for every number, a torch-only program of
that design stands for it: one matrix-vector product for each filter, or for codes one look-up in
the whole table for each product, as simulators in PyTorch do it. Products of float32 are exact,
which the original's are: its approximate one was left to be filled in.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError

from .operands import Operands
from .subject import Call

__all__ = ["MOST_LOOKUPS", "unfolded", "untiled_codes", "untiled_float"]

#: Look-ups of one call that a CPU still does in about a second.
MOST_LOOKUPS = 2**28

_ROUND = r"""
  const int filter = blockIdx.x * blockDim.x + threadIdx.x;
  const int pixel = blockIdx.y * blockDim.y + threadIdx.y;
  const int image = blockIdx.z * blockDim.z + threadIdx.z;
  if (filter >= filters || pixel >= pixels || image >= images) return;
  const long long row = (long long)image * pixels + pixel;
"""
_SOURCES = {
    "untiled_float": r"""
extern "C" __global__ void untiled_float(const float* x, const float* weight, float* out,
                                         int pixels, int depth, int filters, int images) {"""
    + _ROUND
    + r"""  float sum = 0.0f;
  for (int d = 0; d < depth; ++d)
    sum += x[row * depth + d] * weight[(long long)d * filters + filter];
  out[row * filters + filter] = sum;
}
""",
    "untiled_codes": r"""
extern "C" __global__ void untiled_codes(const unsigned char* x, const unsigned char* weight,
                                         const int* table, int* out, int pixels, int depth,
                                         int filters, int images) {"""
    + _ROUND
    + r"""  int sum = 0;
  for (int d = 0; d < depth; ++d)
    sum += table[256 * x[row * depth + d] + weight[(long long)d * filters + filter]];
  out[row * filters + filter] = sum;
}
""",
}  # fmt: skip


def unfolded(operands: Operands) -> torch.Tensor:
    """float32 [images, pixels, K]; of a linear layer [1, rows, K]."""
    x, problem = operands.x.float(), operands.problem
    if problem.kind == "linear":
        return x[None]
    kernel = tuple(operands.weight.shape[2:])
    taps = functional.unfold(x, kernel, padding=problem.padding, stride=problem.stride)
    return taps.transpose(1, 2).contiguous()


def untiled_float(operands: Operands) -> Call:
    """Unfolding included, as the original's layer does it. Raises NotApplicableError."""
    filters = len(operands.weight)
    if not _on_gpu(operands.x.device):

        def by_filter() -> torch.Tensor:
            rows = unfolded(operands)
            flat, weights = rows.flatten(0, 1), operands.weight.reshape(filters, -1)
            columns = [torch.mv(flat, weights[each]) for each in range(filters)]
            return _shaped(operands, torch.stack(columns, dim=1))

        return by_filter
    kernel = _compiled("untiled_float")

    def by_thread() -> torch.Tensor:
        rows = unfolded(operands)
        images, pixels, depth = rows.shape
        weights = operands.weight.reshape(filters, depth).t().contiguous()
        out = rows.new_empty((images * pixels, filters))
        numbers = (pixels, depth, filters, images)
        _launch(kernel, (filters, pixels, images), [rows, weights, out, *numbers])
        return _shaped(operands, out)

    return by_thread


def untiled_codes(operands: Operands, table: torch.Tensor) -> Call:
    """By `table`, int32 [256, 256]. torch unfolds no codes: that is done beforehand, untimed.

    Raises NotApplicableError.
    """
    filters, device = len(operands.weight), operands.x.device
    rows = _places(unfolded(operands), operands.x.dtype)
    weights = _places(operands.weight.reshape(filters, -1), operands.weight.dtype)
    flat = table.to(device).reshape(-1)
    if not _on_gpu(device):
        if operands.macs > MOST_LOOKUPS:
            raise NotApplicableError(
                f"{operands.macs} look-ups one by one take too long here",
                why=f"{MOST_LOOKUPS} are the most that are tried on a CPU",
            )
        base, columns = rows.flatten(0, 1).long() * 256, weights.long()

        def by_filter() -> torch.Tensor:
            sums = [flat[base + each].sum(-1, dtype=torch.int32) for each in columns]
            return _shaped(operands, torch.stack(sums, dim=1))

        return by_filter
    kernel, turned = _compiled("untiled_codes"), weights.t().contiguous()
    images, pixels, depth = rows.shape

    def by_thread() -> torch.Tensor:
        out = flat.new_empty((images * pixels, filters))
        numbers = (pixels, depth, filters, images)
        _launch(kernel, (filters, pixels, images), [rows, turned, flat, out, *numbers])
        return _shaped(operands, out)

    return by_thread


def _on_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _places(codes: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """uint8: rows or columns of a table."""
    return (codes.float() + (128.0 if dtype == torch.int8 else 0.0)).to(torch.uint8)


def _shaped(operands: Operands, rows: torch.Tensor) -> torch.Tensor:
    """[pixels of all images, F] as the layer's result."""
    if operands.problem.kind == "linear":
        return rows
    images, filters, height, width = operands.problem.output_shape(
        operands.x.shape, operands.weight.shape
    )
    return rows.reshape(images, height * width, filters).transpose(1, 2).reshape(
        images, filters, height, width
    )  # fmt: skip


def _launch(kernel: Any, sizes: Any, arguments: Any) -> None:
    block = (8, 8, 8) if sizes[2] > 1 else (32, 32, 1)
    grid = tuple(-(-size // threads) for size, threads in zip(sizes, block))
    kernel(grid=grid, block=block, args=arguments)


@functools.lru_cache(maxsize=None)
def _compiled(name: str) -> Any:
    """By torch's own use of NVRTC, which it has since 2.8."""
    compile_kernel = getattr(torch.cuda, "_compile_kernel", None)
    if compile_kernel is None:
        raise NotApplicableError(
            "there is no untiled kernel here",
            why=f"torch {torch.__version__} compiles no CUDA code at run time",
        )
    return compile_kernel(_SOURCES[name], name)
