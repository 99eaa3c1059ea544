"""A layer's gradients by weight and bias, on the accelerator.

They are sums over the batch, so parts of it can be multiplied while the rest of the gradient is
still on its way: each part takes half of the pieces that are left, and the last one the last piece.
Then little remains to be done when that arrives, by few launches. Parts are added in their order in
float32, whether their products are launched or replayed.
"""

from __future__ import annotations

from typing import Any, Callable, List, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.ledger import IDLE
from narrowgauge_lab.layers.hetero.replay import Replay
from narrowgauge_lab.layers.hetero.wire import byte_count, images
from narrowgauge_lab.layers.passes import Operand, Passes, Quantised

__all__ = ["Sent", "Sums", "WeightGradient", "bias_gradient", "halves", "parts_of"]

Work = Callable[[], List[torch.Tensor]]
#: (first image, last + 1) of each piece or part.
Spans = List[Tuple[int, int]]


class Sent:
    """An operand on the device; what was queued of it is there once `event` has come."""

    __slots__ = ("event", "operand")

    def __init__(self, operand: Operand, event: Any = None) -> None:
        self.operand, self.event = operand, event


class Sums:
    """What the parts of one backward pass sum up to so far.

    `record`: where operands lie in memory that is kept from step to step, each part is recorded at
    its first time and replayed from then on; the same object then serves all steps.
    """

    def __init__(self, record: Optional[Callable[[Work], Replay]] = None) -> None:
        #: Replays know this list, and not this object, which knows them.
        self._far: List[torch.Tensor] = []
        self._record = record
        self._replays: List[Replay] = []
        self._at = 0

    @property
    def kept(self) -> bool:
        return self._record is not None

    def begin(self) -> None:
        """With no part yet."""
        self._far.clear()
        self._at = 0

    def add(self, work: Work) -> None:
        """Another part, whose products `work` gives in tensors that are new each time."""
        before = self._far

        def summed() -> List[torch.Tensor]:
            made = work()
            # Into the new ones: those from before are a graph's results, which it writes anew.
            return [each.add_(old) for each, old in zip(made, before)] if before else made

        if self._record is None:
            before[:] = summed()
            return
        if self._at == len(self._replays):
            self._replays.append(self._record(summed))
        before[:] = self._replays[self._at]()
        self._at += 1

    def end(self) -> List[torch.Tensor]:
        """The sum of all parts, which is not held any longer."""
        far = self._far.copy()
        self._far.clear()
        return far


class WeightGradient:
    """Of one backward pass of one layer, from when the gradient comes to the device to the return.

    `send(x)` sends the input again, where it did not stay (`inputs` is None). `wanted`: by weight,
    by bias. `parts`: the images that each product takes. `sums`: where both operands lie in memory
    that is kept from step to step; it has been seen to that nothing writes there too early.
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
        parts: Spans,
        sums: Optional[Sums] = None,
    ) -> None:
        self._bus, self._layer, self._passes = bus, layer, passes
        self._shape = parameters[0].shape
        self._parameters = [each for each, by in zip(parameters, wanted) if by and each is not None]
        self._by_weight, self._by_bias = wanted[0], wanted[1] and parameters[1] is not None
        self._inputs, self._send, self._late, self._seed = inputs, send, late, seed
        self._parts, self._at = parts, 0
        self._sums = sums if sums is not None else Sums()
        self._near: List[torch.Tensor] = []
        self._marks: List[Any] = []

    def take(self, grad: Sent, high: int) -> bool:
        """Images up to `high` are on their way: queue the product of the part that ends there, if
        one does, on the side lane. True once all parts and their copies are queued. Waits for
        nothing."""
        low, end = self._parts[self._at]
        if high < end:
            return False
        if self._at == 0:
            self._begin()
        lanes, side = self._bus.lanes, self._bus.lanes.side
        lanes.on(side)
        lanes.wait(side, grad.event)
        self._multiply(grad.operand, low, end)
        self._at += 1
        if self._at < len(self._parts):
            return False
        self._end(grad.operand)
        return True

    def _begin(self) -> None:
        bus, side = self._bus, self._bus.lanes.side
        if self._inputs is None and self._by_weight:
            sent = self._send()
            self._inputs = sent.operand
            bus.lanes.wait(side, sent.event)
            self._marks.append(sent.event)
        # Before the products: gradients that are still pending may lie where they write.
        self._waits = self._late and bus.late.may_wait(self._parameters)
        self._sums.begin()

    def _multiply(self, grad: Operand, low: int, high: int) -> None:
        bus, side, inputs = self._bus, self._bus.lanes.side, self._inputs
        if inputs is not None:
            inputs = images(inputs, low, high)
        work = _work(
            self._passes, images(grad, low, high), inputs,
            self._shape if self._by_weight else None, self._by_bias, self._seed,
        )  # fmt: skip
        stage = bus.ledger.stage
        with stage(self._layer, "weight_grad", "compute", stream=side) if bus.accounts else IDLE:
            self._sums.add(work)

    def _end(self, grad: Operand) -> None:
        bus, far, inputs = self._bus, self._sums.end(), self._inputs
        if self._waits:
            if not self._sums.kept:
                bus.hold(bus.lanes.side, grad, inputs)
            self._near = bus.late.add(self._parameters, far)
        else:
            self._near = self._fetch(far)
            # `finish` waits for the copies: until then these are not to be freed.
            self._kept = (grad, inputs, far)

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


def parts_of(pieces: Spans, grad: Operand, inputs: Optional[Operand], passes: Passes) -> Spans:
    """The images that the weight gradient's products take: one takes all where the input has to
    come again, and where the product rounds an operand itself, by scales of the whole."""
    rounds = passes.product != "torch" and not all(
        isinstance(each, Quantised) for each in (grad, inputs)
    )
    if inputs is None or rounds or len(pieces) == 1:
        return [(0, pieces[-1][1])]
    return halves(pieces)


def halves(pieces: Spans) -> Spans:
    """The parts of a batch that travels in these pieces."""
    found, at = [], 0
    while at < len(pieces):
        last = at + (len(pieces) - at + 1) // 2 - 1
        found.append((pieces[at][0], pieces[last][1]))
        at = last + 1
    return found


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
