"""Our engine on a CPU: batch normalisation folded, channels_last, convolutions with bias, residual
and activation in one operator of oneDNN; the form and the number of threads chosen by measurement.

The network as torch runs it anyway is among the candidates, so what is chosen is never slower but
for what a call of the runner costs, some microseconds.
"""

from __future__ import annotations

import functools
import json
import time
from typing import Any, Callable, Dict, Mapping, Optional, Tuple

import torch
from torch import nn
from torch.nn import functional

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab.engines.base import DTYPES, LayerFact, Preparation, Runner
from narrowgauge_lab.engines.cache import Cached
from narrowgauge_lab.engines.keys import cache_key
from narrowgauge_lab.engines.native import of_batch
from narrowgauge_lab.engines.own.cpu.choice import Choice
from narrowgauge_lab.engines.own.cpu.forms import Form
from narrowgauge_lab.engines.own.cpu.int8 import INT8, activation_scales
from narrowgauge_lab.engines.own.cpu.threads import find_openmp, with_threads
from narrowgauge_lab.engines.own.cpu.trial import chosen, forms_of, made
from narrowgauge_lab.measure.probe import Observation, observe
from narrowgauge_lab.quant.x86 import choose_engine
from narrowgauge_lab.torch_compat import inference_mode

__all__ = ["OPTIONS", "CpuRunner", "prepare", "refuses"]

#: `threads`: 0 measures which number is best; `tune_s`: seconds for measuring, 0 takes the fused
#: form unmeasured; `search_s` is for GPUs.
OPTIONS: Mapping[str, Scalar] = {"threads": 0, "tune_s": 12.0, "search_s": 40.0}

#: So much slower than in float32, a convolution of 16 bits is one of 32 with casts around it.
_EMULATED = 1.0
_TRIES = 5


class CpuRunner(Runner):
    """A form with its threads. `choice` says what else was measured, and how it did."""

    def __init__(
        self, form: Form, threads: int, choice: Choice, wanted: Preparation, example: torch.Tensor
    ) -> None:
        self.profile = wanted.profile(example)
        self.choice = choice
        self._layers = form.layers
        self._call: Optional[Callable[[torch.Tensor], torch.Tensor]] = with_threads(
            form.call, threads
        )
        self._example = example
        self._observations: Optional[Tuple[Observation, ...]] = None

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self._call is not None
        with inference_mode():
            return self._call(x)

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._layers

    def observations(self) -> Optional[Tuple[Observation, ...]]:
        """Of one more call, when they are first asked for: in `prepare` it would cost as much."""
        if self._observations is None:
            self._observations = observe(lambda: self.run(self._example))
        return self._observations

    def close(self) -> None:
        super().close()
        self._call = None


def refuses(precision: str) -> str:
    """Why this processor does not run `precision`, or nothing. The first question about 16 bits
    takes a moment: a convolution is timed."""
    if precision == "fp32":
        return ""
    if precision == INT8:
        try:
            choose_engine()
        except NotApplicableError as error:
            return f"{error.what}: {error.why}"
        return ""
    if precision in ("bf16", "fp16"):
        return _slow(DTYPES[precision])
    return f"there are no {precision} products on CPUs"


@functools.lru_cache(maxsize=None)
def _slow(dtype: torch.dtype) -> str:
    """Why not to use a dtype: a convolution in it does not run, or is slower than in float32."""
    word = str(dtype).replace("torch.", "")
    images = torch.ones(1, 64, 28, 28).contiguous(memory_format=torch.channels_last)
    weight = torch.full((64, 64, 3, 3), 0.1).contiguous(memory_format=torch.channels_last)
    fewest: Dict[torch.dtype, float] = {}
    try:
        for _ in range(_TRIES):
            for kind in (torch.float32, dtype):
                x, w = images.to(kind), weight.to(kind)
                with inference_mode():
                    began = time.perf_counter()
                    functional.conv2d(x, w, padding=1)
                    taken = time.perf_counter() - began
                fewest[kind] = min(taken, fewest.get(kind, taken))
    except RuntimeError as error:
        return f"torch {torch.__version__} has no {word} convolution here: {error}".splitlines()[0]
    ratio = fewest[dtype] / fewest[torch.float32]
    if ratio <= _EMULATED:
        return ""
    return (
        f"a convolution in {word} takes {ratio:.1f} times as long as in float32: this processor "
        "has no such products, and torch emulates them"
    )


def prepare(model: nn.Module, example: torch.Tensor, wanted: Preparation) -> CpuRunner:
    """`model` (eval, float32; not changed) ready for inputs like `example`.

    With a cache, what was chosen is kept, and for int8 the activations' scales; the network is made
    anew from them. Raises CalibrationError for int8 without images, BadValueError for an option.
    """
    options = _options(wanted)
    best = of_batch(example, wanted.profile(example).best)
    # The choice holds for the caller's number of threads, which is what eager has.
    versions = {"threads": str(torch.get_num_threads())}
    cached: Optional[Cached] = None
    if wanted.cache is None:
        found = _decided(model, best, wanted, options)
    else:
        key = cache_key("narrowgauge", versions, model, example, wanted, options)
        cached = wanted.cache.fetch(
            key,
            lambda: json.dumps(_decided(model, best, wanted, options), sort_keys=True).encode(),
            _unusable,
        )
        found = json.loads(cached.payload)
    choice = Choice.from_dict(found["choice"])
    forms = forms_of(model, best, found["scales"])
    threads = choice.taken.threads
    runner = CpuRunner(made(forms, choice.taken, best), threads, choice, wanted, best)
    runner.profile = wanted.profile(example)
    if cached is not None:
        runner.from_cache, runner.cache_key = cached.from_cache, cached.key
        runner.cache_note = cached.note
    return runner


def _options(wanted: Preparation) -> Dict[str, Any]:
    options = {name: wanted.options.get(name, value) for name, value in OPTIONS.items()}
    threads = int(options["threads"])
    if threads < 0:
        raise BadValueError(f"threads={threads}", next_step="0 measures which number is best")
    if threads not in (0, torch.get_num_threads()) and find_openmp() is None:
        raise BadValueError(
            f"threads={threads} cannot be set for a call",
            why="this torch's OpenMP runtime is not found, or its convolutions do not bear it",
            next_step="leave it out, and set OMP_NUM_THREADS for the whole process",
        )
    return options


def _unusable(payload: bytes) -> str:
    """Why a kept decision cannot be used. Its bytes are those that were written."""
    choice = Choice.from_dict(json.loads(payload)["choice"])
    if choice.taken.threads not in (0, torch.get_num_threads()) and find_openmp() is None:
        return f"it was for {choice.taken.threads} threads, which cannot be set here"
    return ""


def _decided(
    model: nn.Module, example: torch.Tensor, wanted: Preparation, options: Mapping[str, Any]
) -> Dict[str, Any]:
    """What is worth keeping: the choice, and for int8 the scales."""
    is_int8 = wanted.precision == INT8
    scales = activation_scales(model, wanted.calibration) if is_int8 else {}
    choice = chosen(model, example, scales, int(options["threads"]), float(options["tune_s"]))
    return {"choice": choice.to_dict(), "scales": scales}
