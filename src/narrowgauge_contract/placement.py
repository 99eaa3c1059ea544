"""Placement plans: where each pass of each layer runs, at which precision, by which backend, and
how tensors travel there.

A plan is written as TOML, checked here once, and embedded in the Job as a document. Whether this
machine can do what a plan says is the lab's business.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import re
from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence, Tuple

from narrowgauge_contract.errors import ExperimentFileError, PlanFileError, nearest
from narrowgauge_contract.placement_builtins import BUILTIN
from narrowgauge_contract.toml_checks import only, table_of, text_of

__all__ = [
    "BACKENDS",
    "BUILTIN",
    "DEVICES",
    "DLA_PRECISION",
    "ELSEWHERE",
    "ELSEWHERE_BY",
    "NO_PLAN",
    "PASSES",
    "POLICIES",
    "PRECISIONS",
    "TENSORRT_PRECISIONS",
    "TENSORS",
    "WEIGHTS",
    "WIRES",
    "LayerPlacement",
    "PassPlacement",
    "PlacementPlan",
    "Transfers",
    "document_hash",
    "is_reference",
    "parse_plan",
    "plan_document",
    "plan_value",
]

#: The three products of a convolution or linear layer.
PASSES = ("forward", "input_grad", "weight_grad")
#: `accelerator` is the row's device, whatever that is; `dla` is NVIDIA's, beside a Tegra's GPU.
DEVICES = ("cpu", "accelerator", "dla")
ELSEWHERE = ("cpu", "accelerator")
#: Whose operators run there: torch's, or the kernels' where they have one.
ELSEWHERE_BY = ("torch", "kernels")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "int8", "fp8")
BACKENDS = ("torch", "tensorrt", "faithful")
POLICIES = ("pageable", "pinned", "overlapped", "mapped", "managed")
#: When weights are sent: when they changed, or at every call.
WEIGHTS = ("dirty", "each-call")
WIRES = ("fp32", "fp16", "bf16", "int8")
#: What travels compressed, if anything does. Weights and their gradients always travel in fp32.
TENSORS = ("input", "output", "grad_output", "grad_input")
#: The value of a parameter of type `plan` that asks for none.
NO_PLAN = "none"

#: What the original's engines could take.
_FAITHFUL = ("fp32", "fp16")
#: What the passes of a layer can be in by TensorRT. Numbers of 8 bits would need scales of the
#: gradients, which change with every step, in its engines.
TENSORRT_PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
#: Of these, what NVIDIA's DLA computes in.
DLA_PRECISION = "fp16"
#: A plan's name becomes a value on a command line, where ',' lists and '@' sets off a hash.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_REFERENCE = re.compile(_NAME.pattern + "@[0-9a-f]{8}")


@dataclasses.dataclass(frozen=True)
class PassPlacement:
    """Where one product runs (`DEVICES`), in what (`PRECISIONS`), by what (`BACKENDS`)."""

    device: str
    precision: str
    backend: str = "torch"


@dataclasses.dataclass(frozen=True)
class LayerPlacement:
    """The placements of a layer's three products."""

    forward: PassPlacement
    input_grad: PassPlacement
    weight_grad: PassPlacement

    def of(self, pass_name: str) -> PassPlacement:
        """By its name in `PASSES`. Raises KeyError."""
        placed = {
            "forward": self.forward,
            "input_grad": self.input_grad,
            "weight_grad": self.weight_grad,
        }
        return placed[pass_name]


