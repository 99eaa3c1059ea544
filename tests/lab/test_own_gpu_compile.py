"""The Triton kernels compile for every capability they are offered on, without a GPU."""

from __future__ import annotations

import re
import sys
from typing import Any, Dict

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.version_info < (3, 10), reason="Triton needs Python 3.10"),
]

#: What a matrix product becomes there: none of these may fall back to scalar arithmetic.
_INSTRUCTIONS = {
    ("i8", 80): "mma.sync.aligned.m16n8k32",
    ("i8", 86): "mma.sync.aligned.m16n8k32",
    ("i8", 89): "mma.sync.aligned.m16n8k32",
    ("i8", 90): "wgmma.mma_async",
    ("i8", 100): "mma.sync.aligned.m16n8k32",
    ("i8", 120): "mma.sync.aligned.m16n8k32",
    ("fp8e4nv", 89): "mma.sync.aligned.m16n8k32",
    ("fp8e4nv", 90): "wgmma.mma_async",
    ("fp8e4nv", 100): "tcgen05.mma",
    ("fp8e4nv", 120): "mma.sync.aligned.m16n8k32",
    ("fp16", 80): "mma.sync.aligned.m16n8k16",
    ("fp16", 90): "wgmma.mma_async",
    ("bf16", 80): "mma.sync.aligned.m16n8k16",
    ("bf16", 90): "wgmma.mma_async",
    ("fp32", 80): "mma.sync.aligned.m16n8k8",
    ("fp32", 90): "wgmma.mma_async",
}
#: The formats' codes in the kernels.
_CODES = {"i8": 0, "fp8e4nv": 1, "fp32": 2, "fp16": 3, "bf16": 4}
_FLOATS = (
    "residual_scale", "before_low", "before_high", "low", "high", "factor", "inverse_scale",
)  # fmt: skip


def _ptx(name: str, element: str, capability: int, constants: Dict[str, Any]) -> str:
    """`constants` that the kernel has; others are integers, numbers or pointers by their names."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from narrowgauge_lab.engines.own.gpu import kernels

    kernel = getattr(kernels, name)
    constants = {key: value for key, value in constants.items() if key in kernel.arg_names}
    signature: Dict[str, str] = {}
    for argument in kernel.arg_names:
        if argument in constants:
            signature[argument] = "constexpr"
        elif argument in ("x", "w", "residual", "y"):
            signature[argument] = f"*{element}"
        elif argument in ("tickets",) or (argument == "partial" and element == "i8"):
            signature[argument] = "*i32"
        elif argument in ("scale", "bias", "shift", "before_scale", "before_shift", "partial"):
            signature[argument] = "*fp32"
        else:
            signature[argument] = "fp32" if argument in _FLOATS else "i32"
    places = {argument: place for place, argument in enumerate(kernel.arg_names)}
    aligned = [each for each, kind in signature.items() if kind not in ("constexpr", "fp32")]
    source = ASTSource(
        kernel,
        signature,
        constexprs={(places[each],): value for each, value in constants.items()},
        attrs={(places[each],): [["tt.divisibility", 16]] for each in aligned},
    )
    options = {"num_warps": 4, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(compiled.asm["ptx"])


def _conv(element: str, *, before: bool = False, split: bool = False) -> Dict[str, Any]:
    return {
        "COLUMNS": 3, "STRIDE": 1, "PADDING": 1, "WINDOW": 9, "MASKED": before, "BEFORE": before,
        "RESIDUAL": True, "SCALED": element in ("i8", "fp8e4nv"), "OUT": _CODES[element],
        "MATH": "tf32", "SPLIT": split, "BEFORE_OUT": _CODES[element], "BLOCK_M": 128,
        "BLOCK_N": 64, "BLOCK_K": 64 if element in ("i8", "fp8e4nv") else 32, "AHEAD": False,
    }  # fmt: skip


@pytest.mark.parametrize(("element", "capability"), list(_INSTRUCTIONS))
def test_products_run_on_tensor_cores(element: str, capability: int) -> None:
    ptx = _ptx("conv_kernel", element, capability, _conv(element))
    assert _INSTRUCTIONS[element, capability] in ptx
    assert "cp.async" in ptx or capability < 80


@pytest.mark.parametrize("element", sorted(_CODES))
def test_divided_sums_and_what_comes_before_them_compile(element: str) -> None:
    ptx = _ptx("conv_kernel", element, 90, _conv(element, before=True, split=True))
    assert "atom.global.gpu.acq_rel" in ptx


_OTHERS = [
    "linear_kernel", "depthwise_kernel", "pool_kernel", "mean_kernel", "affine_kernel",
    "read_kernel",
]  # fmt: skip


def _other(element: str) -> Dict[str, Any]:
    return {
        "SIDE": 3, "STRIDE": 2, "PADDING": 1, "SCALED": True, "OUT": _CODES[element], "MEAN": True,
        "BEFORE": True, "BLOCK_M": 32, "BLOCK_N": 8, "BLOCK_K": 512, "BLOCK_C": 64, "PIXEL": 4,
        "BLOCK": 256, "AHEAD": False,
    }  # fmt: skip


@pytest.mark.parametrize("element", sorted(_CODES))
@pytest.mark.parametrize("name", _OTHERS)
def test_the_other_kernels_compile(name: str, element: str) -> None:
    assert ".visible .entry" in _ptx(name, element, 89, _other(element))


@pytest.mark.parametrize("name", ["conv_kernel", *_OTHERS])
def test_what_is_launched_ahead_waits_before_it_touches_memory(name: str) -> None:
    constants = _conv("fp16", split=True) if name == "conv_kernel" else _other("fp16")
    lines = _ptx(name, "fp16", 90, {**constants, "AHEAD": True}).splitlines()
    wait, launch = (
        next(place for place, line in enumerate(lines) if f"griddepcontrol.{word}" in line)
        for word in ("wait", "launch_dependents")
    )
    touched = [
        place for place, line in enumerate(lines)
        if re.search(r"\b(ld|st|atom|red)\.global|\bcp\.async", line)
    ]  # fmt: skip
    assert wait < launch < min(touched)
    assert "griddepcontrol" not in _ptx(name, "fp16", 90, constants)
