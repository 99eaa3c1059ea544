"""Whole backends: layers whose three products another library runs, copies and all.

A whole backend takes tensors of the CPU and gives tensors of the CPU. It moves them itself, by its
own rules, and tells the ledger what it moved and what that took.
"""

from __future__ import annotations

import abc
import dataclasses
import importlib
from typing import Dict, Optional, Sequence, Tuple, Type

import torch

from narrowgauge_contract.errors import SkippedError, UnknownNameError
from narrowgauge_contract.placement import Transfers
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem

__all__ = ["WHOLE_BACKENDS", "BackendOptions", "WholeBackend", "make_backend", "missing"]

#: Where each lives; imported when asked for, since one of them asks for TensorRT.
WHOLE_BACKENDS: Dict[str, Tuple[str, str]] = {
    "faithful": ("narrowgauge_lab.layers.hetero.backends.faithful", "FaithfulBackend"),
    "tensorrt": ("narrowgauge_lab.layers.hetero.backends.tensorrt", "TensorrtBackend"),
}


@dataclasses.dataclass(frozen=True)
class BackendOptions:
    """What a plan says beside where and in what.

    `stride_bug`: the original's wrong weight gradient at stride 2 (faithful only); `dla`: which
    DLA core runs the passes, None for the GPU.
    """

    stride_bug: bool = False
    dla: Optional[int] = None
    transfers: Transfers = dataclasses.field(default_factory=Transfers)


class WholeBackend(abc.ABC):
    """The products of one layer at one precision. Tensors are float32, on the CPU, dense.

    A layer whose passes differ in precision or device has one of these for each kind. The
    constructor builds nothing that depends on a shape; batches may change from call to call.
    """

    def __init__(
        self,
        layer: str,
        problem: Problem,
        precision: str,
        device: torch.device,
        ledger: Ledger,
        options: BackendOptions,
    ) -> None:
        self.layer = layer
        self.problem = problem
        self.precision = precision
        self.device = device
        self.ledger = ledger
        self.options = options

    @property
    def notes(self) -> Tuple[str, ...]:
        """What went otherwise than the plan asks, for the record."""
        return ()

    @abc.abstractmethod
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        """The layer's output."""

    @abc.abstractmethod
    def input_grad(
        self, grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor:
        """The gradient by the input, from that by the output."""

    @abc.abstractmethod
    def weight_grad(
        self, grad: torch.Tensor, x: torch.Tensor, weight_shape: Sequence[int]
    ) -> torch.Tensor:
        """The gradient by the weight. That by the bias is the layer's business."""

    def close(self) -> None:
        """Let go of engines and buffers; calls after it are errors."""
        return

    @classmethod
    def missing(cls, device: torch.device) -> str:
        """What this host lacks for the backend on `device`, in words; empty where it can run."""
        del device
        return ""


def backend_class(name: str) -> Type[WholeBackend]:
    """The class by its name in `WHOLE_BACKENDS`. Raises UnknownNameError."""
    if name not in WHOLE_BACKENDS:
        raise UnknownNameError("backend", name, WHOLE_BACKENDS)
    module, attribute = WHOLE_BACKENDS[name]
    found: Type[WholeBackend] = getattr(importlib.import_module(module), attribute)
    return found


def missing(name: str, device: torch.device) -> str:
    """What this host lacks for the backend, or an empty text. Raises UnknownNameError."""
    return backend_class(name).missing(device)


def make_backend(
    name: str,
    layer: str,
    problem: Problem,
    precision: str,
    device: torch.device,
    ledger: Ledger,
    options: BackendOptions,
) -> WholeBackend:
    """A backend for one layer. Raises UnknownNameError; SkippedError for what this host
    lacks; NotApplicableError for what the backend cannot do with this layer."""
    kind = backend_class(name)
    lacking = kind.missing(device)
    if lacking:
        raise SkippedError(
            f"the backend '{name}' of layer '{layer}' cannot run here",
            why=lacking,
            next_step='backend = "torch" runs everywhere; see `narrowgauge doctor`',
        )
    return kind(layer, problem, precision, device, ledger, options)
