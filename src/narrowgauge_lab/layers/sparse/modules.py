"""ReLU and convolution in one layer, which skips the zeros that the ReLU makes."""

from __future__ import annotations

from typing import Any, Callable, Dict, NamedTuple, Optional, Tuple, Union

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError, UsageError
from narrowgauge_lab.layers.sparse import backends
from narrowgauge_lab.layers.sparse.backends import Call
from narrowgauge_lab.layers.sparse.prepared import Prepared
from narrowgauge_lab.layers.sparse.settings import Crossover, Key, Settings, key_of

__all__ = ["SparseConv2d", "obstacle", "padding_of"]

_Size = Union[int, Tuple[int, int]]
#: One of `settings.BACKENDS` that is not `auto`, and what says why: few ask.
_Choice = Tuple[str, Callable[[], str]]


class _Seen(NamedTuple):
    """The last map on a CPU that was calibrated: small layers take as long as looking all of this
    up for them."""

    shape: torch.Size
    strides: Tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    threads: int
    key: Key
    crossover: Crossover

    def holds(self, x: torch.Tensor, crossovers: Dict[Key, Crossover]) -> bool:
        """Whether x is such a map, and nothing else was measured since, or forgotten. Never while
        torch traces: it takes no operator that gives a number, as counting zeros does."""
        return (
            torch._C._get_tracing_state() is None
            and x.shape == self.shape
            and x.stride() == self.strides
            and x.dtype is self.dtype
            and x.device == self.device
            and torch.get_num_threads() == self.threads
            and crossovers.get(self.key) is self.crossover
        )


