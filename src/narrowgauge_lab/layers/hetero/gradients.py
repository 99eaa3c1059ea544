"""A layer's gradients by weight and bias, on the accelerator."""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.ledger import IDLE
from narrowgauge_lab.layers.hetero.wire import byte_count
from narrowgauge_lab.layers.passes import Operand, Passes, Quantised

__all__ = ["Record", "Sent", "WeightGradient", "bias_gradient"]

Work = Callable[[], List[torch.Tensor]]
#: Does such work, and gives its results: the first time it is captured.
Record = Callable[[Work], List[torch.Tensor]]


class Sent:
    """An operand on the device, all of it there once `event` has come."""

    __slots__ = ("event", "operand")

    def __init__(self, operand: Operand, event: Any = None) -> None:
        self.operand, self.event = operand, event


class WeightGradient:
    """Of one backward pass of one layer, from when the gradient is on the device to the return.

    `send(x)` sends the input again, where it did not stay (`inputs` is None). `wanted`: by weight,
    by bias. `record`: where both operands lie in memory that is kept from step to step; it has been
    seen to that nothing writes there too early.
    """

    def __init__(
        self,
        bus: Bus,
        layer: str,
        passes: Passes,
        parameters: Tuple[torch.Tensor, Optional[torch.Tensor]],
        wanted: Tuple[bool, bool],
        inputs: Optional[Operand],
        send: Callable[[], Sent],
        late: bool,
        seed: int,
        record: Optional[Record] = None,
    ) -> None:
        self._bus, self._layer, self._passes = bus, layer, passes
        self._shape = parameters[0].shape
        self._parameters = [each for each, by in zip(parameters, wanted) if by and each is not None]
        self._by_weight, self._by_bias = wanted[0], wanted[1] and parameters[1] is not None
        self._inputs, self._send, self._late, self._seed = inputs, send, late, seed
        self._record = record
        self._near: List[torch.Tensor] = []
        self._marks: List[Any] = []

    def start(self, grad: Sent) -> None:
        """Queue the products, and their copies, on the side lane. Waits for nothing."""
        bus = self._bus
        lanes, side = bus.lanes, bus.lanes.side
        inputs = self._inputs
        if inputs is None and self._by_weight:
            sent = self._send()
            inputs = sent.operand
            lanes.wait(side, sent.event)
            self._marks.append(sent.event)
        # Before the products: gradients that are still pending may lie where they write.
        waits = self._late and bus.late.may_wait(self._parameters)
        lanes.on(side)
        lanes.wait(side, grad.event)
        operand, stage = grad.operand, bus.ledger.stage
        work = _work(
            self._passes, operand, inputs, self._shape if self._by_weight else None,
            self._by_bias, self._seed,
        )  # fmt: skip
        with stage(self._layer, "weight_grad", "compute", stream=side) if bus.accounts else IDLE:
            far = work() if self._record is None else self._record(work)
        if waits:
            if self._record is None:
                bus.hold(side, operand, inputs)
            self._near = bus.late.add(self._parameters, far)
        else:
            self._near = self._fetch(far)
            # `finish` waits for the copies: until then these are not to be freed.
            self._kept = (operand, inputs, far)

    def finish(self) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The gradients on the host, which are filled later where they may be."""
        if self._marks:
            with self._bus.ledger.stage(self._layer, "weight_grad", "wait"):
                for mark in self._marks:
                    self._bus.lanes.sync(mark)
        gradients = iter(self._near)
        by_weight = next(gradients) if self._by_weight else None
        return by_weight, next(gradients) if self._by_bias else None

    def _fetch(self, far: List[torch.Tensor]) -> List[torch.Tensor]:
        bus, side = self._bus, self._bus.lanes.side
        with bus.ledger.stage(self._layer, "weight_grad", "reshape", stream=side):
            near = [bus.host.fresh(each.shape, torch.float32) for each in far]
            copies = [(into, each.contiguous()) for into, each in zip(near, far)]
        with bus.ledger.stage(
            self._layer, "weight_grad", "from_device", stream=side, from_device=byte_count(copies)
        ):
            bus.move(copies, up=False)
        self._marks.append(bus.lanes.mark(side))
        return near


def _work(
    passes: Passes,
    grad: Operand,
    inputs: Optional[Operand],
    shape: Optional[Sequence[int]],
    by_bias: bool,
    seed: int,
) -> Work:
    """The gradients by weight (of that shape, or none) and by bias."""

    def work() -> List[torch.Tensor]:
        far = []
        if shape is not None:
            far.append(passes.weight_grad(grad, inputs, shape, seed))
        if by_bias:
            far.append(bias_gradient(grad))
        return far

    return work


def bias_gradient(grad: Operand) -> torch.Tensor:
    """The sum of a gradient over all but dimension 1, float32 [K]. int8 is summed exactly."""
    values = grad.values if isinstance(grad, Quantised) else grad
    others = [at for at in range(values.dim()) if at != 1]
    if isinstance(grad, Quantised):
        return values.sum(dim=others, dtype=torch.int32).float() * grad.scale
    return values.sum(dim=others, dtype=torch.float32)
