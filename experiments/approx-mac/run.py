"""One row of `approx-mac`: a policy's kernel on some layers, checked, then timed beside others."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Mapping, Optional

import torch

from narrowgauge_contract.errors import BadValueError, NotApplicableError, SkippedError
from narrowgauge_lab import precision
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.layers.manual.settings import Settings, settings_of
from narrowgauge_lab.measure.algorithms import best_algorithms
from narrowgauge_lab.measure.state import steadily
from narrowgauge_lab.networks.layer_shapes import LayerShape, product, shapes_named

from .correctness import check
from .operands import Drawn
from .peers import peers_of
from .subject import Subject, subject_of
from .times import Times, measure_layer, record_layer, record_together

#: The value of `shapes` that is a matrix product, of so many rows and columns as `side` says.
_PRODUCT = "product"
#: The value of `policy` that leaves it to the parameter of that name.
_OTHER = "other"


@dataclasses.dataclass
class _Told:
    """What the record says of the layers beside figures, as it becomes known."""

    layers: List[Dict[str, Any]] = dataclasses.field(default_factory=list)
    choices: Dict[str, Dict[str, Any]] = dataclasses.field(default_factory=dict)

    def record(self, ctx: RowContext) -> None:
        ctx.fact("layers", self.layers)
        ctx.fact("path", ", ".join(self.choices))
        ctx.fact("choices", list(self.choices.values()))


def run(ctx: RowContext) -> None:
    """Check and measure as `ctx.parameters` say. A policy without the kernel that is asked for, or
    without any here, is skipped; a wrong result makes the row INVALID. Raises BadValueError for a
    policy that is not said, and what parsing one raises."""
    parameters = ctx.parameters
    if parameters["threads"]:
        # First of all: torch 1.8 crashes where a convolution ran with another number before.
        torch.set_num_threads(parameters["threads"])
    settings = settings_of(_policy(parameters), path=parameters["kernel"])
    shapes = _shapes(parameters["shapes"], parameters["side"])
    precision.enter("fp32", ctx.device)
    ctx.fact("policy", str(settings.policy))
    told, measured = _Told(), {}
    different = list(dict.fromkeys(shapes))
    with torch.no_grad(), best_algorithms(ctx.device):
        for number, shape in enumerate(different):
            times = _layer(ctx, settings, shape, told)
            if times is not None:
                measured[shape] = times
            ctx.progress(number + 1, len(different), "layers")
    told.record(ctx)
    record_together(ctx, [measured[shape] for shape in shapes if shape in measured])


def _policy(parameters: Mapping[str, Any]) -> str:
    name, other = parameters["policy"], parameters["other"]
    if (name == _OTHER) != bool(other):
        raise BadValueError(
            f"policy={name} and other='{other}' do not go together",
            next_step="for example: -p policy=other -p 'other=truncated(5)'",
        )
    return str(other or name)


def _layer(ctx: RowContext, settings: Settings, shape: LayerShape, told: _Told) -> Optional[Times]:
    """The times of a layer, recorded; None where something computed it wrongly."""
    subject = _subject(ctx, settings, shape)
    peers, missing = peers_of(subject, ctx.parameters["peers"])
    right, error = check(ctx, subject, peers)
    operands, choice = subject.operands, subject.choice
    about = {
        "name": shape.name,
        "macs": operands.macs,
        "looked_at": operands.sample.text(operands.results, len(operands.weight)),
        "error": error,
        "path": choice.path,
        "peers_missing": missing,
    }
    told.layers.append(about)
    told.choices.setdefault(choice.path, choice.to_fact())
    if not right:
        return None
    times: Times = steadily(
        ctx, lambda: measure_layer(ctx, subject, peers), ctx.device, prefix=f"{shape.name}_"
    )
    if times.winograd is not None:
        about["torch_by_winograd"] = times.winograd
    record_layer(ctx, times)
    return times


def _subject(ctx: RowContext, settings: Settings, shape: LayerShape) -> Subject:
    """Raises SkippedError where the device or the policy has no such kernel."""
    relu = ctx.parameters["activations"] == "relu"
    channels_last = ctx.parameters["layout"] == "channels_last"
    try:
        return subject_of(
            settings, shape, ctx.parameters["batch"],
            Drawn(ctx.device, ctx.seed, relu, channels_last),
        )  # fmt: skip
    except NotApplicableError as error:
        raise SkippedError(error.what, why=error.why, next_step=error.next_step) from error


def _shapes(name: str, side: int) -> List[LayerShape]:
    return [product(side, side, side)] if name == _PRODUCT else shapes_named(name)
