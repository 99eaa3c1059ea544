"""A model's layers replaced by manual ones."""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.layers.manual import dispatch
from narrowgauge_lab.layers.manual.modules import LAYERS, ManualConv2d, ManualLinear, depth_of
from narrowgauge_lab.layers.manual.policies import Gradient, Policy
from narrowgauge_lab.layers.manual.quantise import Scales
from narrowgauge_lab.layers.manual.settings import AUTO, Settings, settings_of

__all__ = ["Converted", "LeftAlone", "choices", "convert"]

#: Other layers with products like these, which are listed where they are left alone.
_RELATED = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear)
_KINDS = {nn.Conv2d: ManualConv2d, nn.Linear: ManualLinear}


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """A layer that stays as it is."""

    name: str
    type: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model with manual layers, their names, and the layers that are not."""

    model: nn.Module
    replaced: Tuple[str, ...]
    left_alone: Tuple[LeftAlone, ...]

    def choices(self) -> List[Dict[str, Any]]:
        """See `choices`."""
        return choices(self.model)


def convert(
    model: nn.Module,
    policy: Union[str, Policy],
    exclude: Sequence[str] = (),
    *,
    gradient: Union[str, Gradient] = "straight-through",
    per_channel: bool = True,
    path: str = AUTO,
    scales: Optional[Mapping[str, Scales]] = None,
) -> Converted:
    """A copy of `model` whose Conv2d and Linear layers form their products by `policy`; manual
    layers in it get the new settings. Parameters, buffers, hooks, names and shared layers are as in
    `model`, and so is its state dict.

    `exclude`: patterns of the names of layers to leave alone. `scales`: calibrated ones by layer,
    as `quantise.calibrated` gives them; layers without any take those of the moment. The rest as in
    `settings`. Raises UnknownNameError for a policy, a table, a pattern or a layer of `scales` that
    is not there, BadValueError where no layer is left to convert, NotApplicableError where `path`
    is not to be had, KernelsNotBuiltError, and what reading a table and compiling a functor raise.
    """
    settings = settings_of(policy, gradient, per_channel, path)
    if scales and not settings.policy.eight_bit:
        raise BadValueError(
            f"scales for {settings.policy}, which computes in float32",
            next_step="leave scales= out; they are of the 8-bit policies",
        )
    new = copy.deepcopy(model)
    names, left_alone = _sorted(new, settings, exclude)
    modules = dict(new.named_modules())
    _require_known(scales or {}, names)
    for name in names:
        module = modules[name]
        module.__class__ = _KINDS.get(type(module), type(module))
        assert isinstance(module, LAYERS)
        module.settings = settings
        module.scales = (scales or {}).get(name, Scales())
        device, depth = module.weight.device, depth_of(module)
        dispatch.prepare(settings, device, depth, module.scales)
    return Converted(new, tuple(names), tuple(left_alone))


def choices(model: nn.Module) -> List[Dict[str, Any]]:
    """For a record: how each manual layer of a model, where it is now, forms its products, and why.
    Raises what `dispatch.choose` raises."""
    found = []
    for name, module in model.named_modules():
        if isinstance(module, LAYERS):
            settings = module.settings
            choice = dispatch.choose(settings, module.weight.device, depth_of(module))
            found.append(
                {
                    "layer": name,
                    "policy": str(settings.policy),
                    "gradient": str(settings.gradient),
                    **choice.to_fact(),
                }
            )
    return found


def _sorted(
    model: nn.Module, settings: Settings, exclude: Sequence[str]
) -> Tuple[List[str], List[LeftAlone]]:
    """The names of the layers to convert, and those that are left alone."""
    names, left_alone, unused = [], [], set(exclude)
    for name, module in model.named_modules():
        if not isinstance(module, _RELATED):
            continue
        matching = {each for each in exclude if fnmatch.fnmatchcase(name, each)}
        unused -= matching
        reason = "excluded" if matching else _refused(module, settings)
        if reason:
            left_alone.append(LeftAlone(name, type(module).__name__, reason))
        else:
            names.append(name)
    if unused:
        every = names + [each.name for each in left_alone]
        raise UnknownNameError("layer", sorted(unused)[0], every, where="to exclude")
    if not names:
        raise BadValueError(
            f"no layer of this {type(model).__name__} can be converted",
            why="\n".join(f"{each.name}: {each.reason}" for each in left_alone)
            or "it has neither convolutions nor linear layers",
        )
    return names, left_alone


def _refused(module: nn.Module, settings: Settings) -> str:
    """Why a layer cannot be converted; empty where it can."""
    if type(module) not in (*_KINDS, *LAYERS):
        return "its class is not exactly Conv2d or Linear: its forward may do something else"
    if module.weight.dtype != torch.float32:
        return f"its weight is {module.weight.dtype}, and policies take float32"
    eight_bit = settings.policy.eight_bit
    return dispatch.lacking_room(settings.policy, depth_of(module)) if eight_bit else ""


def _require_known(scales: Mapping[str, Scales], names: Sequence[str]) -> None:
    for name in scales:
        if name not in names:
            raise UnknownNameError("layer", name, names, where="with calibrated scales")
