"""channels_last: a model in that memory format, and whether its layers keep it."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, List, Tuple

import torch
from torch import nn

from narrowgauge_lab.torch_compat import inference_mode

__all__ = ["LayoutReport", "check_channels_last", "to_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


@dataclasses.dataclass(frozen=True)
class LayoutReport:
    """`kept`: layers whose inputs and outputs are channels_last. `fell_back`: those that were given
    channels_last and gave something else. `given_otherwise`: those that were not given it.

    Only calls with a tensor of 4 or 5 dimensions count; a shape that is the same in both formats
    (one channel, or one pixel) counts as channels_last.
    """

    kept: Tuple[str, ...]
    fell_back: Tuple[str, ...]
    given_otherwise: Tuple[str, ...]

    @property
    def holds(self) -> bool:
        """Whether some layer ran in channels_last and none out of it."""
        return bool(self.kept) and not self.fell_back and not self.given_otherwise


def to_channels_last(model: nn.Module) -> nn.Module:
    """A copy of `model` whose weights of 4 dimensions are channels_last, of 5 channels_last_3d.

    Give it inputs in that format; `check_channels_last` says whether it stays.
    """
    new = copy.deepcopy(model)
    for tensor in [*new.parameters(), *new.buffers()]:
        if tensor.dim() in _FORMATS:
            tensor.data = tensor.data.contiguous(memory_format=_FORMATS[tensor.dim()])
    return new


def check_channels_last(model: nn.Module, example: torch.Tensor) -> LayoutReport:
    """Run `example`, put into channels_last, through `model` as it is and see what each layer (a
    module without children) makes of it."""
    kept: List[str] = []
    fell_back: List[str] = []
    otherwise: List[str] = []

    def watch(name: str) -> Any:
        def note(_module: nn.Module, inputs: Any, output: Any) -> None:
            before = [each for each in inputs if _has_format(each)]
            after = [each for each in _tensors(output) if _has_format(each)]
            if not all(map(_is_channels_last, before)):
                otherwise.append(name)
            elif not all(map(_is_channels_last, after)):
                fell_back.append(name)
            elif before or after:
                kept.append(name)

        return note

    leaves = [(n, m) for n, m in model.named_modules() if next(m.children(), None) is None]
    handles = [module.register_forward_hook(watch(name)) for name, module in leaves]
    try:
        with inference_mode():
            model(example.contiguous(memory_format=_FORMATS[example.dim()]))
    finally:
        for handle in handles:
            handle.remove()
    return LayoutReport(*(tuple(dict.fromkeys(names)) for names in (kept, fell_back, otherwise)))


def _tensors(output: Any) -> List[Any]:
    return list(output) if isinstance(output, (tuple, list)) else [output]


def _has_format(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() in _FORMATS


def _is_channels_last(tensor: torch.Tensor) -> bool:
    return tensor.is_contiguous(memory_format=_FORMATS[tensor.dim()])
