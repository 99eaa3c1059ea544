"""XLA through jax: the network translated operator by operator. The one module that imports jax."""

from __future__ import annotations

import contextlib
import functools
import os
import re
from typing import Any, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.base import DTYPES, Engine, LayerFact, Preparation, Runner
from narrowgauge_lab.engines.native import held_bytes, of_batch
from narrowgauge_lab.engines.xla_operators import Library, translate
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["ENGINE", "XlaEngine", "XlaRunner", "layer_facts"]

_WORDS = {"f32": "fp32", "f16": "fp16", "bf16": "bf16", "s8": "int8", "u8": "int8", "f64": "fp64"}
#: An instruction of HLO's text that is a product, or a call of cuDNN's or cuBLAS's for one.
_INSTRUCTION = re.compile(
    r"%?(?P<name>[\w.\-]+) = \(?(?P<type>\w+)\[.*? (?P<operator>convolution|dot|custom-call)\("
)
_TARGET = re.compile(r'custom_call_target="([^"]+)"')
_SCOPE = re.compile(r'op_name="[^"]*?jit\(\w+\)/([^"]+)/[^"/]+"')


class XlaEngine(Engine):
    """Products of float32 are asked for at the highest precision, of tf32 at the default one, which
    on a GPU is TF32."""

    name = "xla"

    def missing(self, device: torch.device) -> str:
        try:
            jax = _jax()
        except NotApplicableError as error:
            return f"{error.why}: {error.next_step}"
        try:
            jax.devices(_platform(device))
        except RuntimeError as error:
            return f"this jax has no {device.type}: {str(error).splitlines()[0]}"
        return ""

    def refuses(self, precision: str, device: torch.device) -> str:
        if precision in ("int8", "fp8"):
            return "its translator has no 8-bit convolutions"
        if device.type == "cpu" and precision in ("fp16", "bf16"):
            ran = _runs_as(precision)
            return "" if ran == precision else f"on a CPU it takes products of {precision} in {ran}"
        return ""

    def prepare(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> Runner:
        self.chosen(wanted)
        return XlaRunner(fold_batch_norm(model), example, wanted)


class XlaRunner(Runner):
    """A compiled program per batch size, that of the best batch at once; weights are arguments, so
    that they are no part of it. Arrays are handed over by address."""

    def __init__(self, model: nn.Module, example: torch.Tensor, wanted: Preparation) -> None:
        self.engine = XlaEngine.name
        self.profile = wanted.profile(example)
        self._jax = jax = _jax()
        strict = jax.lax.Precision.HIGHEST if wanted.precision == "fp32" else None
        library = Library(jax, jax.numpy, jax.lax, strict)
        self._function: Any = jax.jit(translate(model, library))
        self._device = _device(jax, wanted.device)
        dtype = DTYPES[wanted.precision]
        self._weights: Optional[Dict[str, Any]] = {
            name: jax.device_put(self._array(tensor.detach().to(dtype)), self._device)
            for name, tensor in (*model.named_parameters(), *model.named_buffers())
        }
        self._held = held_bytes(model.to(dtype))
        self._compiled: Dict[int, Any] = {}
        first = of_batch(example, self.profile.best)
        self.run(first)
        program = self._compiled[first.shape[0]]
        self._facts = tuple(layer_facts(program.as_text(), wanted.precision))
        self._work = int(getattr(program.memory_analysis(), "temp_size_in_bytes", 0))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        images = self._array(x)
        count = x.shape[0]
        if count not in self._compiled:
            self._compiled[count] = self._function.lower(self._weights, images).compile()
        result = self._compiled[count](self._weights, images)
        if x.device.type == "cpu":
            # Its threads may still read `x`, which the caller may write to from now on. On a GPU
            # taking the result makes torch's stream wait.
            result.block_until_ready()
        return torch.from_dlpack(result)

    def _array(self, x: torch.Tensor) -> Any:
        return self._jax.dlpack.from_dlpack(x.detach().contiguous())

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._facts

    def memory_bytes(self) -> Optional[int]:
        return None if self._held is None else self._held + self._work

    def close(self) -> None:
        super().close()
        self._compiled.clear()
        self._function = self._weights = None


def layer_facts(hlo: str, precision: str) -> Iterator[LayerFact]:
    """The products of a compiled program's text. A layer's name is in the instruction's metadata,
    which some of XLA's passes drop; the precision is that of what it gives."""
    for line in hlo.splitlines():
        found = _INSTRUCTION.search(line)
        if found is None:
            continue
        target, scope = _TARGET.search(line), _SCOPE.search(line)
        operator = found["operator"]
        if target and not any(word in target[1].lower() for word in ("conv", "gemm", "matmul")):
            continue
        word = _WORDS.get(found["type"], found["type"])
        # Nothing in the text tells TF32 but that the highest precision is not asked for.
        if word == "fp32" and precision == "tf32" and "highest" not in line:
            word = "tf32"
        kernel = target[1] if target else ""
        named = "convolution" if "conv" in kernel.lower() else "dot" if kernel else operator
        yield LayerFact(scope[1] if scope else found["name"], named, "xla", kernel, word)


@functools.lru_cache(maxsize=None)
def _runs_as(precision: str) -> str:
    """The precision in which a convolution asked for in `precision` is compiled on the CPU."""
    example = torch.zeros(1, 1, 4, 4, dtype=DTYPES[precision])
    wanted = Preparation(precision, torch.device("cpu"))
    runner = XlaRunner(nn.Sequential(nn.Conv2d(1, 1, 3)).eval(), example, wanted)
    return next((fact.precision for fact in runner.layers()), "no convolution")


def _platform(device: torch.device) -> str:
    return "gpu" if device.type == "cuda" else device.type


def _device(jax: Any, device: torch.device) -> Any:
    there = jax.devices(_platform(device))
    if device.type != "cuda":
        return there[0]
    return there[torch.cuda.current_device() if device.index is None else device.index]


@functools.lru_cache(maxsize=None)
def _jax() -> Any:
    """jax with its devices opened, and so that it does not take three quarters of a GPU's memory at
    once, which is what it does otherwise and what it asks the environment about only here."""
    try:
        import jax
        import jax.dlpack
        import jax.numpy
    except ImportError as error:
        raise NotApplicableError(
            "this Python has no jax", why="jax is not installed", next_step="pip install jax"
        ) from error
    with _environment("XLA_PYTHON_CLIENT_PREALLOCATE", "false"):
        jax.devices()
    return jax


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """A variable for the length of a block, where nobody has set it."""
    if name in os.environ:
        yield
        return
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]


ENGINE = XlaEngine()
