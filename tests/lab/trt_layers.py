"""Layers by TensorRT's stand-in, for the tests of that backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional, Tuple

import torch
from hetero_cases import Case, gradients, make, relative_error
from trt_cases import CPU, put
from trt_convolving import Convolving

from narrowgauge_lab.layers.hetero.backends import BackendOptions, make_backend
from narrowgauge_lab.layers.hetero.backends.tensorrt import TensorrtBackend
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem

TOLERANCE = {"fp32": 1e-5, "tf32": 1e-5, "fp16": 3e-3}


class Bench:
    """Makes backends over one stand-in."""

    def __init__(self, monkeypatch: Any, folder: Path) -> None:
        self._monkeypatch = monkeypatch
        monkeypatch.setenv("XDG_CACHE_HOME", str(folder))

    def backend(
        self, world: Convolving, problem: Problem, precision: str = "fp32",
        ledger: Optional[Ledger] = None, **options: Any,
    ) -> TensorrtBackend:  # fmt: skip
        engine = put(world, self._monkeypatch)
        self._monkeypatch.setattr(engine, "missing", lambda device: "")
        self._monkeypatch.setattr(TensorrtBackend, "engine", engine)
        if precision == "fp16" and not hasattr(world.trt.BuilderFlag, "FP16"):
            world.file_type = "HALF"
        made = make_backend(
            "tensorrt", "conv", problem, precision, CPU, ledger or Ledger("bytes"),
            BackendOptions(**options),
        )  # fmt: skip
        assert isinstance(made, TensorrtBackend)
        return made


def products(made: TensorrtBackend, case: Case) -> Tuple[torch.Tensor, ...]:
    return (
        made.forward(case.x, case.weight, case.bias),
        made.input_grad(case.grad, case.weight, case.x.shape),
        made.weight_grad(case.grad, case.x, case.weight.shape),
    )


def check(made: TensorrtBackend, case: Case) -> None:
    for name, found, wanted in zip(("y", "gx", "gw"), products(made, case), gradients(case)):
        assert (name, found.dtype, found.shape) == (name, torch.float32, wanted.shape)
        assert relative_error(found, wanted) <= TOLERANCE[made.precision], name


def batch(count: int) -> Case:
    problem = Problem("conv2d", padding=(1, 1))
    return make(f"batch of {count}", problem, (count, 4, 8, 8), 6, (3, 3), bias=True)
