"""`costs.json`: what the parts of a network's training step cost on one machine, raw.

The experiment `hetero-plan` writes it beside its record, and the host's planner reads it. Samples
are seconds per call, in order, to five digits; every statistic is the reader's.

| part        | one entry per                                                                      |
|-------------|------------------------------------------------------------------------------------|
| layers      | placed layer, in the order of the forward pass; which of `shapes` it has           |
| shapes      | distinct layer: what it computes, of which sizes                                   |
| products    | shape, pass, device, precision and form in which the operands lie there            |
| native      | shape, device, precision and direction: torch's own layer, with autograd           |
| placed      | shape, pass, precision and wire: a whole pass over the bus, policy `overlapped`    |
| copies      | policy, direction and size: one copy, page-locked unless the policy is `pageable`  |
| conversions | side, direction and wire: what is done to a tensor before and after it travels     |
| segments    | device, direction and layer: all that runs between that layer and the next one     |
| fixed       | name and device: what is paid per call, whatever the sizes; see `FIXED`            |
| steps       | built-in plan: whole training steps, against which predictions are held; where all |
|             | else is on the CPU, by the operators of `elsewhere_by`                             |

`seconds` are the device's own time where its launches could be hidden (`launches_hidden`), else
the longer of that and the host's; `host_seconds` what the host spent to queue it. On a CPU both are
the same. Devices are `cpu` and `accelerator`.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any, Optional, Tuple

from narrowgauge_contract.codec import LATER, decode
from narrowgauge_contract.errors import DamagedRecordError

__all__ = [
    "COSTS_FILE",
    "FIXED",
    "FORMAT",
    "NATIVE",
    "WIRE_OF",
    "ConversionCost",
    "CopyCost",
    "Costs",
    "FixedCost",
    "NativeCost",
    "PlacedCost",
    "PlacedLayer",
    "ProductCost",
    "SegmentCost",
    "Shape",
    "StepCost",
    "parse_costs",
]

COSTS_FILE = "costs.json"
#: 1: as here.
FORMAT = 1
#: Fixed costs by name. `engine`: a backward pass of nothing. `local.*`: a tiny placed layer whose
#: products run where everything lives, and `tiny.*` the same products alone. `late.N`: the backward
#: pass of N tiny layers over the bus with late weight gradients, `kept.N` of the same without any.
FIXED = (
    "engine", "local.forward", "local.backward", "tiny.forward", "tiny.backward",
    "late.1", "late.5", "kept.1", "kept.5",
)  # fmt: skip

#: What tensors travel as where a plan computes in a precision.
WIRE_OF = {
    "fp32": "fp32", "tf32": "fp32", "bf16": "bf16", "fp16": "fp16", "int8": "int8", "fp8": "int8",
}  # fmt: skip
#: The precisions in which a layer may stay torch's own.
NATIVE = ("fp32", "tf32")

Seconds = Tuple[float, ...]


@dataclasses.dataclass(frozen=True)
class Shape:
    """`kind` conv2d or linear; `input` and `output` with their batch, `weight` as torch has it."""

    kind: str
    input: Tuple[int, ...]
    weight: Tuple[int, ...]
    output: Tuple[int, ...]
    stride: Tuple[int, ...]
    padding: Tuple[int, ...]
    dilation: Tuple[int, ...]
    groups: int
    bias: bool

    def text(self) -> str:
        """As a table has it: 16x32x32 -> 32x16x16."""
        sizes = ("x".join(map(str, each[1:])) for each in (self.input, self.output))
        return " -> ".join(sizes)


@dataclasses.dataclass(frozen=True)
class PlacedLayer:
    """`input_grad`: whether anything wants the gradient by its input; that of images is not."""

    name: str
    shape: int
    input_grad: bool


@dataclasses.dataclass(frozen=True)
class ProductCost:
    """`form`: one of `placement.WIRES`, what operands arrived as; fp32 where nothing travels."""

    shape: int
    pass_: str
    device: str
    precision: str
    form: str
    seconds: Seconds
    host_seconds: Seconds


@dataclasses.dataclass(frozen=True)
class NativeCost:
    """`direction` forward, or backward with both gradients, or of the weight alone where
    `input_grad` is false. The cost `engine` is in every backward one."""

    shape: int
    device: str
    precision: str
    direction: str
    input_grad: bool
    seconds: Seconds
    host_seconds: Seconds


@dataclasses.dataclass(frozen=True)
class PlacedCost:
    """By the host's clock, everything awaited. `pass_` forward or input_grad; the cost `engine` is
    in the latter."""

    shape: int
    pass_: str
    precision: str
    wire: str
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class CopyCost:
    """`direction` up or down; `host_seconds` until it is queued."""

    policy: str
    direction: str
    bytes: int
    seconds: Seconds
    host_seconds: Seconds


@dataclasses.dataclass(frozen=True)
class ConversionCost:
    """`direction` pack (what the sender does) or unpack (the receiver); `side` its device."""

    side: str
    direction: str
    wire: str
    elements: int
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class SegmentCost:
    """`direction` forward, backward or optimiser; `after` the layer whose output it begins with,
    `input` for what comes before all layers, and in backward also flattens the gradients."""

    device: str
    direction: str
    after: str
    seconds: Seconds
    host_seconds: Seconds


@dataclasses.dataclass(frozen=True)
class FixedCost:
    name: str
    device: str
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class StepCost:
    """A training step of a built-in plan."""

    plan: str
    seconds: Seconds


@dataclasses.dataclass(frozen=True)
class Costs:
    """`accelerator`: its name; `stand_in`: it is the CPU, and no speed is a claim; `shared_memory`:
    host and accelerator have one memory. `parameters`: floats of the flat tensor of all weights,
    which is sent as a whole. `page_locked`: which CPU tensors are; `accelerator_bytes`: what a step
    takes there at most where everything lives there, as torch counted it; None where nobody did.
    Batches travel in pieces of at least `piece_bytes`, at most `most_pieces` of them.
    `elsewhere_by`: whose operators the segments on the CPU are of (`placement.ELSEWHERE_BY`).
    """

    format: int
    network: str
    batch: int
    accelerator: str
    stand_in: bool
    shared_memory: bool
    launches_hidden: bool
    page_locked: str
    piece_bytes: int
    most_pieces: int
    parameters: int
    accelerator_bytes: Optional[int]
    layers: Tuple[PlacedLayer, ...]
    shapes: Tuple[Shape, ...]
    products: Tuple[ProductCost, ...]
    native: Tuple[NativeCost, ...]
    placed: Tuple[PlacedCost, ...]
    copies: Tuple[CopyCost, ...]
    conversions: Tuple[ConversionCost, ...]
    segments: Tuple[SegmentCost, ...]
    fixed: Tuple[FixedCost, ...]
    steps: Tuple[StepCost, ...]
    elsewhere_by: str = dataclasses.field(default="torch", metadata=LATER)


def parse_costs(text: str, where: str) -> Costs:
    """Read a file's text. Raises DamagedRecordError for anything that is not as it should be."""
    try:
        document: Any = json.loads(text)
    except ValueError as error:
        raise DamagedRecordError(f"{where} is not JSON", why=str(error)) from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise DamagedRecordError(
            f"{where} has format {found!r}, and this version reads {FORMAT}",
            next_step="measure again: narrowgauge run hetero-plan",
        )
    costs = decode(Costs, document, where)
    _require_consistent(costs, where)
    return costs


def _require_consistent(costs: Costs, where: str) -> None:
    known = range(len(costs.shapes))
    timed: Tuple[Any, ...] = (*costs.products, *costs.native, *costs.placed)
    if any(each.shape not in known for each in (*costs.layers, *timed)):
        raise DamagedRecordError(f"{where} has costs of a shape that it does not describe")
    if len({layer.name for layer in costs.layers}) != len(costs.layers) or not costs.layers:
        raise DamagedRecordError(f"{where} has no layers, or two of one name")
    samples: Tuple[Any, ...] = (
        *timed, *costs.copies, *costs.conversions, *costs.segments, *costs.fixed, *costs.steps
    )  # fmt: skip
    if not all(each.seconds and all(0 <= s < 1e9 for s in each.seconds) for each in samples):
        raise DamagedRecordError(f"{where} has a cost without samples, or one that is no time")
