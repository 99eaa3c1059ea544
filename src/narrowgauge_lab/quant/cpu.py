"""What int8 products this processor has: whether 8-bit activations are exact or saturate."""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Mapping

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.quant.layers import LayerScales

__all__ = ["exact_activation_bits", "require_exact"]

_X86 = ("x86_64", "amd64", "AMD64")


def exact_activation_bits(
    cpuinfo: Path = Path("/proc/cpuinfo"), machine: str = platform.machine()
) -> int:
    """The most bits that activations may have for products with 8-bit weights to be exact.

    Without AVX-512 VNNI, x86 adds two products of unsigned and signed bytes into 16 bits and
    saturates (vpmaddubsw): 2 · 255 · 127 does not fit there, 2 · 127 · 128 does. Other processors
    widen first.
    """
    if machine not in _X86:
        return 8
    return 8 if "avx512_vnni" in cpuinfo.read_text(encoding="utf-8").split() else 7


def require_exact(scales: Mapping[str, LayerScales], bits: int) -> None:
    """Raise BadValueError where activations have more than `bits` bits."""
    wide = [name for name, each in scales.items() if each.input.bits > bits]
    if wide:
        raise BadValueError(
            f"activations of {scales[wide[0]].input.bits} bits would saturate inside {wide[0]}",
            why="this processor has no AVX-512 VNNI, and adds pairs of int8 products in 16 bits",
            next_step=f"calibrate with QuantConfig(activation_bits={bits})",
        )
