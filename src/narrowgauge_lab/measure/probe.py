"""The precision that ran: dtypes as operators got them, and TF32 by what came out.

A parameter says what was asked for, a layer's output what it was cast to afterwards, a flag what
would be allowed. None of them is asked here.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.kernels import Kernel, kernel_names
from narrowgauge_lab.measure.operators import Use
from narrowgauge_lab.measure.tf32 import float32_bits, tf32_by_arithmetic
from narrowgauge_lab.measure.watch import (
    NotObservableError,
    declare,
    watch,
    watch_compilation,
)

__all__ = [
    "Kernel",
    "NotObservableError",
    "Observation",
    "declare",
    "float32_bits",
    "kernel_names",
    "observe",
    "observe_compilation",
    "precision_ran",
    "require_precision",
    "tf32_by_arithmetic",
]

_NAMES = {
    "float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16",
    "int8": "int8", "uint8": "int8", "qint8": "int8", "quint8": "int8",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Observation:
    """Convolutions or products of one kind that ran, `calls` of them, with torch's dtype names.

    In a backward pass `inputs` is the gradient that came from above.
    """

    operator: str
    inputs: str
    weight: str
    output: str
    calls: int
    device: str = "cpu"

    def __str__(self) -> str:
        return f"{self.operator}({self.inputs}, {self.weight}) × {self.calls} on {self.device}"


def observe(call: Callable[[], Any]) -> Tuple[Observation, ...]:
    """Run `call` once: every convolution and matrix product in it, forward and backward.

    Raises NotObservableError where it runs captured code; see `watch.watch` for what is seen.
    """
    return _gathered(watch(call))


def observe_compilation(call: Callable[[], Any]) -> Tuple[Observation, ...]:
    """What the first call of a torch.compile'd function hands to the compiler."""
    return _gathered(watch_compilation(call))


def _gathered(uses: Sequence[Use]) -> Tuple[Observation, ...]:
    counts: Dict[Tuple[str, str, str, str, str], int] = {}
    for use in uses:
        key = (
            use.operator, use.inputs.dtype, use.weight.dtype, use.output.dtype, use.output.device
        )  # fmt: skip
        counts[key] = counts.get(key, 0) + 1
    return tuple(
        Observation(operator, inputs, weight, output, calls, device)
        for (operator, inputs, weight, output, device), calls in counts.items()
    )


def precision_ran(observations: Sequence[Observation], tf32: Mapping[str, bool]) -> str:
    """One word for all of them: `fp16`, `tf32`, `bf16+fp32` where they differ, `none` for nothing.

    `tf32` is what `tf32_by_arithmetic` found on the row's device: the GPU, where one is involved.
    An operator whose two operands differ in kind is `fp32*int8`.
    """
    devices = {each.device for each in observations}
    measured = devices - {"cpu"} or devices
    names = {_precision(each, tf32 if each.device in measured else {}) for each in observations}
    return "+".join(sorted(names)) or "none"


def _precision(seen: Observation, tf32: Mapping[str, bool]) -> str:
    inputs, weight = _name(seen.inputs), _name(seen.weight)
    if inputs != weight:
        return f"{inputs}*{weight}"
    kind = "conv" if "conv" in seen.operator.lower() else "matmul"
    return "tf32" if inputs == "fp32" and tf32.get(kind, False) else inputs


def _name(dtype: str) -> str:
    return "fp8" if dtype.startswith("float8") else _NAMES.get(dtype, dtype)


def require_precision(
    ctx: RowContext,
    asked: str,
    observations: Sequence[Observation],
    tf32: Mapping[str, bool],
) -> None:
    """Record what ran; the row is invalid where that is not what was asked for.

    `asked` may name several, `fp16+int8`, that must all occur. Facts: `probe`, `precision_ran`,
    `tf32_measured`.
    """
    ran = precision_ran(observations, tf32)
    ctx.fact("probe", [dataclasses.asdict(each) for each in observations])
    ctx.fact("precision_ran", ran)
    ctx.fact("tf32_measured", dict(tf32))
    wanted = set(asked.split("+"))
    if set(ran.split("+")) == wanted:
        return
    others = [each for each in observations if precision_ran([each], tf32) not in wanted]
    ctx.invalid(f"asked for precision {asked}, ran {ran}" + _evidence(others))


def _evidence(others: List[Observation]) -> str:
    return ": " + "; ".join(map(str, others)) if others else ""
