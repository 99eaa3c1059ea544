"""Whole networks with and without convolutions that skip zeros, ready to be called.

| way           | what it is                                                                     |
|---------------|--------------------------------------------------------------------------------|
| `eager`       | torch, operator by operator, as models come                                    |
| `dense`       | our own dense path: batch normalisation folded, and on a GPU one CUDA graph    |
| `compile`     | torch.compile with its own compiler                                            |
| `narrowgauge` | our own engine, which fuses and chooses kernels                                |
| `sparse`      | `dense`, with every convolution behind a ReLU replaced by one that skips zeros |

`sparse` differs from `dense` in these layers alone, each of which takes its dense form where that
was faster in its calibration: a ratio of the two is what skipping zeros is worth.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import SkippedError, UnknownNameError
from narrowgauge_lab import turns
from narrowgauge_lab.engines import EngineCache, Preparation, Runner, prepare
from narrowgauge_lab.engines.base import DTYPES
from narrowgauge_lab.engines.native import TorchRunner, converted, laid_out
from narrowgauge_lab.engines.registry import require_here
from narrowgauge_lab.layers.sparse import calibrate, choices, convert, levels_for
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["WAYS", "Ready", "make_ready"]

WAYS = ("eager", "dense", "compile", "narrowgauge", "sparse")
#: Which engine runs a way on a GPU.
_ENGINES = {"eager": "eager", "dense": "cuda-graph", "compile": "compile"}
#: Of samples, at each share of zeros that a layer is calibrated at.
_PAIRS = 3


@dataclasses.dataclass(frozen=True, eq=False)
class Ready:
    """`runner` takes images like the example. `layers`: of `sparse`, how each convolution behind a
    ReLU is computed, and why; `left_alone`: the others, with the reason."""

    runner: Runner
    layers: Tuple[Dict[str, Any], ...] = ()
    left_alone: Dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def sparse_layers(self) -> int:
        """How many convolutions skip zeros on the example."""
        return sum(layer["chosen"] == "sparse" for layer in self.layers)


def make_ready(
    way: str,
    model: nn.Module,
    example: torch.Tensor,
    precision: str,
    calibrate_s: float,
    cache: Optional[EngineCache] = None,
) -> Ready:
    """`model` (eval, float32, CPU; it stays so) for inputs like `example`, on its device and in the
    precision's dtype. `calibrate_s`: seconds for each level of each different layer; 0 takes the
    sparse kernel wherever there is one. `cache`: where engines that can be kept are.

    Raises UnknownNameError, SkippedError where the way is not to be had here, and what the engine
    and the layers raise.
    """
    if way not in WAYS:
        raise UnknownNameError("way", way, WAYS)
    wanted = Preparation(precision, example.device, cache=cache)
    # Libraries try out algorithms here: beside others on the GPU each process would find another.
    with turns.alone():
        return _made(way, model, example, wanted, calibrate_s)


def _made(
    way: str, model: nn.Module, example: torch.Tensor, wanted: Preparation, calibrate_s: float
) -> Ready:
    if way == "sparse":
        return _sparse(model, example, wanted, calibrate_s)
    if way == "dense" and wanted.device.type != "cuda":
        require_here("eager", wanted.precision, wanted.device)
        layout = laid_out("auto", wanted)
        module = converted(fold_batch_norm(model), wanted, layout)
        return Ready(TorchRunner(module, module, wanted, example, layout))
    name = _ENGINES.get(way, way)
    require_here(name, wanted.precision, wanted.device)
    return Ready(prepare(name, model, example, wanted))


def _sparse(
    model: nn.Module, example: torch.Tensor, wanted: Preparation, calibrate_s: float
) -> Ready:
    require_here("cuda-graph" if wanted.device.type == "cuda" else "eager", wanted.precision,
                 wanted.device)  # fmt: skip
    layout = laid_out("auto", wanted)
    replaced = convert(fold_batch_norm(model))
    # Frozen, each weight is put into the kernels' order once.
    module = converted(replaced.model, wanted, layout).requires_grad_(False)
    example = example.to(dtype=DTYPES[wanted.precision])
    with torch.no_grad():
        first = choices(module, example)
        if not any(layer["chosen"] == "sparse" for layer in first):
            raise SkippedError(
                "this host has no convolution that skips zeros here",
                why=first[0]["why"] if first else "the example runs none of these layers",
                next_step="python -m narrowgauge_kernels.build",
            )
        if calibrate_s > 0:
            levels = levels_for(example.device)
            calibrate(module, example, levels=levels, pairs=_PAIRS, limit_s=calibrate_s)
        layers = choices(module, example)
    runner = _runner(module, wanted, example, layout)
    left_alone = {each.name: each.reason for each in replaced.left_alone}
    return Ready(runner, tuple(layers), left_alone)


def _runner(module: nn.Module, wanted: Preparation, example: torch.Tensor, layout: str) -> Runner:
    if wanted.device.type != "cuda":
        return TorchRunner(module, module, wanted, example, layout)
    from narrowgauge_lab.engines.graph import GraphRunner

    return GraphRunner(module, module, wanted, example, layout, benchmark=True)
