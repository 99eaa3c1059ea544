"""Networks as torch itself runs them: what the engines share that call a module of torch."""

from __future__ import annotations

import contextlib
import copy
from typing import Callable, Dict, Iterator, Optional, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError
from narrowgauge_contract.parameters import Scalar
from narrowgauge_lab import precision as precisions
from narrowgauge_lab import tf32_flags, torch_compat
from narrowgauge_lab.engines.base import DTYPES, LayerFact, Preparation, Runner
from narrowgauge_lab.measure.probe import Observation, observe
from narrowgauge_lab.quant.layers import layers_of
from narrowgauge_lab.quant.x86 import Int8Layer
from narrowgauge_lab.transforms import to_channels_last

__all__ = [
    "LAYOUT", "MathFlags", "TorchRunner", "converted", "float_refused", "held_bytes", "laid_out",
    "of_batch",
]  # fmt: skip

Call = Callable[[torch.Tensor], torch.Tensor]

#: The option `layout`. auto: channels_last for 16 bits, in which tensor cores want it.
LAYOUT = "auto"
_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def float_refused(precision: str, device: torch.device) -> str:
    """Why torch's float operators have no such precision on `device`, or nothing."""
    if precision in ("int8", "fp8"):
        return f"torch has no {precision} convolutions here; engine=narrowgauge has on CUDA"
    works = precisions.available(device)
    if precision not in works:
        return f"torch {torch.__version__} has {', '.join(works)} on {device.type}"
    return ""


def laid_out(asked: Scalar, wanted: Preparation) -> str:
    """`contiguous` or `channels_last`, of the option `layout`. Raises BadValueError."""
    if asked == "auto":
        return "channels_last" if wanted.precision in ("fp16", "bf16") else "contiguous"
    if asked not in _FORMATS:
        raise BadValueError(f"layout '{asked}' is none", next_step=f"auto, {', '.join(_FORMATS)}")
    return str(asked)


def converted(model: nn.Module, wanted: Preparation, layout: str) -> nn.Module:
    """A copy of `model` on the device, in the precision's dtype and in `layout`."""
    new = to_channels_last(model) if layout == "channels_last" else copy.deepcopy(model)
    return new.to(device=wanted.device, dtype=DTYPES[wanted.precision])


def of_batch(example: torch.Tensor, count: int) -> torch.Tensor:
    """`count` images: the example's, over and over."""
    if example.shape[0] == count:
        return example
    if example.shape[0] == 0:
        return torch.zeros(count, *example.shape[1:], dtype=example.dtype, device=example.device)
    return example[torch.arange(count, device=example.device) % example.shape[0]]


def held_bytes(module: nn.Module) -> Optional[int]:
    """Bytes of parameters and buffers; None where weights are packed, and no longer among them."""
    if any(isinstance(each, Int8Layer) for each in module.modules()):
        return None
    tensors = [*module.parameters(), *module.buffers()]
    return sum(each.numel() * each.element_size() for each in tensors)


class MathFlags:
    """TF32 and cudnn.benchmark as a runner was prepared with: they are the process's, and another
    runner may have been prepared with others since."""

    def __init__(self, wanted: Preparation, benchmark: bool) -> None:
        on_cuda = wanted.device.type == "cuda"
        single = DTYPES[wanted.precision] == torch.float32
        self._tf32: Optional[bool] = wanted.precision == "tf32" if on_cuda and single else None
        self._benchmark: Optional[bool] = benchmark if on_cuda else None

    def hold(self) -> bool:
        """Whether they are as they have to be. Asked at each call, and cheaper than setting them:
        a network at batch 1 is bound by what the host does."""
        cudnn = torch.backends.cudnn
        if self._benchmark is not None and cudnn.benchmark != self._benchmark:
            return False
        if self._tf32 is None:
            return True
        return all(each == self._tf32 for each in tf32_flags.tf32_allowed().values())

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Set them for the length of a block."""
        cudnn = torch.backends.cudnn
        with contextlib.ExitStack() as stack:
            if self._tf32 is not None:
                stack.enter_context(tf32_flags.tf32_set_to(self._tf32))
            if self._benchmark is not None:
                stack.callback(setattr, cudnn, "benchmark", cudnn.benchmark)
                cudnn.benchmark = self._benchmark
            yield


class TorchRunner(Runner):
    """Calls `call`, which runs the layers of `module`, on inputs in `layout`.

    `observed` gives the observations of a first call; the probe sees operators one by one where
    nothing is said.
    """

    def __init__(
        self,
        call: Call,
        module: nn.Module,
        wanted: Preparation,
        example: torch.Tensor,
        layout: str,
        benchmark: bool = False,
        observed: Callable[[Callable[[], object]], Tuple[Observation, ...]] = observe,
    ) -> None:
        self.profile = wanted.profile(example)
        self._call: Optional[Call] = call
        self._module: Optional[nn.Module] = module
        self._format = _FORMATS[layout]
        self._flags = MathFlags(wanted, benchmark)
        self._facts = _facts(module, wanted.precision)
        self._held = held_bytes(module)
        first = of_batch(example, self.profile.best)
        self._observations = observed(lambda: self.run(first))

    def run(self, x: torch.Tensor) -> torch.Tensor:
        assert self._call is not None
        with torch_compat.inference_mode():
            x = x.contiguous(memory_format=self._format)
            if self._flags.hold():
                return self._call(x)
            with self._flags.in_force():
                return self._call(x)

    def layers(self) -> Tuple[LayerFact, ...]:
        return self._facts

    def observations(self) -> Optional[Tuple[Observation, ...]]:
        return self._observations

    def memory_bytes(self) -> Optional[int]:
        return self._held

    def close(self) -> None:
        super().close()
        self._call = self._module = None


def _facts(module: nn.Module, precision: str) -> Tuple[LayerFact, ...]:
    """Convolutions and linear layers, as they are stored; which kernel of cuDNN or oneDNN runs one,
    torch does not tell."""
    words: Dict[torch.dtype, str] = {
        torch.float32: "tf32" if precision == "tf32" else "fp32",
        torch.float16: "fp16", torch.bfloat16: "bf16",
    }  # fmt: skip
    floats = layers_of(module)
    facts = []
    for name, layer in module.named_modules():
        if name in floats:
            kind = type(layer).__name__
            facts.append(LayerFact(name, kind, "torch", "", words[layer.weight.dtype]))
        elif isinstance(layer, Int8Layer):
            facts.append(LayerFact(name, "Int8Layer", f"torch {layer.engine}", "", "int8"))
    return tuple(facts)