@dataclasses.dataclass(frozen=True)
class Transfers:
    """How tensors travel between `elsewhere` and where the passes run.

    `resident`: inputs stay on the accelerator from forward to backward; `pieces`: of the batch, so
    that copies overlap with products (0: the layer chooses); `wire`: `TENSORS` -> `WIRES`, complete
    whatever it is made from, fp32 where nothing is said.
    """

    policy: str = "overlapped"
    resident: bool = True
    weights: str = "dirty"
    pieces: int = 0
    wire: Dict[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        unknown = [name for name in self.wire if name not in TENSORS]
        if unknown:
            raise ValueError(f"{', '.join(unknown)} do not travel; {', '.join(TENSORS)} do")
        complete = {name: self.wire.get(name, "fp32") for name in TENSORS}
        object.__setattr__(self, "wire", complete)


@dataclasses.dataclass(frozen=True)
class PlacementPlan:
    """A whole plan. `layers` holds fnmatch patterns of module names, each with all it places.

    `elsewhere`: where all but the layers' products lives; `convolutions_only`: linear layers stay
    there whole, as the original's did; `stride_bug`: the backend `faithful` also repeats the
    original's wrong weight gradient at stride 2; `elsewhere_by`: whose operators run there, the
    kernels' on a CPU only.
    """

    name: str
    elsewhere: str
    layers: Tuple[Tuple[str, LayerPlacement], ...]
    default: LayerPlacement
    transfers: Transfers
    convolutions_only: bool = False
    stride_bug: bool = False
    elsewhere_by: str = "torch"

    def placement(self, layer: str) -> LayerPlacement:
        """Of the module with that name: the last pattern that matches wins."""
        for pattern, placement in reversed(self.layers):
            if fnmatch.fnmatchcase(layer, pattern):
                return placement
        return self.default

    def passes(self) -> Iterator[PassPlacement]:
        """Every pass's placement that the plan states, whether or not a layer has it."""
        for placement in (self.default, *(each for _, each in self.layers)):
            yield from (placement.of(name) for name in PASSES)

    def precisions(self) -> Tuple[str, ...]:
        """What the plan computes in, each once, in the order of `PRECISIONS`."""
        used = {each.precision for each in self.passes()}
        return tuple(name for name in PRECISIONS if name in used)


def parse_plan(document: Mapping[str, Any], where: str) -> PlacementPlan:
    """Check a plan's document, parsed from TOML or made by `plan_document`.

    Raises PlanFileError: unknown keys and words name the nearest known one.
    """
    try:
        return _parse(document, where)
    except ExperimentFileError as error:
        raise PlanFileError(error.what, why=error.why, next_step=error.next_step) from error


def plan_document(plan: PlacementPlan) -> Dict[str, Any]:
    """The plan as tables, lists, texts, numbers and truth values; `parse_plan` gives it back.

    `layers` is a list here, since their order counts and JSON with sorted keys would lose it.
    `elsewhere_by` is left out where it is torch: plans had none once, and keep their hashes.
    """
    by = {} if plan.elsewhere_by == "torch" else {"elsewhere_by": plan.elsewhere_by}
    return {
        "plan": {
            "name": plan.name,
            "elsewhere": plan.elsewhere,
            "convolutions_only": plan.convolutions_only,
            "stride_bug": plan.stride_bug,
            **by,
        },
        "passes": dataclasses.asdict(plan.default),
        "transfer": dataclasses.asdict(plan.transfers),
        "layers": [
            {"pattern": pattern, **dataclasses.asdict(placement)}
            for pattern, placement in plan.layers
        ],
    }


def document_hash(document: Any) -> str:
    """The sha256 of what a document says, in whatever order its keys stand."""
    text = json.dumps(document, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def plan_value(plan: PlacementPlan) -> str:
    """What a row's parameter says of a plan from a file: `name@3fa9c1d2`, its name and its hash.

    Comments, spaces and defaults spelt out do not change it; anything that acts differently does.
    """
    return f"{plan.name}@{document_hash(plan_document(plan))[:8]}"


def is_reference(value: str) -> bool:
    """Whether a value is one that `plan_value` gave."""
    return _REFERENCE.fullmatch(value) is not None


def _parse(document: Mapping[str, Any], where: str) -> PlacementPlan:
    only(document, ("plan", "passes", "transfer", "layers"), where)
    place = f"{where} [plan]"
    head = table_of(document, "plan", where, required=True)
    only(head, ("name", "elsewhere", "elsewhere_by", "convolutions_only", "stride_bug"), place)
    name = text_of(head, "name", place)
    if not _NAME.fullmatch(name) or name == NO_PLAN:
        raise PlanFileError(
            f"{place}: '{name}' cannot be a plan's name",
            next_step=f"letters, digits, '.', '_' and '-', but not '{NO_PLAN}'",
        )
    elsewhere = _word(head, "elsewhere", ELSEWHERE, place)
    elsewhere_by = _word(head, "elsewhere_by", ELSEWHERE_BY, place, "torch")
    if elsewhere_by == "kernels" and elsewhere != "cpu":
        raise PlanFileError(
            f'{place}: elsewhere_by = "kernels" goes with elsewhere = "cpu" only',
            why="the kernels have such operators for a CPU",
            next_step="leave it out",
        )
    passes = table_of(document, "passes", where, required=True)
    default = _layer(passes, None, f"{where} [passes", ())
    layers = tuple(
        (pattern, _layer(body, default, f'{where} [layers."{pattern}"', extra))
        for pattern, body, extra in _patterns(document.get("layers", {}), where)
    )
    transfers = _transfers(table_of(document, "transfer", where), f"{where} [transfer")
    convolutions_only = _flag(head, "convolutions_only", False, place)
    stride_bug = _flag(head, "stride_bug", False, place)
    plan = PlacementPlan(
        name, elsewhere, layers, default, transfers, convolutions_only, stride_bug, elsewhere_by
    )
    _require_faithful(plan, place)
    return plan


def _patterns(layers: Any, where: str) -> Iterator[Tuple[str, Mapping[str, Any], Tuple[str, ...]]]:
    """(pattern, its table, keys of it that place nothing) of both forms that `layers` may have."""
    listed: List[Tuple[Any, Any, Tuple[str, ...]]]
    if isinstance(layers, dict):
        listed = [(pattern, body, ()) for pattern, body in layers.items()]
    elif isinstance(layers, list) and all(isinstance(body, dict) for body in layers):
        listed = [(body.get("pattern"), body, ("pattern",)) for body in layers]
    else:
        raise PlanFileError(f"{where}: [layers] should be a table of patterns")
    seen = set()
    for pattern, body, extra in listed:
        if not isinstance(pattern, str) or not pattern.strip():
            raise PlanFileError(
                f"{where} [layers] has an empty pattern",
                next_step='a pattern is of module names, as in [layers."blocks.0.*"]',
            )
        if pattern in seen:
            raise PlanFileError(f"{where} [layers] has the pattern '{pattern}' twice")
        seen.add(pattern)
        if not isinstance(body, dict):
            raise PlanFileError(f'{where}: [layers."{pattern}"] should be a table')
        yield pattern, body, extra


def _layer(
    body: Mapping[str, Any], default: Optional[LayerPlacement], where: str, extra: Sequence[str]
) -> LayerPlacement:
    """What a table places: its own words for all passes, and those of a pass's table over them."""
    words = ("device", "precision", "backend")
    only(body, (*words, *PASSES, *extra), f"{where}]")
    shared = {key: body[key] for key in words if key in body}
    placements = {}
    for name in PASSES:
        place = f"{where}.{name}]" if name in body else f"{where}]"
        own = table_of(body, name, f"{where}]")
        only(own, words, place)
        before = dataclasses.asdict(default.of(name)) if default else {"backend": "torch"}
        placements[name] = _pass({**before, **shared, **own}, place)
    return LayerPlacement(
        placements["forward"], placements["input_grad"], placements["weight_grad"]
    )


def _pass(said: Mapping[str, Any], where: str) -> PassPlacement:
    placed = PassPlacement(
        _word(said, "device", DEVICES, where),
        _word(said, "precision", PRECISIONS, where),
        _word(said, "backend", BACKENDS, where),
    )
    device, precision, backend = placed.device, placed.precision, placed.backend
    if device == "dla" and backend != "tensorrt":
        raise PlanFileError(
            f"{where}: device 'dla' goes with backend 'tensorrt' only, not '{backend}'"
        )
    if device == "dla" and precision != DLA_PRECISION:
        raise PlanFileError(f"{where}: a DLA runs passes in {DLA_PRECISION}, not in {precision}")
    if device == "cpu" and backend != "torch":
        raise PlanFileError(
            f"{where}: backend '{backend}' does not go with device 'cpu'",
            next_step='on the CPU: backend = "torch"',
        )
    if backend == "tensorrt" and precision not in TENSORRT_PRECISIONS:
        raise PlanFileError(
            f"{where}: backend 'tensorrt' does not compute in {precision}",
            why="gradients have no calibrated scales, which its engines would need",
            next_step='backend = "torch" has it',
        )
    if backend == "faithful" and precision not in _FAITHFUL:
        raise PlanFileError(
            f"{where}: backend 'faithful' does not compute in {precision}",
            why=f"the original did in {' and '.join(_FAITHFUL)}",
            next_step='backend = "torch", or one of these precisions',
        )
    return placed


def _transfers(body: Mapping[str, Any], where: str) -> Transfers:
    only(body, ("policy", "resident", "weights", "pieces", "wire"), f"{where}]")
    plain = Transfers()
    pieces = body.get("pieces", plain.pieces)
    if not isinstance(pieces, int) or isinstance(pieces, bool) or pieces < 0:
        raise PlanFileError(
            f"{where}]: pieces should be a whole number from 0, not {pieces!r}",
            next_step="0: the layer chooses",
        )
    wire = table_of(body, "wire", f"{where}]")
    only(wire, TENSORS, f"{where}.wire]")
    return Transfers(
        policy=_word(body, "policy", POLICIES, f"{where}]", plain.policy),
        resident=_flag(body, "resident", plain.resident, f"{where}]"),
        weights=_word(body, "weights", WEIGHTS, f"{where}]", plain.weights),
        pieces=pieces,
        wire={name: _word(wire, name, WIRES, f"{where}.wire]") for name in wire},
    )


def _require_faithful(plan: PlacementPlan, where: str) -> None:
    if not plan.stride_bug or any(each.backend == "faithful" for each in plan.passes()):
        return
    raise PlanFileError(
        f"{where}: stride_bug is of the backend 'faithful', which no pass here has",
        next_step="leave it out: every other backend's gradients are right at stride 2",
    )


def _word(
    body: Mapping[str, Any], key: str, known: Sequence[str], where: str, default: str = ""
) -> str:
    value = body.get(key, default)
    if value in known:
        return str(value)
    listed = f"Known: {', '.join(known)}"
    if key not in body:
        raise PlanFileError(f"{where} lacks the text '{key}'", next_step=listed)
    close = nearest(value, known) if isinstance(value, str) else None
    raise PlanFileError(
        f"{where}: {key} is not {value!r}",
        next_step=(f"did you mean '{close}'? " if close else "") + listed,
    )


def _flag(body: Mapping[str, Any], key: str, default: bool, where: str) -> bool:
    value = body.get(key, default)
    if not isinstance(value, bool):
        raise PlanFileError(f"{where}: {key} should be true or false, not {value!r}")
    return value
