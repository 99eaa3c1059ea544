"""What a row's layers ran as, by whom and in which precision: by the probe, or as engines tell."""

from __future__ import annotations

import collections
import dataclasses
import re
from typing import Any, Dict, List, Mapping, Optional, Sequence

from narrowgauge_lab.context import RowContext
from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.measure.probe import Observation, require_precision, tf32_by_arithmetic

__all__ = ["check_precision", "precision_of_layers", "record_layers"]

#: Layers told one by one, of the first repeat; characters of a kernel's name; groups of layers.
_LAYERS, _NAME, _GROUPS = 250, 60, 24
#: Layers that multiply, by the names that engines give their operators.
_MULTIPLIES = re.compile(
    r"conv|(?<!quantize)linear|gemm|matmul|addmm|inner_?product|fully_?connected|\bdot", re.I
)
#: How much of a number each keeps, least first: what runs below what was asked for is no such row.
_WIDTHS = ("fp8", "int8", "bf16", "fp16", "tf32", "fp32", "fp64")


def record_layers(ctx: RowContext, layers: Sequence[LayerFact]) -> None:
    """Facts `providers`, layers by who runs them and how; in the first repeat also `layers`."""
    groups = collections.Counter((each.provider, each.operator, each.precision) for each in layers)
    ctx.fact(
        "providers",
        [
            {"provider": provider, "operator": operator, "precision": precision, "layers": number}
            for (provider, operator, precision), number in groups.most_common(_GROUPS)
        ],
    )
    if ctx.repeat != 0:
        return
    told: List[Dict[str, Any]] = []
    for each in layers[:_LAYERS]:
        told.append({**dataclasses.asdict(each), "kernel": each.kernel[:_NAME]})
    ctx.fact("layers", told)
    ctx.fact("layers_left_out", len(layers) - len(told))


def check_precision(
    ctx: RowContext,
    asked: str,
    seen: Optional[Sequence[Observation]],
    told: Mapping[str, Sequence[LayerFact]],
) -> str:
    """The precision that ran, as a fact; the row is INVALID where that is not what was asked for.

    What the probe has `seen` decides where the engine runs torch's operators. Where it does not,
    the layers decide that each of the row's runners has `told`, under the name it goes by in a
    reason: an engine may leave some in a wider precision than asked for, which `precision_ran` then
    says, but none in a narrower one. Of engines that tell nothing (TensorRT before 8.2) it says
    that.
    """
    if seen is not None:
        require_precision(ctx, asked, seen, tf32_by_arithmetic(ctx.device))
        return asked
    found = {who: precision_of_layers(layers) for who, layers in told.items()}
    for who, ran in found.items():
        if ran:
            _hold_against(ctx, asked, who, ran.split("+"))
    together = "+".join(sorted({name for ran in found.values() if ran for name in ran.split("+")}))
    ctx.fact("precision_ran", together or "not told by the engine")
    return together or asked


def precision_of_layers(layers: Sequence[LayerFact]) -> str:
    """In what layers that multiply ran, `fp16+int8` where they differ; empty where none tells."""
    telling = [each for each in layers if each.precision]
    multiplying = [each for each in telling if _MULTIPLIES.search(each.operator)]
    return "+".join(sorted({each.precision for each in multiplying or telling}))


def _hold_against(ctx: RowContext, asked: str, who: str, ran: Sequence[str]) -> None:
    if asked not in ran:
        ctx.invalid(f"asked for precision {asked}; by its own account {who} ran {'+'.join(ran)}")
    narrower = [name for name in ran if _width(name) < _width(asked)]
    if narrower:
        ctx.invalid(f"asked for precision {asked}; {who} ran layers in {'+'.join(narrower)}")


def _width(name: str) -> int:
    return _WIDTHS.index(name) if name in _WIDTHS else len(_WIDTHS)
