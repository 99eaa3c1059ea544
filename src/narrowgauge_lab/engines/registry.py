"""Engines by name: what there is, why one is not here, and networks made ready by them."""

from __future__ import annotations

import dataclasses
import importlib
import time
from typing import Dict

import torch
from torch import nn

from narrowgauge_contract.errors import (
    BadValueError,
    NotApplicableError,
    SkippedError,
    UnknownNameError,
)
from narrowgauge_lab import tf32_flags
from narrowgauge_lab.engines.base import DTYPES, PRECISIONS, Engine, Preparation, Runner
from narrowgauge_lab.engines.cache import NothingKept
from narrowgauge_lab.engines.errors import EngineMissingError
from narrowgauge_lab.engines.hooks import hooked
from narrowgauge_lab.errors import CalibrationError

__all__ = ["ENGINES", "engine", "missing", "prepare", "refuses", "require_here"]

#: Where each engine is. A module is imported when its engine is asked for, its library later still.
_MODULES: Dict[str, str] = {
    "eager": "eager",
    "channels_last": "eager",
    "torchscript": "torchscript",
    "cuda-graph": "graph",
    "compile": "compiled",
    "onnxruntime": "ort",
    "openvino": "openvino",
    "xla": "xla",
    "tensorrt": "tensorrt",
    "torch2trt": "torch2trt",
    "narrowgauge": "own.engine",
}
ENGINES = tuple(_MODULES)
#: So many modules with hooks are named.
_NAMED = 3


def engine(name: str) -> Engine:
    """The engine of this name. Raises UnknownNameError."""
    if name not in _MODULES:
        raise UnknownNameError("engine", name, ENGINES)
    module = importlib.import_module(f"narrowgauge_lab.engines.{_MODULES[name]}")
    there = getattr(module, "ENGINES", None) or (module.ENGINE,)
    return next(each for each in there if each.name == name)


def missing(name: str, device: torch.device) -> str:
    """Why this host cannot have the engine for `device`, or nothing. Raises UnknownNameError."""
    return engine(name).missing(device)


def refuses(name: str, precision: str, device: torch.device) -> str:
    """Why the engine, which is not missing, has no such precision on `device`, or nothing. Raises
    UnknownNameError."""
    if precision not in PRECISIONS:
        raise UnknownNameError("precision", precision, PRECISIONS)
    if precision == "tf32" and not _has_tf32(device):
        return "TF32 is a mode of NVIDIA GPUs from compute capability 8.0 on"
    return engine(name).refuses(precision, device)


def require_here(name: str, precision: str, device: torch.device) -> None:
    """Raises SkippedError for an engine, or a precision of it, that this host lacks: a row of it is
    skipped before anything is made. UnknownNameError."""
    lacking = missing(name, device)
    if lacking:
        raise SkippedError(f"this host has no {name}", why=lacking)
    refused = refuses(name, precision, device)
    if refused:
        raise SkippedError(f"{name} runs no {precision} on this {device.type}", why=refused)


def prepare(name: str, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
    """`model` made ready by an engine; its `build_seconds` are the time that this took.

    Raises EngineMissingError, NotApplicableError for a precision that it has not,
    OperatorNotTakenError, HooksNotTakenError, EngineBuildError; UnknownNameError and BadValueError
    for what is asked wrongly; and what says that memory ran out. Nothing is kept of a network with
    hooks: no key can tell what a function does.
    """
    chosen = engine(name)
    _check(model, example, wanted)
    lacking = chosen.missing(wanted.device)
    if lacking:
        raise EngineMissingError(f"this host has no {name}", why=lacking)
    refused = refuses(name, wanted.precision, wanted.device)
    if refused:
        raise NotApplicableError(
            f"{name} does not run {wanted.precision} on {wanted.device.type}", why=refused
        )
    chosen.chosen(wanted)
    hooks = hooked(model)
    if hooks and wanted.cache is not None:
        where = ", ".join(each or "the network itself" for each in hooks[:_NAMED])
        wanted = dataclasses.replace(wanted, cache=NothingKept(f"there are hooks, of {where}"))
    begin = time.perf_counter()
    with tf32_flags.tf32_set_to(wanted.precision == "tf32"):
        runner = chosen.prepare(model, example, wanted)
        if wanted.device.type == "cuda":
            torch.cuda.synchronize(wanted.device)
    runner.build_seconds = time.perf_counter() - begin
    runner.engine = name
    if runner.profile is None:
        runner.profile = wanted.profile(example)
    return runner


def _check(model: nn.Module, example: torch.Tensor, wanted: Preparation) -> None:
    """BadValueError where a model, an example or a preparation is not what engines are given,
    CalibrationError for 8 bits without images."""
    if wanted.precision not in PRECISIONS:
        raise UnknownNameError("precision", wanted.precision, PRECISIONS)
    if model.training:
        raise BadValueError("a model in training mode is not what will run", next_step=".eval()")
    for label, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type != "cpu" or tensor.dtype not in (torch.float32, torch.int64):
            raise BadValueError(
                f"{label} is {tensor.dtype} on {tensor.device}",
                why="engines get models in float32 on the CPU, and convert them themselves",
            )
    dtype = DTYPES[wanted.precision]
    if example.dim() != 4 or example.dtype != dtype or not _same(example.device, wanted.device):
        raise BadValueError(
            f"the example is {tuple(example.shape)}, {example.dtype}, on {example.device}",
            why=f"{wanted.precision} takes [B, C, H, W] of {dtype} on {wanted.device}",
        )
    wanted.profile(example)
    if wanted.precision in ("int8", "fp8") and not wanted.calibration:
        raise CalibrationError(
            f"{wanted.precision} has nothing to calibrate on",
            why="the ranges of the activations are measured on images",
            next_step="give real images: Preparation(calibration=(...))",
        )


def _same(one: torch.device, other: torch.device) -> bool:
    """cuda is cuda:0 where nobody has chosen another."""
    if one.type != other.type or one.type != "cuda":
        return one.type == other.type
    current = torch.cuda.current_device()
    return (current if one.index is None else one.index) == (
        current if other.index is None else other.index
    )


def _has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)
