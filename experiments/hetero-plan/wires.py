"""What it costs to send a tensor: the copy itself, what both ends do to it, and what every call
costs however small it is."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterator, List, Tuple

import torch
from torch import nn

from narrowgauge_contract.placement import PassPlacement
from narrowgauge_contract.placement_costs import ConversionCost, CopyCost, FixedCost
from narrowgauge_kernels import wire as wire_kernels
from narrowgauge_lab.layers.hetero.convert import convert
from narrowgauge_lab.layers.hetero.late import deferred_weight_grads
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.wire import DTYPES, Codec
from narrowgauge_lab.layers.passes import Problem, passes_for

from .instrument import CPU, Instrument, Part
from .layers import over_the_bus, plan_of

__all__ = ["conversions", "copies", "fixed"]

#: Bytes of a copy: from where its start is all that counts to where it is nothing.
_BYTES = (1 << 12, 1 << 15, 1 << 18, 1 << 21, 1 << 24)
#: Elements of what is packed; a batch of maps of 16 channels.
_ELEMENTS = (1 << 14, 1 << 17, 1 << 20)
_CHANNELS = 16
_TINY = (2, 8)


def copies(by: Instrument) -> Tuple[CopyCost, ...]:
    """Copies each way. On a CPU that stands in for an accelerator, between two buffers."""
    cuda = by.device.type == "cuda"
    parts = []
    for size in _BYTES:
        far = torch.randint(0, 100, (size,), dtype=torch.uint8, device=by.device)
        for policy in ("pageable", "pinned", "mapped") if by.built else ("pageable", "pinned"):
            near = torch.randint(0, 100, (size,), dtype=torch.uint8)
            if cuda and policy != "pageable":
                near = near.pin_memory()
            for direction, into, source in (("up", far, near), ("down", near, far)):
                call = _copy(into, source, policy)
                parts.append(
                    Part((policy, direction, size), call, by.device, host=policy == "pageable")
                )
    found = by.sweep(parts)
    return tuple(
        CopyCost(
            policy=policy,
            direction=direction,
            bytes=size,
            seconds=timed.seconds,
            host_seconds=timed.host_seconds,
        )
        for (policy, direction, size), timed in found.items()
    )


def _copy(into: torch.Tensor, source: torch.Tensor, policy: str) -> Callable[[], Any]:
    if policy == "mapped":
        return lambda: wire_kernels.mapped_copy(into, source)
    return lambda: into.copy_(source, non_blocking=policy == "pinned")


def conversions(by: Instrument, wires: Tuple[str, ...]) -> Tuple[ConversionCost, ...]:
    """What the host and the accelerator do to a tensor before it goes and when it has come."""
    parts = []
    for side, device in (("cpu", CPU), ("accelerator", by.device)):
        codec = Codec(device)
        for elements in _ELEMENTS:
            x = torch.randn(32, _CHANNELS, elements // (32 * _CHANNELS), device=device)
            for wire in wires:
                for direction, call in _conversions(codec, x, wire, device):
                    parts.append(Part((side, direction, wire, elements), call, device))
    found = by.sweep(parts)
    return tuple(
        ConversionCost(
            side=side, direction=direction, wire=wire, elements=elements, seconds=timed.seconds
        )
        for (side, direction, wire, elements), timed in found.items()
    )


def _conversions(
    codec: Codec, x: torch.Tensor, wire: str, device: torch.device
) -> Iterator[Tuple[str, Callable[[], Any]]]:
    staged = torch.empty_like(x, dtype=DTYPES[wire])
    if device.type == "cpu" and torch.cuda.is_available():
        staged = staged.pin_memory()
    back = torch.empty_like(x)
    if wire != "int8":
        yield "pack", lambda: staged.copy_(x)
        yield "unpack", lambda: back.copy_(staged)
        return
    scale = torch.empty(x.shape[1], device=device)
    codec.pack(staged, scale, x, 1)
    yield "pack", lambda: codec.pack(staged, scale, x, 1)
    yield "unpack", lambda: codec.unpack(back, staged, scale)


def fixed(by: Instrument) -> Tuple[FixedCost, ...]:
    """What calls cost however small they are; see `placement_costs.FIXED`."""
    parts: List[Part] = []
    for name, device in (("cpu", CPU), ("accelerator", by.device)):
        parts += [Part((key, name), call, device) for key, call in _local(device, by.device)]
    for count in (1, 5):
        for kind, call in _stacks(count, by.device):
            parts.append(Part((f"{kind}.{count}", "accelerator"), call, by.device, host=True))
    found = by.sweep(parts)
    return tuple(
        FixedCost(name=name, device=device, seconds=timed.host_seconds)
        for (name, device), timed in found.items()
    )


def _local(
    device: torch.device, accelerator: torch.device
) -> Iterator[Tuple[str, Callable[[], Any]]]:
    x = torch.randn(_TINY, device=device, requires_grad=True)
    view, grad = x.view(-1), torch.ones(x.numel(), device=device)
    yield "engine", lambda: torch.autograd.grad(view, x, grad, retain_graph=True)
    layer = nn.Linear(_TINY[1], _TINY[1]).to(device)
    home = "cpu" if device.type == "cpu" else "accelerator"
    plan = plan_of("parts", PassPlacement(home, "fp32"), "fp32", elsewhere=home)
    # A ledger that keeps something, or the layer would stay torch's own.
    convert(layer, plan, accelerator, Ledger("bytes"))
    weight, bias = layer.weight.detach(), layer.bias.detach()
    y = layer(x)
    above = torch.randn_like(y)
    yield "local.forward", lambda: layer(x)
    by = (x, layer.weight)
    yield "local.backward", lambda: torch.autograd.grad(y, by, above, retain_graph=True)
    passes = passes_for("fp32", device, Problem("linear"), torch.float32)

    def backward() -> None:
        passes.input_grad(above, weight, _TINY)
        passes.weight_grad(above, x, weight.shape)

    yield "tiny.forward", lambda: passes.forward(x, weight, bias)
    yield "tiny.backward", backward


def _stacks(count: int, device: torch.device) -> Iterator[Tuple[str, Callable[[], Any]]]:
    """Backward passes of so many tiny layers over the bus: `late` with their weights' gradients."""
    for kind in ("late", "kept"):
        layers = [nn.Linear(_TINY[1], _TINY[1], bias=False) for _ in range(count)]
        model = nn.Sequential(*layers)
        over_the_bus(model, "fp32", "fp32", device)
        x = torch.randn(_TINY, requires_grad=True)
        weights = [layer.weight for layer in layers] if kind == "late" else []
        for layer in layers:
            layer.weight.requires_grad_(kind == "late")
        y = model(x)
        yield kind, _Backward(y, (x, *weights), torch.randn_like(y))


@dataclasses.dataclass(frozen=True)
class _Backward:
    """A backward pass with late weight gradients; the graph stays."""

    y: torch.Tensor
    by: Tuple[torch.Tensor, ...]
    grad: torch.Tensor

    def __call__(self) -> None:
        with deferred_weight_grads():
            torch.autograd.grad(self.y, self.by, self.grad, retain_graph=True)