class SparseConv2d(nn.Conv2d):
    """relu_output(conv(relu_input(x)) + bias), with nn.Conv2d's constructor and state dict.

    `backend` is one of `settings.BACKENDS`; `auto` on a CPU goes by the zeros of each map, of a
    large one by those of a sample of `backends.SAMPLE` elements. `crossovers`: what
    `calibration.calibrate` measured, by device, dtype, shape and order of the map
    (`settings.key_of`), and `switches`: likewise, of `switched`; no part of the state dict.
    Gradients are torch's dense ones. On CUDA, call it once before it is captured in a graph: the
    first call compiles; one layer is for one stream; and a weight that requires no gradient is put
    into the kernels' order once, others at each call.

    x is [B, C, H, W] in the weight's dtype: unlike nn.Conv2d it takes no [C, H, W], and inside of
    autocast it casts nothing.
    """

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size = 1,
        padding: Union[str, _Size] = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
        *,
        relu_input: bool = True,
        relu_output: bool = False,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias,
            padding_mode,
        )  # fmt: skip
        # torch 1.8's constructor has no device and no dtype.
        self.to(device=device, dtype=dtype)
        why = obstacle(self)
        if why:
            raise NotApplicableError("this convolution cannot skip zeros", why=why)
        self.adopt(Settings(relu_input, relu_output, backend))

    def adopt(self, settings: Settings) -> None:
        """Take settings; what was measured under others is forgotten."""
        self.settings: Settings = settings
        self.crossovers: Dict[Key, Crossover] = {}
        self.switches: Dict[Key, Crossover] = {}
        self.prepared: Prepared = Prepared()
        self._seen: Optional[_Seen] = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self._check(x)
        call = self.call()
        return self._by(self._chosen(call, x)[0], call, x)

    def by(self, chosen: str, x: torch.Tensor) -> torch.Tensor:
        """The layer of x, computed by what `choose` may give."""
        return self._by(chosen, self.call(), x)

    def _by(self, chosen: str, call: Call, x: torch.Tensor) -> torch.Tensor:
        if chosen == "dense":
            return backends.dense(call, x)
        if chosen == "reference":
            return backends.reference(call, x)
        if chosen == "switched":
            switch = self.switches.get(key_of(x))
            return backends.sparse(call, x, self.prepared, switch.zeros if switch else 0.0)
        return backends.sparse(call, x, self.prepared)

    def choose(self, x: torch.Tensor) -> Tuple[str, str]:
        """(one of `settings.BACKENDS` that is not `auto`, why) for this map.

        Raises NotApplicableError where `sparse` or `switched` is asked for by name and there is no
        kernel.
        """
        name, why = self._chosen(self.call(), x)
        return name, why()

    def _chosen(self, call: Call, x: torch.Tensor) -> _Choice:
        asked, seen = self.settings.backend, self._seen
        if asked == "auto" and seen is not None and seen.holds(x, self.crossovers):
            return self._by_crossover(seen.crossover, x)
        if asked in ("dense", "reference"):
            return asked, _asked_for
        missing = backends.lacking(call, x, self.prepared)
        if asked == "switched" and x.device.type != "cuda":
            missing = f"no device switch on {x.device}: it is of the generated CUDA kernels"
        if missing and asked != "auto":
            raise NotApplicableError(
                f"a sparse layer cannot skip zeros on {x.device}",
                why=missing,
                next_step="backend='auto' takes torch's dense operators then",
            )
        if missing:
            return "dense", lambda: missing
        if asked != "auto":
            return asked, _asked_for
        key = key_of(x)
        crossover = self.crossovers.get(key)
        if crossover is None:
            return "sparse", lambda: "not calibrated for such a map"
        if x.device.type == "cpu" and torch._C._get_tracing_state() is None:
            self._seen = _Seen(
                x.shape, x.stride(), x.dtype, x.device, torch.get_num_threads(), key, crossover
            )
        return self._by_crossover(crossover, x)

    def _by_crossover(self, crossover: Crossover, x: torch.Tensor) -> _Choice:
        on_cpu = x.device.type == "cpu"
        own = None if on_cpu else crossover.says_by_own()
        if own is not None:
            # Counting would make the host wait, and a CUDA graph cannot.
            return (
                own,
                lambda: (
                    f"{own} was faster on the map of the calibration, of which "
                    f"{crossover.own_zeros:.3f} were zeros"
                ),
            )
        if not crossover.needs_count:
            always = "always" if crossover.zeros <= 0 else "never"
            return crossover.says(), lambda: f"skipping is {always} faster here, as measured"
        if not on_cpu:
            return (
                crossover.says(),
                lambda: (
                    f"{crossover.own_zeros:.3f} of the calibrated map are zeros, and skipping is "
                    f"faster from {crossover.zeros:.3f} on"
                ),
            )
        zeros = backends.sampled_zeros(x, self.settings.relu_input)
        return (
            crossover.says(zeros),
            lambda: (
                f"{zeros:.3f} of the map are zeros, and skipping is faster from "
                f"{crossover.zeros:.3f} on"
            ),
        )

    def call(self) -> Call:
        """What it computes, for `backends`."""
        stride, settings = (self.stride[0], self.stride[1]), self.settings
        return Call(
            self.weight, self.bias, stride, padding_of(self), settings.relu_input,
            settings.relu_output,
        )  # fmt: skip

    def _check(self, x: torch.Tensor) -> None:
        if x.dim() != 4 or x.shape[1] != self.in_channels:
            raise UsageError(
                f"a SparseConv2d got an input of shape {list(x.shape)}, and takes "
                f"[B, {self.in_channels}, H, W]"
            )
        weight = self.weight
        if x.device == weight.device and x.dtype is weight.dtype:
            return
        what, one, other = "of", x.dtype, weight.dtype
        if x.device != weight.device:
            what, one, other = "on", x.device, weight.device
        raise UsageError(
            f"a SparseConv2d {what} {other} got a tensor {what} {one}",
            next_step="move the model and its input to one device and one dtype",
        )

    def extra_repr(self) -> str:
        held = [name for name in ("relu_input", "relu_output") if getattr(self.settings, name)]
        return f"{super().extra_repr()}, {', '.join([*held, 'backend=' + self.settings.backend])}"


def _asked_for() -> str:
    return "asked for"


def obstacle(module: nn.Conv2d) -> str:
    """Why the zeros of a convolution's map cannot be skipped; empty where they can."""
    if module.groups != 1:
        return f"it has {module.groups} groups, and the sparse kernels have none"
    if any(each != 1 for each in module.dilation):
        return f"its dilation is {tuple(module.dilation)}, and the sparse kernels have none"
    if module.padding_mode != "zeros":
        return f"its padding_mode is '{module.padding_mode}': only zeros are skipped"
    try:
        padding_of(module)
    except ValueError as error:
        return str(error)
    return ""


def padding_of(module: nn.Conv2d) -> Tuple[int, int]:
    """(height, width) on both sides. ValueError where the sides differ."""
    padding: Any = module.padding
    if not isinstance(padding, str):
        return padding[0], padding[1]
    if padding == "valid":
        return 0, 0
    total = [each - 1 for each in module.kernel_size]
    if any(each % 2 for each in total):
        raise ValueError(f"padding '{padding}' differs between sides for a window of even size")
    return total[0] // 2, total[1] // 2
