"""Other tools that choose scales, for comparison only: nothing of ours is computed by them."""

from __future__ import annotations

import abc
import contextlib
import dataclasses
from typing import Any, Callable, Dict, Iterator, Mapping, Sequence, Tuple, Union

import torch
from torch import nn

from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.quant.calibration import Batch, QuantConfig
from narrowgauge_lab.quant.layers import LayerScales

__all__ = ["INPUT", "WEIGHT", "Choice", "Peer", "Place", "first_of", "seeing_inputs"]

INPUT, WEIGHT = "input", "weight"
#: A layer's name, and INPUT or WEIGHT.
Place = Tuple[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """How one tensor is rounded by one tool.

    `amax`: the magnitude that becomes the largest integer; `scale`: the step from one integer to
    the next. Both are float32 and of no dimension, or of one entry per channel. `codes`: int32, the
    integers of the sample that all tools round. `method`: in the tool's own words.
    """

    amax: torch.Tensor
    scale: torch.Tensor
    codes: torch.Tensor
    method: str


class Peer(abc.ABC):
    """A tool. An instance is made without importing it."""

    name: str

    @abc.abstractmethod
    def missing(self) -> str:
        """Why this host cannot have it, or nothing."""

    @abc.abstractmethod
    def version(self) -> str:
        """As the tool says; asked where it is not missing."""

    @abc.abstractmethod
    def choose(
        self,
        model: nn.Module,
        batches: Sequence[Batch],
        config: QuantConfig,
        scales: Mapping[str, LayerScales],
        samples: Mapping[Place, torch.Tensor],
    ) -> Dict[Place, Union[Choice, str]]:
        """What it chooses for every place of `samples`, or why it has no choice there.

        `scales` are ours, for the axes that channels are along. Asked where it is not missing.
        """


def first_of(batch: Batch) -> torch.Tensor:
    """A model's input, of a batch that may have labels too."""
    found: torch.Tensor = batch if isinstance(batch, torch.Tensor) else batch[0]
    return found


@contextlib.contextmanager
def seeing_inputs(
    model: nn.Module, see: Mapping[str, Callable[[torch.Tensor], None]]
) -> Iterator[None]:
    """Inside, the model is in eval mode without gradients, and `see` gets the inputs of its layers
    of these names."""

    def hook(act: Callable[[torch.Tensor], None]) -> Callable[[nn.Module, Tuple[Any, ...]], None]:
        def act_on_first(_module: nn.Module, inputs: Tuple[Any, ...]) -> None:
            act(inputs[0].detach())

        return act_on_first

    layers = dict(model.named_modules())
    handles = [layers[name].register_forward_pre_hook(hook(act)) for name, act in see.items()]
    try:
        with in_eval_mode(model), torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()
