"""Channels taken out of a network: set to zero, or really removed, so that every weight is smaller.

Both are copies, and compute the same: `masked_channels` in the shapes that there were, with
filters, biases, gammas and betas of the channels zero; `removed_channels` without them. Training
changes nothing in that, as long as what is zero stays zero: it gives nothing to the gradient of any
other weight, and batch statistics are each channel's own.
"""

from __future__ import annotations

import copy
from typing import Any, Dict, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_lab.transforms.channel_groups import ChannelGroup, ChannelMap

__all__ = ["Kept", "masked_channels", "removed_channels"]

#: By a group's name: which of its channels stay, int64 [kept], ascending.
Kept = Mapping[str, torch.Tensor]


def removed_channels(model: nn.Module, found: ChannelMap, kept: Kept) -> nn.Module:
    """A copy of `model` that has, of each group in `kept`, these channels only; other groups stay.

    `found` is `channel_groups(model)`. Raises BadValueError for a group that there is not, for no
    channel of one, and for channels that it does not have or twice.
    """
    new = copy.deepcopy(model)
    modules = dict(new.named_modules())
    for group, index in _checked(found, kept):
        for name in group.makers:
            maker: Any = modules[name]
            _cut(maker, "weight", 0, index)
            _cut(maker, "bias", 0, index)
            maker.out_channels = len(index)
        for name in group.norms:
            norm: Any = modules[name]
            for tensor in ("weight", "bias", "running_mean", "running_var"):
                _cut(norm, tensor, 0, index)
            norm.num_features = len(index)
        for reader in group.readers:
            module: Any = modules[reader.name]
            inputs = index[:, None] * reader.inputs + torch.arange(reader.inputs)
            _cut(module, "weight", 1, inputs.flatten())
            if isinstance(module, nn.Linear):
                module.in_features = inputs.numel()
            else:
                module.in_channels = inputs.numel()
    return new


def masked_channels(model: nn.Module, found: ChannelMap, kept: Kept) -> nn.Module:
    """A copy of `model` in which the other channels of these groups are zero wherever they are
    read. Raises what `removed_channels` raises."""
    new = copy.deepcopy(model)
    modules = dict(new.named_modules())
    with torch.no_grad():
        for group, index in _checked(found, kept):
            gone = torch.ones(group.channels, dtype=torch.bool)
            gone[index] = False
            for name in (*group.makers, *group.norms):
                module = modules[name]
                for tensor in (module.weight, module.bias):
                    if tensor is not None:
                        tensor[gone.to(tensor.device)] = 0.0
    return new


def _checked(found: ChannelMap, kept: Kept) -> Tuple[Tuple[ChannelGroup, torch.Tensor], ...]:
    groups: Dict[str, ChannelGroup] = {group.name: group for group in found.groups}
    checked = []
    for name, index in kept.items():
        if name not in groups:
            raise BadValueError(
                f"no channels of '{name}' can be taken out",
                why=found.left_alone.get(name, "no group of channels has that name"),
                next_step=f"groups are: {', '.join(groups) or 'none'}",
            )
        group, index = groups[name], torch.as_tensor(index, dtype=torch.int64).cpu()
        if not index.numel():
            raise BadValueError(
                f"nothing of '{name}' would be left",
                why=f"all of its {group.channels} channels are to be taken out, and a network "
                "without one of its layers is another network",
                next_step="keep one channel or more",
            )
        if int(index.min()) < 0 or int(index.max()) >= group.channels:
            raise BadValueError(
                f"'{name}' has the channels 0 to {group.channels - 1}",
                why=f"asked for were {int(index.min())} to {int(index.max())}",
            )
        if len(index) > 1 and bool((index[1:] <= index[:-1]).any()):
            raise BadValueError(f"the channels to keep of '{name}' are not in ascending order")
        checked.append((group, index))
    return tuple(checked)


def _cut(module: Any, name: str, dimension: int, index: torch.Tensor) -> None:
    """Keep these entries of a parameter or buffer, if it has it."""
    tensor = getattr(module, name)
    if tensor is None:
        return
    with torch.no_grad():
        smaller = tensor.detach().index_select(dimension, index.to(tensor.device))
    if isinstance(tensor, nn.Parameter):
        smaller = nn.Parameter(smaller, tensor.requires_grad)
    setattr(module, name, smaller)
