"""Hooks of a network's modules: what happens in a module beside what its class says.

What reads a network's graph instead of calling it sees no hook of the network itself, and what puts
something else in a layer's place drops the layer's. An engine runs them or refuses the network.
"""

from __future__ import annotations

from typing import Tuple

from torch import nn

from narrowgauge_lab.engines.errors import HooksNotTakenError

__all__ = ["has_hooks", "hooked", "require_none"]


def has_hooks(module: nn.Module) -> bool:
    """Whether a call of this module runs hooks. Those for gradients do not count: no engine takes
    gradients."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def hooked(model: nn.Module) -> Tuple[str, ...]:
    """The names of all modules with hooks; that of the network itself is empty."""
    return tuple(name for name, module in model.named_modules() if has_hooks(module))


def require_none(engine: str, layer: str, module: nn.Module) -> None:
    """Raise HooksNotTakenError where `engine` would run this module without its hooks."""
    if has_hooks(module):
        raise HooksNotTakenError(engine, layer)
