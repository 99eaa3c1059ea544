"""What a network is made of once everything that can ride in a kernel does. Names are values.

Every step but TorchStep is one kernel of ours, or of cuDNN where that is faster.
"""

from __future__ import annotations

import dataclasses
from typing import Optional, Tuple, Union

from torch import fx

__all__ = [
    "ACTIVATIONS",
    "AffineStep",
    "ConcatStep",
    "ConvStep",
    "LinearStep",
    "Plan",
    "PoolStep",
    "Prologue",
    "Step",
    "TorchStep",
    "sources",
]

#: What follows a sum, and the bounds that it keeps it between.
ACTIVATIONS = {
    "none": (float("-inf"), float("inf")),
    "relu": (0.0, float("inf")),
    "relu6": (0.0, 6.0),
}


@dataclasses.dataclass(frozen=True)
class Prologue:
    """act(x · s + b) per input channel, computed where x is read: a batch normalisation (`module`)
    and the activation after it. `value` is its result, which is never stored."""

    module: str
    activation: str
    value: str


@dataclasses.dataclass(frozen=True)
class ConvStep:
    """output = act(conv(prologue?(source)) + bias + residual?); `module`: the convolution."""

    module: str
    source: str
    output: str
    residual: Optional[str] = None
    activation: str = "none"
    prologue: Optional[Prologue] = None
    depthwise: bool = False


@dataclasses.dataclass(frozen=True)
class LinearStep:
    """output = act(linear(source) + bias); the source may be flattened from pixels."""

    module: str
    source: str
    output: str
    activation: str = "none"


@dataclasses.dataclass(frozen=True)
class PoolStep:
    """`kind` max or mean over square windows; a mean counts the border in. window 0: all pixels."""

    kind: str
    source: str
    output: str
    window: int
    stride: int
    padding: int
    prologue: Optional[Prologue] = None


@dataclasses.dataclass(frozen=True)
class AffineStep:
    """output = act(source · s + b), a batch normalisation (`module`) that nothing could take in, or
    an activation alone (`module` is "")."""

    module: str
    source: str
    output: str
    activation: str


@dataclasses.dataclass(frozen=True)
class ConcatStep:
    """The channels of all sources one after the other. Where each source can be written to its
    place, nothing is left to do."""

    sources: Tuple[str, ...]
    output: str


@dataclasses.dataclass(frozen=True)
class TorchStep:
    """`node` is run by torch as it is, on NCHW views of the sources."""

    sources: Tuple[str, ...]
    output: str
    node: fx.Node = dataclasses.field(compare=False)
    operator: str


Step = Union[ConvStep, LinearStep, PoolStep, AffineStep, ConcatStep, TorchStep]


@dataclasses.dataclass(frozen=True)
class Plan:
    """Steps in an order in which they can run. `source`: the network's input; `output`: its result,
    which has the shape of the value `shaped` (it may be flattened)."""

    source: str
    output: str
    shaped: str
    steps: Tuple[Step, ...]

    def quantised(self) -> Tuple[str, ...]:
        """Values whose ranges calibration has to find: the input and all that is made anew."""
        made = [self.source]
        for step in self.steps:
            prologue = getattr(step, "prologue", None)
            if prologue is not None:
                made.append(prologue.value)
            keeps_scale = isinstance(step, PoolStep) and step.kind == "max" and prologue is None
            if not keeps_scale and not isinstance(step, ConcatStep):
                made.append(step.output)
        return tuple(made)

    def is_result(self, step: Step) -> bool:
        """Whether `step` is a linear layer that makes the result, and only that: it is written as
        float32, whatever the format."""
        read = any(step.output in sources(other) for other in self.steps)
        return isinstance(step, LinearStep) and step.output == self.output and not read


def sources(step: Step) -> Tuple[str, ...]:
    """All values that a step reads."""
    if isinstance(step, (ConcatStep, TorchStep)):
        return step.sources
    residual = getattr(step, "residual", None)
    return (step.source,) if residual is None else (step.source, residual)
