"""Cuts of a residual network: a block without its shortcut, without its residual branch, or with a
weaker shortcut.

A block is relu(residual(x) + shortcut(x)). What a mode leaves out is really gone from the network
that `cut` gives, weights and all, so that costs are counted from what runs:

| mode | block | saves |
|---|---|---|
| `full` | relu(residual(x) + shortcut(x)) | nothing |
| `no_shortcut` | relu(residual(x)) | a projection's multiply-accumulates; of an identity none |
| `no_residual` | relu(shortcut(x)), x itself where that is an identity | the block's |
| `scale:α` | relu(residual(x) + α · shortcut(x)) | nothing |

Leaving whole blocks out of a trained network is due to Veit, Wilber and Belongie 2016 (arXiv
1605.06431).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.networks.cifar_resnet import BasicBlock, Bottleneck

__all__ = [
    "MODES",
    "Cut",
    "NoResidual",
    "NoShortcut",
    "ScaledShortcut",
    "block_names",
    "cut",
    "identity_blocks",
    "parse_cuts",
]

#: What may become of a block.
MODES = ("full", "no_shortcut", "no_residual", "scale")

_SPELLING = "BLOCK:MODE[,BLOCK:MODE…], such as layer3.1:no_residual,layer4.1:scale:0.5"


@dataclasses.dataclass(frozen=True)
class Cut:
    """What becomes of one block, by its name in the network, such as `layer3.1`. `factor`: what
    mode `scale` multiplies the shortcut by; 1 in the other modes."""

    block: str
    mode: str
    factor: float = 1.0

    def __str__(self) -> str:
        factor = f":{self.factor:g}" if self.mode == "scale" else ""
        return f"{self.block}:{self.mode}{factor}"


class NoShortcut(nn.Module):
    """relu(residual(x)): the block's input reaches its output through the convolutions alone.

    This and the others take a BasicBlock or a Bottleneck, and keep what is left of it."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.block: Any = block
        block.shortcut = nn.Sequential()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.block.residual(images))


