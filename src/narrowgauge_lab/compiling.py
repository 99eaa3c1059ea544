"""A training step's forward and backward pass by torch.compile.

Of a network of bottlenecks most of a step is normalisation and ReLU, which move bytes and compute
little; the compiler makes one kernel of several of them. What it makes is captured like any other
step (`graphs`).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Iterator, Optional

import torch
from torch import nn

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, SkippedError
from narrowgauge_lab import torch_compat

__all__ = ["CompileError", "Forward", "compiled_or_say", "require_compiler"]

#: Where what the compiler raises is defined.
_COMPILER = ("torch._dynamo.", "torch._inductor.")


class CompileError(NarrowgaugeError):
    """torch.compile could not compile what it was given."""

    exit_code = ExitCode.RUN_FAILED


def require_compiler(what: str) -> None:
    """Raises SkippedError where this torch, or its Python, has no torch.compile for `what`."""
    if not torch_compat.compiler_available():
        raise SkippedError(
            f"{what} needs torch.compile",
            why=f"this is torch {torch.__version__}, and torch.compile came with 2.0",
        )


class Forward:
    """The forward pass of `model`: compiled for batches of `batch` images where `compiles`.

    A batch of another size, such as the last of an epoch, runs uncompiled: it would take a minute
    to compile for itself. Raises CompileError, with the compiler's own reason; what the model
    itself raises passes.
    """

    def __init__(self, model: nn.Module, batch: int, compiles: bool) -> None:
        self._model = model
        self._batch = batch
        self._compiled: Optional[Callable[..., Any]] = None
        if compiles:
            self._compiled = torch_compat.compiled(model, "default", whole=True)

    def __call__(self, images: torch.Tensor) -> Any:
        if self._compiled is None or images.shape[0] != self._batch:
            return self._model(images)
        return self._compiled(images)


@contextlib.contextmanager
def compiled_or_say() -> Iterator[None]:
    """A block that runs what is compiled when it is first run. Raises CompileError."""
    try:
        yield
    except Exception as error:
        if not type(error).__module__.startswith(_COMPILER):
            raise
        # Of inductor's errors the first line says whose they are, the second what it is.
        said = str(error).strip().splitlines()[:2]
        raise CompileError(
            "the training step could not be compiled",
            why=" ".join(said),
            next_step="-p compile=false trains without torch.compile",
        ) from error
