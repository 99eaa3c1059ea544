"""The forms in which a float network can run on a CPU: torch's own, up to oneDNN's fused layers."""

from __future__ import annotations

import copy
import dataclasses
from typing import Callable, Dict, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.base import LayerFact
from narrowgauge_lab.engines.own.cpu.fusion import WORDS, fuse
from narrowgauge_lab.engines.own.cpu.onednn import works
from narrowgauge_lab.transforms import folded, to_channels_last
from narrowgauge_lab.transforms.folding import Folding

__all__ = ["EAGER", "FORMS", "FUSED", "FloatForms", "Form"]

Call = Callable[[torch.Tensor], torch.Tensor]

EAGER, FUSED = "eager", "fused"
#: Eager is torch's own; each of the others takes something from it. In `fused, linear`, oneDNN has
#: the linear layers too, which MKL has else.
FORMS = (EAGER, "channels_last", "folded", "folded channels_last", FUSED, "fused, linear")


@dataclasses.dataclass(frozen=True)
class Form:
    """A network ready to be called, and what its layers run as."""

    call: Call
    layers: Tuple[LayerFact, ...]


class FloatForms:
    """Makes forms of `model` (eval, float32; not changed) in the example's dtype.

    To be made with as many threads as they will run with: oneDNN's order of weights depends on it.
    """

    names = FORMS

    def __init__(self, model: nn.Module, example: torch.Tensor) -> None:
        self._model, self._example = model, example
        self._folding: Tuple[Folding, ...] = ()

    def make(self, name: str) -> Form:
        """The form of this name. Raises NotApplicableError where this torch has not the operators
        or torch.fx cannot read the network, and what torch raises where memory runs out."""
        if name in (EAGER, "channels_last"):
            # A copy: what its owner does to the model afterwards is not for the runner.
            model = copy.deepcopy(self._model).to(self._example.dtype)
        else:
            model = self._folded().model
        if name in (EAGER, "folded"):
            return Form(model, _facts(model))
        if name.endswith("channels_last"):
            return Form(_given_channels_last(to_channels_last(model)), _facts(model))
        return self._fused(model, linear=name == FORMS[-1])

    def _folded(self) -> Folding:
        """Folded in float32, then in the example's dtype. Its forms may share it: none changes."""
        if not self._folding:
            folding = folded(self._model)
            folding.model.to(self._example.dtype)
            self._folding = (folding,)
        return self._folding[0]

    def _fused(self, model: nn.Module, linear: bool) -> Form:
        why = works("conv", "none", self._example.dtype)
        if why:
            raise NotApplicableError("oneDNN's fused convolution does not work here", why=why)
        untraced = self._folded().untraced
        if untraced:
            raise NotApplicableError("torch.fx cannot trace the network", why=untraced)
        fusion = fuse(model, self._example, linear=linear)
        return Form(_given_channels_last(fusion.model), fusion.layers)


def _given_channels_last(model: nn.Module) -> Call:
    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x.contiguous(memory_format=torch.channels_last))
        return result

    return call


def _facts(model: nn.Module) -> Tuple[LayerFact, ...]:
    """Every layer that computes; folding leaves Identities, and eval mode leaves Dropout idle."""
    idle = (nn.Identity, nn.Dropout)
    dtypes: Dict[torch.dtype, str] = WORDS
    word = dtypes[next(model.parameters()).dtype]
    leaves = [(n, m) for n, m in model.named_modules() if next(m.children(), None) is None]
    return tuple(
        LayerFact(name, type(module).__name__, "ATen", "", word)
        for name, module in leaves
        if not isinstance(module, idle)
    )
