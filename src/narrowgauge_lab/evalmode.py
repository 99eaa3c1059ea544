"""A model in eval mode for a while, and afterwards as it was."""

from __future__ import annotations

import contextlib
from typing import Iterator

from torch import nn

__all__ = ["in_eval_mode"]


@contextlib.contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Every module of `model` in eval mode; then each in the mode that it was in. `train(flag)`
    would set all of them alike, and those that are kept in eval mode while others train, too."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
