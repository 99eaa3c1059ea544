"""What apex's automatic mixed precision did to a process, without apex.

apex (before it was removed; https://github.com/NVIDIA/apex, apex/amp at 48fc613d) had four levels.
O0, O2 and O3 convert the model they are given. O1 instead replaces functions of
`torch.nn.functional`, `conv2d` and `linear` among them, by wrappers that cast their float32
arguments to float16, and nothing ever puts the old functions back. A later `initialize` with
another level leaves the wrappers, and a model that apex never saw runs through them, since
`nn.Conv2d` looks `conv2d` up in the module at each call. apex issues 501 and 1093 report it.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List

import torch
from torch import nn

__all__ = ["PATCHED", "Amp", "patched_functions"]

#: The functions that matter to a ResNet and a linear layer; apex had a list of some thirty.
PATCHED = ("conv2d", "linear")


def patched_functions() -> List[str]:
    """Which of those functions are wrapped in this process, now."""
    functional = torch.nn.functional
    return [name for name in PATCHED if hasattr(getattr(functional, name), "__wrapped__")]


class Amp:
    """The process-wide state: one per process that is to be contaminated.

    `half` is float16 but for tests on a torch that cannot convolve in it.
    """

    def __init__(self, half: torch.dtype = torch.float16) -> None:
        self.half = half
        self._casts: Dict[nn.Parameter, torch.Tensor] = {}

    def initialize(self, model: nn.Module, level: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model as `apex.amp.initialize(model, opt_level=level)` gives it, as a callable.

        O0, O2 and O3 also cast what goes in to the model's dtype, and what comes out to float32.
        """
        if level == "O1":
            self._patch_functions()
            return model
        if level == "O0":
            model.float()
            return self._cast_around(model, torch.float32)
        model.to(self.half)
        if level == "O2":
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.float()
        return self._cast_around(model, self.half)

    def clear_casts(self) -> None:
        """Forget the cast parameters, as apex does after each backward pass of O1."""
        self._casts.clear()

    def _patch_functions(self) -> None:
        for name in PATCHED:
            function = getattr(torch.nn.functional, name)
            if not hasattr(function, "__wrapped__"):
                setattr(torch.nn.functional, name, self._casting(function))

    def _casting(self, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(function)
        def wrapper(*given: Any) -> torch.Tensor:
            return function(*[self._cast(value) for value in given])

        return wrapper

    def _cast(self, value: Any) -> Any:
        """A float32 tensor in half; a parameter only once, however often it is used."""
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float32:
            return value
        if not isinstance(value, nn.Parameter):
            return value.to(self.half)
        cast = self._casts.get(value)
        if cast is None or (torch.is_grad_enabled() and cast.requires_grad != value.requires_grad):
            cast = self._casts[value] = value.to(self.half)
        return cast

    @staticmethod
    def _cast_around(
        model: nn.Module, dtype: torch.dtype
    ) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(images: torch.Tensor) -> torch.Tensor:
            return model(images.to(dtype)).float()

        return forward
