"""torch2trt: TensorRT networks made by running a model once. The one module that imports torch2trt.

An operator that it has no converter for becomes a constant: the value that it had in that one run.
So the engine is held against the network on other images before anything is measured.
"""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import inspect
import io
import json
import re
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Sequence

import torch
from torch import nn

from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab import torch_compat
from narrowgauge_lab.engines.base import DTYPES, Engine, Preparation, Runner
from narrowgauge_lab.engines.cache import Cached
from narrowgauge_lab.engines.errors import EngineBuildError, OperatorNotTakenError
from narrowgauge_lab.engines.keys import cache_key
from narrowgauge_lab.engines.native import of_batch

__all__ = ["ENGINE", "Torch2TrtEngine", "Torch2TrtRunner"]

#: What it prints of operators that it knows to be unknown.
_UNKNOWN = re.compile(r"unsupported method (\S+)")
#: Relative to the largest value. A network whose operators became constants is wrong by about 1.
_TOLERANCE = {"fp32": 0.01, "tf32": 0.02, "fp16": 0.1}


class Torch2TrtEngine(Engine):
    """Options: `workspace_mb`, memory that tactics may use; `keep_types`: types as asked, whatever
    TensorRT finds quicker. fp16 networks are made of a half model, as its authors measure them."""

    name = "torch2trt"
    options: ClassVar[Mapping[str, Scalar]] = {"workspace_mb": 1024, "keep_types": False}

    def missing(self, device: torch.device) -> str:
        if device.type != "cuda":
            return "TensorRT runs on GPUs of NVIDIA's"
        for library in ("tensorrt", "torch2trt"):
            if importlib.util.find_spec(library) is None:
                return f"{library} is not installed"
        try:
            importlib.import_module("torch2trt")
        # Importing it registers converters with TensorRT's and torch's of the day: any error may
        # come of a version that it does not know.
        except Exception as error:
            return f"torch2trt cannot be imported: {type(error).__name__}: {error}"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:  # noqa: ARG002
        if precision in ("bf16", "fp8"):
            return f"torch2trt has no {precision}"
        return ""

    # unverified: torch2trt itself | needs a GPU that TensorRT knows | `nox -s gpu` on a Jetson
    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        options = self.chosen(wanted)
        library = importlib.import_module("torch2trt")
        versions = {
            name: str(getattr(importlib.import_module(name), "__version__", "unknown"))
            for name in ("tensorrt", "torch2trt")
        }
        module = copy.deepcopy(model).to(wanted.device, DTYPES[wanted.precision])

        def build() -> bytes:
            return _packed(_converted(library, module, example, wanted, options))

        if wanted.cache is None:
            built = Cached(build(), False, "")
        else:
            key = cache_key(self.name, versions, model, example, wanted, options)
            built = wanted.cache.fetch(key, build)
        runner = Torch2TrtRunner(_unpacked(library, built.payload), example, wanted)
        _hold_against(runner, module, example, wanted)
        runner.from_cache, runner.cache_key = built.from_cache, built.key
        runner.cache_note = built.note
        return runner


class Torch2TrtRunner(Runner):
    """Calls a TRTModule. It tells nothing of its layers."""

    def __init__(self, module: Any, example: torch.Tensor, wanted: Preparation) -> None:
        self.engine = Torch2TrtEngine.name
        self.profile = wanted.profile(example)
        self._module: Optional[Any] = module

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self._module is not None
        # Contiguous here, and alive until it is queued: it passes the address of a temporary.
        x = x.contiguous()
        with torch_compat.inference_mode():
            result: torch.Tensor = self._module(x)
        return result

    def close(self) -> None:
        super().close()
        self._module = None


def _converted(
    library: Any,
    module: nn.Module,
    example: torch.Tensor,
    wanted: Preparation,
    options: Dict[str, Any],
) -> Any:
    profile = wanted.profile(example)
    if profile.least != profile.most:
        open_batch = {
            "min_shapes": [(profile.least, *profile.image)],
            "opt_shapes": [(profile.best, *profile.image)],
            "max_shapes": [(profile.most, *profile.image)],
        }
    else:
        open_batch = {}
    settings = {
        "fp16_mode": wanted.precision == "fp16",
        "int8_mode": wanted.precision == "int8",
        "strict_type_constraints": bool(options["keep_types"]),
        "max_workspace_size": int(options["workspace_mb"]) << 20,
        "max_batch_size": profile.most,
        **open_batch,
    }
    if wanted.precision == "int8":
        settings["int8_calib_dataset"] = _Calibration(wanted.calibration, wanted.device)
    _require_known(library.torch2trt, settings)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), torch.no_grad():
            made = library.torch2trt(module, [of_batch(example, profile.best)], **settings)
    except (AttributeError, AssertionError) as error:
        raise _refused(said.getvalue(), error) from error
    if _UNKNOWN.search(said.getvalue()) or made.engine is None:
        raise _refused(said.getvalue(), None)
    return made


def _refused(said: str, error: Optional[Exception]) -> Exception:
    unknown = _UNKNOWN.search(said)
    if unknown:
        return OperatorNotTakenError("torch2trt", unknown[1], "", "it has no converter for it")
    return EngineBuildError(
        "torch2trt made no engine of this network",
        why=str(error) if error else "TensorRT gave none; its log says why",
        next_step="engine=tensorrt makes one from ONNX",
    )


def _require_known(function: Any, settings: Dict[str, Any]) -> None:
    """Versions take any further keyword and ignore it: what they do not name is an error here."""
    there = inspect.signature(function).parameters
    unknown = [name for name in settings if name not in there]
    if unknown:
        raise EngineBuildError(
            f"this torch2trt does not know {', '.join(unknown)}",
            why="open batches came with 0.5",
            next_step="prepare it for one batch size, or use engine=tensorrt",
        )


class _Calibration:
    """The images one by one, each as the list of inputs that it wants."""

    def __init__(self, batches: Sequence[torch.Tensor], device: torch.device) -> None:
        self._images = torch.cat(list(batches))
        self._device = device

    def __len__(self) -> int:
        return int(self._images.shape[0])

    def __getitem__(self, index: int) -> List[torch.Tensor]:
        return [self._images[index : index + 1].to(self._device)]


def _hold_against(
    runner: Runner, module: nn.Module, example: torch.Tensor, wanted: Preparation
) -> None:
    """Raise EngineBuildError where it computes something else on images that it has not seen."""
    if wanted.precision not in _TOLERANCE:
        return
    shape = of_batch(example, wanted.profile(example).best).shape
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(shape, generator=generator).to(example.device, example.dtype)
    with torch.no_grad():
        right = module(images).double()
    if not bool(torch.isfinite(right).all()):
        return  # the network itself overflows; whoever measures its errors will say so
    error = float((runner(images).double() - right).abs().max() / right.abs().max())
    if not error <= _TOLERANCE[wanted.precision]:
        raise EngineBuildError(
            f"torch2trt's engine is wrong by {error:.2g} of the largest value",
            why="an operator without a converter becomes a constant there",
            next_step="engine=tensorrt makes one from ONNX",
        )


def _packed(module: Any) -> bytes:
    """The engine and its tensors' names, as a TRTModule says them of itself."""
    state = module.state_dict()
    names = {key: list(state[key]) for key in ("input_names", "output_names")}
    return json.dumps(names).encode() + b"\n" + bytes(state["engine"])


def _unpacked(library: Any, data: bytes) -> Any:
    names, _, engine = data.partition(b"\n")
    module = library.TRTModule()
    module.load_state_dict({**json.loads(names), "engine": bytearray(engine)})
    return module


ENGINE = Torch2TrtEngine()
