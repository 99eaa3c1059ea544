"""Layers that run integers, and the networks that have them, are never trained.

Their weights are packed: there is nothing that a gradient could reach, `parameters()` says so by
being short or empty, and an optimiser over what is left would train half a network or none.
"""

from __future__ import annotations

from typing import Any, List, Optional

from torch import nn

from narrowgauge_contract.errors import UsageError

__all__ = ["Converted", "ConvertedModelError", "converted_layers", "require_trainable"]

#: Where torch has the classes of its own converted layers, by version.
_TORCHS = (
    "torch.nn.quantized", "torch.ao.nn.quantized", "torch.nn.intrinsic.quantized",
    "torch.ao.nn.intrinsic.quantized",
)  # fmt: skip
#: So many layers are named.
_NAMED = 3


class ConvertedModelError(UsageError):
    """A network whose layers run integers was to be trained."""


class Converted(nn.Module):
    """A layer whose weights are packed integers. Raises ConvertedModelError where it is put into
    training mode, as every training does first."""

    def train(self, mode: bool = True) -> Any:
        if mode:
            raise _error([type(self).__name__])
        return super().train(mode)


def converted_layers(model: nn.Module) -> List[str]:
    """The names of the layers that run integers, ours and those of torch's own tools."""
    found: List[str] = []
    for name, module in model.named_modules():
        # torch's hold their packed weights in modules of the same packages.
        inner = any(name.startswith(f"{outer}.") for outer in found)
        if not inner and (
            isinstance(module, Converted) or type(module).__module__.startswith(_TORCHS)
        ):
            found.append(name or type(module).__name__)
    return found


def require_trainable(model: nn.Module, what: Optional[str] = None) -> None:
    """Raise ConvertedModelError where a layer of `model` runs integers, UsageError where no
    parameter of it wants a gradient. `what`: the model in words."""
    found = converted_layers(model)
    if found:
        raise _error(found)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise UsageError(
            f"{what or 'this ' + type(model).__name__} has no parameter to train",
            why="it has none, or none of them wants a gradient",
            next_step="train the float or the fake-quantised network; requires_grad_() thaws one",
        )


def _error(names: List[str]) -> ConvertedModelError:
    listed = ", ".join(names[:_NAMED]) + (", …" if len(names) > _NAMED else "")
    return ConvertedModelError(
        "a converted network cannot be trained",
        why=f"{listed} run integers: their weights are packed and have no gradient",
        next_step="train before converting: quant.qat.trainable(model, scales), then convert what "
        "quant.qat.float_of and scales_of give",
    )
