"""TorchScript: traced, frozen, and optimised for inference where this torch does that (1.10)."""

from __future__ import annotations

from typing import Any, Callable, ClassVar, Mapping, Tuple

import torch
from torch import nn

from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.base import Engine, Preparation, Runner
from narrowgauge_lab.engines.eager import ENGINES as EAGER
from narrowgauge_lab.engines.errors import EngineBuildError
from narrowgauge_lab.engines.native import (
    LAYOUT,
    MathFlags,
    TorchRunner,
    converted,
    float_refused,
    laid_out,
    of_batch,
)
from narrowgauge_lab.measure.probe import Observation, observe

__all__ = ["ENGINE", "TorchScriptEngine"]

#: The profiling executor looks at two calls and optimises at the third.
_WARM_UP_CALLS = 3


class TorchScriptEngine(Engine):
    """Options: `layout` (auto, contiguous, channels_last), `cudnn_benchmark`, and `optimize`: not
    only freeze the trace, but also optimise it for inference."""

    name = "torchscript"
    options: ClassVar[Mapping[str, Scalar]] = {
        "layout": LAYOUT,
        "cudnn_benchmark": True,
        "optimize": True,
    }

    def missing(self, device: torch.device) -> str:
        return EAGER[0].missing(device)

    def refuses(self, precision: str, device: torch.device) -> str:
        return float_refused(precision, device)

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        layout = laid_out(options["layout"], wanted)
        module = converted(model, wanted, layout)
        benchmark = bool(options["cudnn_benchmark"])
        first = of_batch(example, wanted.profile(example).best)
        if layout == "channels_last":
            first = first.contiguous(memory_format=torch.channels_last)
        with MathFlags(wanted, benchmark).in_force():
            script, observations = _script(module, first, bool(options["optimize"]))

        def observed(call: Callable[[], object]) -> Tuple[Observation, ...]:
            for _ in range(_WARM_UP_CALLS):
                call()
            return observations

        return TorchRunner(script, module, wanted, example, layout, benchmark, observed)


def _script(
    module: nn.Module, first: torch.Tensor, optimize: bool
) -> Tuple[Any, Tuple[Observation, ...]]:
    """The program, and what the probe saw of it before it was optimised: its last form on a CPU
    runs oneDNN's operators without a dispatcher. It keeps every dtype.

    torch before 2.0 does not show what runs inside a program at all; there it is the module that
    was traced which is looked at.
    """
    # `no_grad`, not inference mode: a frozen program would hold inference tensors, and be refused.
    with torch.no_grad():
        try:
            with torch_compat.torchscript():
                script = _frozen(torch.jit.trace(module, first, check_trace=False))
        except RuntimeError as error:
            if "out of memory" in str(error):  # it has an exit code of its own
                raise
            raise EngineBuildError(
                f"TorchScript could not trace this {type(module).__name__}",
                why=str(error).splitlines()[0],
                next_step="run the network by engine eager",
            ) from error
        visible = script if torch_compat.has_dispatch_mode() else module
        observations = observe(lambda: visible(first))
        if optimize and hasattr(torch.jit, "optimize_for_inference"):
            with torch_compat.torchscript():
                script = torch.jit.optimize_for_inference(script)
    return script, observations


def _frozen(trace: Any) -> Any:
    """The trace with its weights as constants, and what torch can fold into them folded.

    Folding fails with an assertion of torch's own (2.11, CUDA) where a convolution is followed by
    a batch normalisation of a concatenation; such a network is frozen as it is.
    """
    try:
        return torch.jit.freeze(trace)
    except RuntimeError as error:
        if "INTERNAL ASSERT FAILED" not in str(error):
            raise
        return torch.jit.freeze(trace, optimize_numerics=False)


ENGINE = TorchScriptEngine()
