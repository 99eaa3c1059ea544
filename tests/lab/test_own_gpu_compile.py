"""The Triton kernels compile for every capability they are offered on, without a GPU."""

from __future__ import annotations

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
}


def _ptx(element: str, capability: int) -> str:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from narrowgauge_lab.quant.gpu.kernels import conv_kernel

    constants: Dict[str, Any] = {
        "COLUMNS": 3, "STRIDE": 1, "PADDING": 1, "WINDOW": 9, "RESIDUAL": True, "RELU": True,
        "OUT": 0 if element == "i8" else 1, "BLOCK_M": 128, "BLOCK_N": 64, "BLOCK_K": 64,
    }  # fmt: skip
    signature: Dict[str, str] = {}
    for name in conv_kernel.arg_names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in ("x", "w", "residual", "y"):
            signature[name] = f"*{element}"
        elif name in ("scale", "bias"):
            signature[name] = "*fp32"
        else:
            signature[name] = "fp32" if name == "residual_scale" else "i32"
    places = {name: place for place, name in enumerate(conv_kernel.arg_names)}
    aligned = [name for name, kind in signature.items() if kind not in ("constexpr", "fp32")]
    source = ASTSource(
        conv_kernel,
        signature,
        constexprs={(places[name],): value for name, value in constants.items()},
        attrs={(places[name],): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": 4, "num_stages": 3}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return str(compiled.asm["ptx"])


@pytest.mark.parametrize(("element", "capability"), list(_INSTRUCTIONS))
def test_products_run_on_tensor_cores(element: str, capability: int) -> None:
    ptx = _ptx(element, capability)
    assert _INSTRUCTIONS[element, capability] in ptx
    assert "cp.async" in ptx
