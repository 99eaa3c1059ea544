"""What a row runs: precision, layout, engine and the rest, from its mode or from its rung."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Mapping, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_lab import precision, torch_compat

__all__ = ["LEVELS", "MODES", "RUNGS", "Mode", "Setup", "from_parameters", "require", "rung_chain"]

#: How a network comes to its precision: converted whole, cast operator by operator by autocast, or
#: converted but for its batch normalisations.
PLAIN, AUTOCAST, FP32_NORMS = "plain", "autocast", "fp32-norms"
_REDUCED = ("fp16", "bf16")


@dataclasses.dataclass(frozen=True)
class Mode:
    """A value of the parameter `mode`: the precision, and how the network comes to it."""

    precision: str
    form: str = PLAIN


#: O0 to O3 are the native equivalents of apex's levels. O0 is fp32 and O3 is fp16, by other names.
MODES: Dict[str, Mode] = {
    "fp32": Mode("fp32"),
    "tf32": Mode("tf32"),
    "O0": Mode("fp32"),
    "O1": Mode("fp16", AUTOCAST),
    "O2": Mode("fp16", FP32_NORMS),
    "O3": Mode("fp16"),
    "fp16": Mode("fp16"),
    "bf16": Mode("bf16"),
    "int8": Mode("int8"),
    "fp8": Mode("fp8"),
}

#: What the original measures, by the names that its summary prints.
LEVELS: Dict[str, str] = {
    "O3": "AMP O3",
    "O2": "AMP O2",
    "O1": "AMP O1",
    "O0": "AMP O0",
    "fp32": "Float32",
}


@dataclasses.dataclass(frozen=True)
class Setup:
    """Everything that decides how fast a network runs and that a row chooses.

    `layout`: nchw or channels_last; `engine`: eager, graph or compile; `fold`: batch normalisation
    folded into the convolutions before it.
    """

    precision: str = "fp32"
    form: str = PLAIN
    layout: str = "nchw"
    cudnn_benchmark: bool = False
    fold: bool = False
    engine: str = "eager"

    @property
    def dtype(self) -> torch.dtype:
        """What weights and inputs are kept in. int8 and fp8 are made from a float32 network."""
        if self.form == AUTOCAST or self.precision not in _REDUCED:
            return torch.float32
        return precision.PRECISIONS[self.precision]


#: The ladder: each rung changes one field of the rung before it.
_STEPS: Tuple[Tuple[str, str, Any], ...] = (
    ("fp32-strict", "precision", "fp32"),
    ("tf32", "precision", "tf32"),
    ("fp16", "precision", "fp16"),
    ("channels-last", "layout", "channels_last"),
    ("cudnn-benchmark", "cudnn_benchmark", True),
    ("bn-fold", "fold", True),
    ("graph", "engine", "graph"),
    ("compile", "engine", "compile"),
    ("int8", "precision", "int8"),
    ("fp8", "precision", "fp8"),
)


def rung_chain() -> Dict[str, Setup]:
    """The rungs in order, each with all that the rungs before it brought."""
    chain: Dict[str, Setup] = {}
    setup = Setup()
    for name, field, value in _STEPS:
        setup = dataclasses.replace(setup, **{field: value})
        chain[name] = setup
    return chain


#: The rungs, and the ladder's two ends once more, as rows of their own: the ratio from end to end
#: comes from these, so that the product of the rungs can be held against it.
RUNGS: Dict[str, Setup] = {
    **rung_chain(),
    "bottom": rung_chain()["fp32-strict"],
    "top": rung_chain()["int8"],
}


def from_parameters(parameters: Mapping[str, Any]) -> Setup:
    """What the parameters of a row ask for. Raises UsageError where they contradict each other."""
    mode = MODES[parameters["mode"]]
    chosen = Setup(
        precision=mode.precision,
        form=mode.form,
        layout=parameters["layout"],
        cudnn_benchmark=parameters["cudnn_benchmark"],
        fold=parameters["fold"],
        engine=parameters["engine"],
    )
    rung = parameters["rung"]
    if rung == "none":
        return _as_it_runs(chosen)
    if chosen != Setup():
        set_too = ", ".join(
            field.name
            for field in dataclasses.fields(Setup)
            if getattr(chosen, field.name) != getattr(Setup(), field.name)
        )
        raise UsageError(
            f"the rung '{rung}' decides what the row also sets: {set_too}",
            next_step="leave mode, layout, cudnn_benchmark, fold and engine alone with -p rung=…",
        )
    return RUNGS[rung]


def _as_it_runs(setup: Setup) -> Setup:
    """8-bit networks are channels-last with folded batch normalisation, whatever else is asked:
    nothing runs them otherwise."""
    if setup.precision not in ("int8", "fp8"):
        return setup
    return dataclasses.replace(setup, layout="channels_last", fold=True)


def require(setup: Setup, device: torch.device) -> None:
    """Raises NotApplicableError, with the reason, where this torch or device cannot run `setup`.

    int8 and fp8 are not looked at: whoever lowers the network to them knows.
    """
    if setup.precision in precision.PRECISIONS:
        _require_precision(setup.precision, device)
    if setup.engine == "graph" and not torch_compat.graphs_available(device):
        raise NotApplicableError(
            f"a CUDA graph needs a CUDA device and torch 1.10; this is {device.type}, "
            f"torch {torch.__version__}",
            next_step="-p engine=eager",
        )
    if setup.engine == "compile" and not torch_compat.compiler_available():
        raise NotApplicableError(
            f"torch {torch.__version__} has no compiler on this Python",
            why="torch.compile came with torch 2.0 and follows new Pythons later",
            next_step="-p engine=eager; or a target with a newer torch",
        )
    if setup.cudnn_benchmark and device.type != "cuda":
        raise NotApplicableError("cudnn.benchmark chooses among cuDNN's algorithms; there are none",
                                 why=f"the row runs on {device.type}")  # fmt: skip


def _require_precision(name: str, device: torch.device) -> None:
    works = precision.available(device)
    if name in works:
        return
    reasons = {
        "tf32": "TF32 is a mode of NVIDIA's tensor cores from compute capability 8.0 on",
        "bf16": "on a GPU it needs compute capability 8.0, on either device torch 1.10",
        "fp16": "on a CPU it needs a torch that has float16 convolutions there (2.13 does)",
    }
    raise NotApplicableError(
        f"{name} does not work on {device.type} with torch {torch.__version__}",
        why=reasons[name],
        next_step="precisions that work here: " + ", ".join(works),
    )
