"""A training step's forward and backward pass by torch.compile.

Of a network of bottlenecks most of a step is normalisation and ReLU, which move bytes and compute
little; the compiler makes one kernel of several of them. What it makes is captured like any other
step (`graphs`).
"""

from __future__ import annotations

import contextlib
from typing import Any, Callable, Dict, Iterator, Optional

import torch
from torch import nn

from narrowgauge_contract.errors import ExitCode, NarrowgaugeError, SkippedError, UsageError
from narrowgauge_lab import torch_compat
from narrowgauge_lab.context import RowContext

__all__ = [
    "CompileError", "Forward", "PartByPart", "compiled_call", "compiled_or_say",
    "require_compilable", "require_compiler",
]  # fmt: skip

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


class PartByPart(nn.Module):
    """A network that asks several of one class in a step. torch.compile gets these one by one, and
    what is beside them runs as it is. What it makes of one serves all since torch 2.5, where of the
    whole there would be kernels for each."""

    def __init__(self) -> None:
        super().__init__()
        #: Within a compiled step, which owns them: what was made of the parts so far.
        self._made: Optional[Dict[nn.Module, Callable[..., Any]]] = None

    def ask(self, part: nn.Module, images: torch.Tensor) -> torch.Tensor:
        """What a part says."""
        call: Callable[..., torch.Tensor] = part
        if self._made is not None:
            if part not in self._made:
                self._made[part] = torch_compat.compiled(part, "default", whole=True)
            call = self._made[part]
        return call(images)

    def compiled(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call`, which runs this network, with its parts compiled."""
        made: Dict[nn.Module, Callable[..., Any]] = {}

        def by_parts(*given: Any) -> Any:
            self._made = made
            try:
                return call(*given)
            finally:
                self._made = None

        return by_parts


def require_compilable(ctx: RowContext, model: nn.Module, placed: bool) -> None:
    """Note in the record that a training of `model` is compiled. Raises UsageError for one by a
    placement plan, SkippedError without a compiler."""
    if placed:
        raise UsageError(
            "torch.compile does not go with this training",
            why="a placement plan runs pass by pass",
            next_step="-p compile=false",
        )
    require_compiler("-p compile=true")
    parts = ", part by part" if isinstance(model, PartByPart) else ""
    ctx.fact("compiled", f"torch.compile, inductor: full batches{parts}")


def compiled_call(model: nn.Module, call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which runs `model`, by torch.compile: part by part where it is PartByPart, else as a
    whole. What cannot be compiled so is refused where it first runs (`compiled_or_say`)."""
    if isinstance(model, PartByPart):
        return model.compiled(call)
    return torch_compat.compiled(call, "default", whole=True)


class Forward:
    """A forward pass, `call` of images [B, …] and what else it takes: by `compiled`, where there is
    such, for batches of `batch` images.

    A batch of another size, such as the last of an epoch, runs uncompiled: it would take a minute
    to compile for itself.
    """

    def __init__(
        self, call: Callable[..., Any], batch: int, compiled: Optional[Callable[..., Any]] = None
    ) -> None:
        self._call = call
        self._batch = batch
        self._compiled = compiled

    def __call__(self, images: torch.Tensor, *more: Any) -> Any:
        if self._compiled is None or images.shape[0] != self._batch:
            return self._call(images, *more)
        return self._compiled(images, *more)


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
