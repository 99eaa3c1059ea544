"""What a manual layer is told, apart from its tensors."""

from __future__ import annotations

import dataclasses
from typing import Union

from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_lab.layers.manual.policies import (
    Gradient,
    Policy,
    parse_gradient,
    parse_policy,
)

__all__ = ["AUTO", "PATHS", "Settings", "settings_of"]

AUTO = "auto"
#: How products can be formed; which of them a policy has, `dispatch` says.
PATHS = ("functor", "exact", "structured", "factored", "table")


@dataclasses.dataclass(frozen=True)
class Settings:
    """`path`: one of PATHS, to insist on it, or AUTO. `per_channel`: whether weights of an 8-bit
    policy have a scale for each output channel."""

    policy: Policy
    gradient: Gradient = dataclasses.field(default_factory=Gradient)
    per_channel: bool = True
    path: str = AUTO

    def __post_init__(self) -> None:
        if self.path not in (AUTO, *PATHS):
            raise UnknownNameError("path", self.path, (AUTO, *PATHS))


def settings_of(
    policy: Union[str, Policy],
    gradient: Union[str, Gradient] = "straight-through",
    per_channel: bool = True,
    path: str = AUTO,
) -> Settings:
    """Settings from text or values. Raises what parsing them raises."""
    return Settings(
        parse_policy(policy) if isinstance(policy, str) else policy,
        parse_gradient(gradient) if isinstance(gradient, str) else gradient,
        per_channel,
        path,
    )
