"""torch.compile with its own compiler, inductor."""

from __future__ import annotations

from typing import Callable, ClassVar, Dict, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.base import Engine, Preparation, Runner
from narrowgauge_lab.engines.eager import ENGINES as EAGER
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.engines.native import (
    LAYOUT,
    TorchRunner,
    converted,
    float_refused,
    laid_out,
)
from narrowgauge_lab.measure.probe import NotObservableError, Observation, observe_compilation
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["COMPILE_MODES", "ENGINE", "CompileEngine"]

#: auto: graphs replayed on CUDA, inductor's default on a CPU. max-autotune tries templates for
#: minutes and has to be asked for.
COMPILE_MODES = ("auto", "default", "reduce-overhead", "max-autotune")
#: With graphs inductor warms up at the first call, captures at the second and replays from then on.
_WARM_UP_CALLS = 3


class CompileEngine(Engine):
    """Options: `compile_mode` (COMPILE_MODES), `layout` (auto, contiguous, channels_last),
    `cudnn_benchmark`, and `fold`: batch normalisation folded before it is compiled."""

    name = "compile"
    options: ClassVar[Mapping[str, Scalar]] = {
        "compile_mode": "auto",
        "layout": LAYOUT,
        "cudnn_benchmark": True,
        "fold": True,
    }

    def missing(self, device: torch.device) -> str:
        if not torch_compat.compiler_available():
            return f"torch {torch.__version__} has no compiler on this Python"
        return EAGER[0].missing(device)

    def refuses(self, precision: str, device: torch.device) -> str:
        return float_refused(precision, device)

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        mode = _mode(str(options["compile_mode"]), wanted.device)
        layout = laid_out(options["layout"], wanted)
        module = converted(fold_batch_norm(model) if options["fold"] else model, wanted, layout)
        call = _PerBatch(module, mode)
        return TorchRunner(
            call, module, wanted, example, layout, bool(options["cudnn_benchmark"]), call.observed
        )


class _PerBatch:
    """A compiled function per batch size, each with code of its own.

    torch.compile keeps what it made with the code object it made it of. Networks of one class share
    that, as do the batch sizes of one network; after eight it gives up and runs eagerly, with a
    warning at most.
    """

    def __init__(self, module: nn.Module, mode: str) -> None:
        self._module, self._mode = module, mode
        self._compiled: Dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        count = x.shape[0]
        if count == 0:  # nothing to compile for
            empty: torch.Tensor = self._module(x)
            return empty
        if count not in self._compiled:
            self._compiled[count] = torch_compat.compiled(_alone(self._module), self._mode)
        return self._compiled[count](x)

    def observed(self, call: Callable[[], object]) -> Tuple[Observation, ...]:
        """What the compiler was given by the first call. Raises EngineBuildError where it got
        nothing."""
        try:
            observations = observe_compilation(call)
        except NotObservableError as error:
            raise EngineBuildError(
                f"torch.compile made nothing of this {type(self._module).__name__}",
                why=error.why,
                next_step="engine=cuda-graph or eager",
            ) from error
        for _ in range(_WARM_UP_CALLS - 1):
            call()
        return observations


def _alone(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function that calls `module`, of a code object that no other has."""

    def call(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = module(x)
        return result

    call.__code__ = call.__code__.replace()
    return call


def _mode(asked: str, device: torch.device) -> str:
    if asked not in COMPILE_MODES:
        raise BadValueError(f"compile_mode '{asked}' is none", next_step=", ".join(COMPILE_MODES))
    if asked != "auto":
        return asked
    return "reduce-overhead" if device.type == "cuda" else "default"


ENGINE = CompileEngine()