class NoResidual(nn.Module):
    """relu(shortcut(x)). An identity is x itself: a block's input has no negative numbers, since
    it comes out of a ReLU."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.shortcut: nn.Sequential = block.shortcut

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.shortcut(images)) if len(self.shortcut) else images


class ScaledShortcut(nn.Module):
    """relu(residual(x) + factor · shortcut(x))."""

    def __init__(self, block: Any, factor: float) -> None:
        super().__init__()
        self.block: Any = block
        self.factor = factor

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.relu(self.block.residual(images) + self.factor * self.block.shortcut(images))


_WHOLE = (BasicBlock, Bottleneck)
_CUT = (NoShortcut, NoResidual, ScaledShortcut)


def block_names(net: nn.Module) -> Tuple[str, ...]:
    """The residual blocks of `net`, cut ones too, in the order in which they run."""
    return tuple(_blocks(net))


def identity_blocks(net: nn.Module) -> Tuple[str, ...]:
    """Those whose shortcut is an identity, and which are not cut."""
    found = _blocks(net)
    return tuple(n for n, b in found.items() if isinstance(b, _WHOLE) and not len(b.shortcut))


def _blocks(net: nn.Module) -> Dict[str, nn.Module]:
    found: Dict[str, nn.Module] = {}
    for name, module in net.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if isinstance(module, (*_WHOLE, *_CUT)) and not inside:
            found[name] = module
    return found


def parse_cuts(text: str, net: nn.Module) -> Tuple[Cut, ...]:
    """Cuts as a user writes them; empty text: none. The name of a stage, such as `layer4`, stands
    for all of its blocks.

    Raises UnknownNameError for a block or a mode that there is not, BadValueError for a block
    without a mode and for what else cannot be cut like this, a cut that leaves no network among it:
    all that `cut` would raise.
    """
    found: List[Cut] = []
    for part in filter(None, (each.strip() for each in text.split(","))):
        name, _, how = part.partition(":")
        mode, _, factor = how.partition(":")
        if not mode:
            raise BadValueError(f"the cut '{part}' names no mode", next_step=_SPELLING)
        blocks = [each for each in block_names(net) if each.startswith(f"{name}.")] or [name]
        found += [Cut(block, mode, _factor(mode, factor, part)) for block in blocks]
    _require_possible(net, found)
    return tuple(found)


def _factor(mode: str, text: str, part: str) -> float:
    if (mode == "scale") != bool(text):
        raise BadValueError(
            f"the cut '{part}'",
            why="scale wants a factor, and no other mode takes one",
            next_step=_SPELLING,
        )
    try:
        return float(text) if text else 1.0
    except ValueError:
        raise BadValueError(
            f"the cut '{part}'", why=f"'{text}' is no number", next_step=_SPELLING
        ) from None


def cut(net: nn.Module, cuts: Sequence[Cut]) -> nn.Module:
    """A copy of `net` with these blocks cut; blocks that were cut before stay so. Weights that no
    longer run are not in it. Nothing is retrained, and batch statistics are those of before.

    Raises what `parse_cuts` raises.
    """
    _require_possible(net, cuts)
    new = copy.deepcopy(net)
    for each in cuts:
        path, _, key = each.block.rpartition(".")
        holder = _inside(new, path)
        block = holder._modules[key]
        assert block is not None  # checked above
        made = _made(each, block)
        made.train(block.training)
        holder._modules[key] = made
    return new


def _inside(net: nn.Module, path: str) -> nn.Module:
    for key in filter(None, path.split(".")):
        found = net._modules[key]
        assert found is not None
        net = found
    return net


def _made(each: Cut, block: nn.Module) -> nn.Module:
    if each.mode == "no_shortcut":
        return NoShortcut(block)
    if each.mode == "no_residual":
        return NoResidual(block)
    return ScaledShortcut(block, each.factor) if each.mode == "scale" else block


def _require_possible(net: nn.Module, cuts: Sequence[Cut]) -> None:
    blocks = _blocks(net)
    seen: Dict[str, Cut] = {}
    for each in cuts:
        if each.block not in blocks:
            raise UnknownNameError("block", each.block, blocks, where="of this network")
        if each.mode not in MODES:
            raise UnknownNameError("mode", each.mode, MODES, where=f"of a cut: {_SPELLING}")
        if not math.isfinite(each.factor):
            raise BadValueError(f"the cut '{each}'", why="a shortcut is scaled by a finite number")
        _require_whole(each, blocks[each.block], seen.get(each.block))
        seen[each.block] = each
    if not blocks:
        raise BadValueError(
            f"this {type(net).__name__} has no residual blocks",
            next_step="cut a network of networks/cifar_resnet.py",
        )
    if all(_without_residual(block, seen.get(name)) for name, block in blocks.items()):
        raise BadValueError(
            "the cut leaves no network",
            why=f"none of the {len(blocks)} blocks would have its residual branch",
            next_step="leave one block at least that computes something",
        )


def _require_whole(each: Cut, block: nn.Module, before: Optional[Cut]) -> None:
    """A block is cut once. Without both of its ways nothing would come through it."""
    if before is not None and {before.mode, each.mode} == {"no_shortcut", "no_residual"}:
        raise BadValueError(
            f"the cut leaves no network: {each.block} is cut twice, and nothing comes through it",
            why="it would have neither its shortcut nor its residual branch",
            next_step="cut one of the two",
        )
    if before is not None or not isinstance(block, _WHOLE):
        raise BadValueError(
            f"the block {each.block} is cut twice",
            why=f"it is {before or type(block).__name__} already, and then {each}",
            next_step="cut each block once, from the whole network",
        )


def _without_residual(block: nn.Module, cut_now: Optional[Cut]) -> bool:
    gone = cut_now is not None and cut_now.mode == "no_residual"
    return gone or isinstance(block, NoResidual)
