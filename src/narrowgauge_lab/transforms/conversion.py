"""Modules replaced by others, by rule: which ones, and what by."""

from __future__ import annotations

import copy
import dataclasses
import re
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple, Type

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError

__all__ = ["Conversion", "Rule", "convert", "converted"]

#: Where a module keeps its hooks, in any torch; the handles of the hooks point into these.
_HOOKS = re.compile(r"^_(forward|backward)_(pre_)?hooks|^_is_full_backward_hook$")


@dataclasses.dataclass(frozen=True)
class Rule:
    """Replaces each module of exactly `type`, whose whole name `pattern` matches, and that `where`
    accepts (each of the three only where it is given) by what `make(name, module)` gives."""

    make: Callable[[str, nn.Module], nn.Module]
    type: Optional[Type[nn.Module]] = None
    pattern: Optional[str] = None
    where: Optional[Callable[[str, nn.Module], bool]] = None

    def matches(self, name: str, module: nn.Module) -> bool:
        return (
            (self.type is None or type(module) is self.type)
            and (self.pattern is None or re.fullmatch(self.pattern, name) is not None)
            and (self.where is None or self.where(name, module))
        )

    def __str__(self) -> str:
        parts = [
            self.type.__name__ if self.type else "",
            repr(self.pattern) if self.pattern else "",
        ]
        parts.append(getattr(self.where, "__name__", "") if self.where else "")
        return " ".join(part for part in parts if part) or "any module"


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The new model, and each replacement as (name, type before, type after)."""

    model: nn.Module
    replaced: Tuple[Tuple[str, str, str], ...]


def convert(model: nn.Module, rules: Sequence[Rule]) -> nn.Module:
    """A copy of `model` with modules replaced; `converted` says which."""
    return converted(model, rules).model


def converted(model: nn.Module, rules: Sequence[Rule]) -> Conversion:
    """Replace by the first rule that matches, from the root inwards; what is below a replaced
    module belongs to its replacement.

    A replacement gets the name, the training flag and, where it does not hold the old module, the
    hooks of the old one, and its device and floating dtype, as long as the old one has tensors that
    agree in these. A module that stands at two places is replaced by one module at both; the rules
    see its first name. Raises BadValueError where a rule replaces nothing.
    """
    new = copy.deepcopy(model)
    made: Dict[int, nn.Module] = {}
    used: List[Rule] = []
    replaced: List[Tuple[str, str, str]] = []

    def visit(name: str, module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        made[id(module)] = module
        for rule in rules:
            if rule.matches(name, module):
                other = _like(rule.make(name, module), module)
                made[id(module)] = other
                used.append(rule)
                replaced.append((name, type(module).__name__, type(other).__name__))
                return other
        for key, child in list(module._modules.items()):
            if child is not None:
                module._modules[key] = visit(f"{name}.{key}" if name else key, child)
        return module

    root = visit("", new)
    for rule in rules:
        if not any(rule is other for other in used):
            raise BadValueError(
                f"the rule for {rule} replaces nothing in this {type(model).__name__}",
                why="no module matches it, or an earlier rule or an outer module took them all",
                next_step="print the names and types with named_modules(), and mend the rule",
            )
    return Conversion(root, tuple(replaced))


def _like(other: nn.Module, module: nn.Module) -> nn.Module:
    """`other` made to stand where `module` stood."""
    devices = {tensor.device for tensor in _tensors(module)}
    if len(devices) == 1:
        other = other.to(device=devices.pop())
    dtypes = {tensor.dtype for tensor in _tensors(module) if tensor.is_floating_point()}
    if len(dtypes) == 1:
        other = other.to(dtype=dtypes.pop())
    other.train(module.training)
    if all(inner is not module for inner in other.modules()):
        for name, value in vars(module).items():
            if _HOOKS.match(name) and name in vars(other):
                # The dictionary itself: the handles of its hooks then remove them here.
                vars(other)[name] = value
    return other


def _tensors(module: nn.Module) -> Iterator[Any]:
    tensors: List[torch.Tensor] = [*module.parameters(), *module.buffers()]
    return iter(tensors)
