"""The number formats that our GPU engine stores activations and weights in."""

from __future__ import annotations

import dataclasses
from typing import Dict

import torch

__all__ = ["FLOAT32_CODE", "FORMATS", "NumberFormat", "decode", "encode", "for_products"]


@dataclasses.dataclass(frozen=True)
class NumberFormat:
    """`limit`: the largest magnitude that is used, where values are scaled into the format (int8
    is symmetric and leaves -128 unused); 0 where they are stored as they are. `code` is what the
    kernels call it, `math` how they multiply float32."""

    name: str
    dtype: torch.dtype
    code: int
    limit: float = 0.0
    math: str = "tf32"

    @property
    def scaled(self) -> bool:
        return self.limit > 0

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return torch.empty((), dtype=self.dtype).element_size()

    @property
    def least_depth(self) -> int:
        """Elements that the smallest block of a matrix product sums over."""
        return 32 if self.width == 1 else 16


#: What the kernels call float32, which a last linear layer writes whatever the format.
FLOAT32_CODE = 2


def _formats() -> Dict[str, NumberFormat]:
    found = [
        NumberFormat("int8", torch.int8, 0, 127.0),
        NumberFormat("fp32", torch.float32, FLOAT32_CODE, math="ieee"),
        NumberFormat("tf32", torch.float32, FLOAT32_CODE),
        NumberFormat("fp16", torch.float16, 3),
        NumberFormat("bf16", torch.bfloat16, 4),
    ]
    if hasattr(torch, "float8_e4m3fn"):
        found.append(NumberFormat("fp8", torch.float8_e4m3fn, 1, 448.0))
    return {each.name: each for each in found}


#: By precision; fp8 (e4m3) where this torch has the type.
FORMATS = _formats()


def encode(x: torch.Tensor, scale: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """x / scale in the format; half to even and saturating where it is a scaled one. `scale`
    broadcasts against x."""
    if not form.scaled:
        return x.to(form.dtype)
    scaled = (x.float() / scale).clamp(-form.limit, form.limit)
    return (scaled.round() if form.dtype == torch.int8 else scaled).to(form.dtype)


def for_products(x: torch.Tensor, form: NumberFormat) -> torch.Tensor:
    """float32 values as tensor cores take them: to TF32's ten bits where that is the format, half
    to even. The cores themselves cut the rest off, which makes every product smaller."""
    if form.math != "tf32" or form.dtype != torch.float32:
        return x
    bits = x.float().contiguous().view(torch.int32)
    even = (bits >> 13) & 1
    rounded = ((bits + 0xFFF + even) & ~0x1FFF).view(torch.float32)
    return torch.where(torch.isfinite(x), rounded, x)


def decode(q: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 values of what `encode` gave."""
    return q.float() * scale
