"""What everything between the placed layers costs: a training step whose layers do nothing.

Each layer is replaced by a stub that gives random tensors of the right shape, which were made
before, and notes when it was called. What lies between two calls is the segment between two layers.
"""

from __future__ import annotations

import copy
import functools
import time
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from narrowgauge_contract.placement_costs import PlacedLayer, SegmentCost, Shape
from narrowgauge_lab.errors import HeldTooLongError
from narrowgauge_lab.layers.hetero.elsewhere import place_elsewhere
from narrowgauge_lab.measure import samplers
from narrowgauge_lab.optim import SGD

from .instrument import CPU, Instrument, rounded
from .subjects import Subject

__all__ = ["StubbedStep", "segments"]

_WARM_UP, _LEAST = 5, 5
#: (direction, after) of a segment that a mark ends.
_Key = Tuple[str, str]


class _Clock:
    """Marks in the order of time: by the host's clock and, on CUDA, by events as well."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.marks: List[Tuple[Optional[_Key], float, Any]] = []

    def mark(self, ends: Optional[_Key]) -> None:
        """What lies between the mark before and this one belongs to `ends`; None: to a stub."""
        event = None
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        self.marks.append((ends, time.perf_counter(), event))

    def take(self) -> Dict[_Key, Tuple[float, float]]:
        """(seconds, host seconds) of each segment, and begin anew. The device has to be idle."""
        found: Dict[_Key, Tuple[float, float]] = {}
        for (_, before, first), (key, after, last) in zip(self.marks, self.marks[1:]):
            if key is not None:
                host = after - before
                seconds = first.elapsed_time(last) / 1e3 if self._cuda else host
                old = found.get(key, (0.0, 0.0))
                found[key] = (old[0] + seconds, old[1] + host)
        self.marks = []
        return found


class _Stub(nn.Module):
    """Stands in the place of a layer; `last`: the name of the layer that ran before it."""

    def __init__(self, name: str, shape: Shape, layer: nn.Module, clock: _Clock) -> None:
        super().__init__()
        self.name, self.clock = name, clock
        self.weight, self.bias = layer.weight, layer.bias
        device = layer.weight.device
        self.output, self.input_grad = (
            torch.randn(size, device=device) for size in (shape.output, shape.input)
        )
        self.weight_grads = [
            None if each is None else torch.randn_like(each) for each in (self.weight, self.bias)
        ]
        self.before = "input"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Nothing.apply(x, self.weight, self.bias, self)
        return result


class _Nothing(torch.autograd.Function):
    """(input, weight, bias, stub) -> the stub's output."""

    @staticmethod
    def forward(ctx: Any, *tensors: Any) -> torch.Tensor:
        stub: _Stub = tensors[-1]
        stub.clock.mark(("forward", stub.before))
        ctx.stub = stub
        result = _alias(stub.output)
        stub.clock.mark(None)
        return result

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        stub = ctx.stub
        stub.clock.mark(("backward", stub.name))
        made = (stub.input_grad, *stub.weight_grads)
        found = [
            _alias(each) if wanted and each is not None else None
            for wanted, each in zip(ctx.needs_input_grad, made)
        ]
        stub.clock.mark(None)
        return (*found, None)


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of its own: autograd lets nobody write to a view from here."""
    return torch.empty(0, device=tensor.device).set_(tensor)


def segments(
    by: Instrument,
    what: Subject,
    layers: Sequence[PlacedLayer],
    shapes: Sequence[Shape],
    seconds: float,
    on_cpu_by: str,
) -> Tuple[SegmentCost, ...]:
    """Every segment of the network's step on the CPU, by whose operators `on_cpu_by` says, and on
    the accelerator, each measured for some `seconds`, half of them on the way there and half on the
    way back.

    Where its launches are too many to be hidden, `by` hides none from then on, and says so.
    """
    sides = {
        "cpu": StubbedStep(what, layers, shapes, CPU, by=on_cpu_by),
        "accelerator": StubbedStep(what, layers, shapes, by.device),
    }
    taken: Dict[str, Dict[_Key, List[Tuple[float, float]]]] = {name: {} for name in sides}
    for name in (*sides, *reversed(list(sides))):
        for key, samples in _measured(by, sides[name], seconds / 2).items():
            taken[name].setdefault(key, []).extend(samples)
    return tuple(
        _cost(name, key, samples) for name, found in taken.items() for key, samples in found.items()
    )


class StubbedStep:
    """A network's training step whose layers are stubs; `optimizer` makes what updates a model,
    `by` says whose operators run between them."""

    def __init__(
        self,
        what: Subject,
        layers: Sequence[PlacedLayer],
        shapes: Sequence[Shape],
        device: torch.device,
        optimizer: Callable[[nn.Module], Any] = lambda model: SGD(model, 0.0),
        by: str = "torch",
    ) -> None:
        self.device, self.clock = device, _Clock(device)
        self._model = copy.deepcopy(what.model).to(device)
        _put_stubs(self._model, layers, shapes, self.clock)
        place_elsewhere(self._model, by)
        self._images, self._labels = what.images.to(device), what.labels.to(device)
        self._optimizer = optimizer(self._model)
        self._last = layers[-1].name

    def __call__(self) -> None:
        clock = self.clock
        clock.mark(None)
        loss = F.cross_entropy(self._model(self._images), self._labels)
        clock.mark(("forward", self._last))
        self._optimizer.differentiate(loss)
        clock.mark(("backward", "input"))
        self._optimizer.step()
        clock.mark(("optimiser", self._last))


def _measured(
    by: Instrument, step: StubbedStep, seconds: float
) -> Dict[_Key, List[Tuple[float, float]]]:
    """(seconds, host seconds) of each segment, step by step."""
    taken: Dict[_Key, List[Tuple[float, float]]] = {}
    ends, count = None, 0
    while ends is None or count < _LEAST or time.perf_counter() < ends:
        try:
            # Not while it warms up: what is loaded or allocated may wait for the device.
            _run(step, step.device, by.hidden and ends is not None)
        except HeldTooLongError:
            by.hidden, ends, count, taken = False, None, 0, {}
        count += 1
        found = step.clock.take()
        if ends is None and count == _WARM_UP:
            ends, count = time.perf_counter() + seconds, 0
        elif ends is not None:
            for key, each in found.items():
                taken.setdefault(key, []).append(each)
    return taken


def _run(step: Any, device: torch.device, hidden: bool) -> None:
    if device.type != "cuda":
        step()
        return
    torch.cuda.synchronize(device)
    if hidden:
        with samplers.hold(device):
            step()
    else:
        step()
    torch.cuda.synchronize(device)


def _put_stubs(
    model: nn.Module, layers: Sequence[PlacedLayer], shapes: Sequence[Shape], clock: _Clock
) -> None:
    before = "input"
    for layer in layers:
        parent, _, name = layer.name.rpartition(".")
        owner: Any = functools.reduce(getattr, parent.split("."), model) if parent else model
        stub = _Stub(layer.name, shapes[layer.shape], getattr(owner, name), clock)
        stub.before, before = before, layer.name
        setattr(owner, name, stub)


def _cost(device_name: str, key: _Key, samples: Sequence[Tuple[float, float]]) -> SegmentCost:
    seconds, host_seconds = zip(*samples)
    return SegmentCost(
        device=device_name,
        direction=key[0],
        after=key[1],
        seconds=rounded(seconds),
        host_seconds=rounded(host_seconds),
    )
