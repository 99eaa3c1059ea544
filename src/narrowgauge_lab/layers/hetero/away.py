"""One layer's passes on the accelerator, with its tensors on the host.

A pass sends its operand in pieces, computes each piece's product and fetches it, so that copies up,
products and copies down overlap (the forward pass and the input gradient are sums over no images).
The weight gradient is a sum over the batch, of whose pieces it takes several at a time, on the lane
`side` (`gradients`), while the others travel and while the host goes on with what it got.

What a pass needs beside the tensors is made once for each of their forms, and products are captured
(`keeping`, `prepared`, `replay`): the host takes longer to launch a small layer than bus and device
take to do it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.placement import LayerPlacement
from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.drawing import drawn_seed
from narrowgauge_lab.layers.hetero.gradients import Sent, Spans, WeightGradient, parts_of
from narrowgauge_lab.layers.hetero.host import dense
from narrowgauge_lab.layers.hetero.keeping import Keeper
from narrowgauge_lab.layers.hetero.ledger import IDLE
from narrowgauge_lab.layers.hetero.prepared import Lease, Leg, Trip
from narrowgauge_lab.layers.hetero.weights import Slot
from narrowgauge_lab.layers.hetero.wire import DTYPES, Incoming, Outgoing, byte_count
from narrowgauge_lab.layers.passes import Operand, Passes, Problem, passes_for

__all__ = ["Away"]

#: (piece on the device) -> its product.
Product = Callable[[Operand], torch.Tensor]
#: Weight and bias on the device.
Far = Tuple[torch.Tensor, Optional[torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Route:
    """A pass's tensors, by their names in TENSORS; `down` is the wire of the one received."""

    pass_: str
    sent_as: str
    received_as: str
    down: str


class Away:
    """The passes of one layer that a placement puts on the accelerator with backend `torch`.

    Tensors are float32 and dense or not, [B, C, H, W] or [B, C]. Nothing here is differentiable.
    """

    def __init__(self, layer: str, problem: Problem, placement: LayerPlacement, bus: Bus) -> None:
        self._layer, self._problem, self._bus = layer, problem, bus
        self._wire = bus.transfers.wire
        self._weight, self._bias = Slot(), Slot()
        self._outwards = Route("forward", "input", "output", self._wire["output"])
        self._backwards = Route("input_grad", "grad_output", "grad_input", self._wire["grad_input"])
        self._known: Dict[Tuple[Any, ...], Spans] = {}
        self._shapes: Dict[Sequence[int], Tuple[int, ...]] = {}
        self._forward = self._passes(placement.forward, "output")
        self._input_grad = self._passes(placement.input_grad, "grad_input")
        self._weight_grad = self._passes(placement.weight_grad, "")
        #: Gradients are rounded stochastically where they become int8.
        self._draws = "int8" in (self._wire["grad_output"], self._wire["grad_input"]) or any(
            passes is not None and passes.precision == "int8"
            for passes in (self._input_grad, self._weight_grad)
        )
        self._kept = Keeper(bus, problem)

    def _passes(self, placed: Any, result: str) -> Optional[Passes]:
        if placed.device != "accelerator" or placed.backend != "torch":
            return None
        wire = self._wire[result] if result else "fp32"
        # int8 is made of float32; the rest travels as the product gives it.
        dtype = torch.float32 if wire == "int8" else DTYPES[wire]
        return passes_for(placed.precision, self._bus.device, self._problem, dtype)

    def passes(self) -> Tuple[Optional[Passes], Optional[Passes], Optional[Passes]]:
        """Of forward, input_grad and weight_grad; None for one that runs elsewhere."""
        return self._forward, self._input_grad, self._weight_grad

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> Tuple[torch.Tensor, Operand, Optional[Lease]]:
        """The output on the host, and the input on the device, which stays as it is while the lease
        is held (None: for good). Nothing is left to wait for."""
        bus, passes = self._bus, self._forward
        assert passes is not None
        home = bus.lanes.begin()
        try:
            x, far = self._dense("forward", x), self._on_device(weight, bias, "forward")
            shape = self._output_shape(x, weight)

            def product(piece: Operand) -> torch.Tensor:
                return passes.forward(piece, far[0], far[1])

            def make() -> Trip:
                return self._trip(self._outwards, x, shape, far, product)

            trip = self._kept.outwards(x, shape, far, passes, make)
            lease = Lease(trip) if trip.kept else None
            result, sent = self._through("forward", trip, x, None)
            return result, sent.operand, lease
        except BaseException:
            # Copies that are queued still read and write memory that is about to be let go.
            bus.lanes.drain()
            raise
        finally:
            bus.lanes.end(home)

    def backward(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        input_shape: Sequence[int],
        inputs: Optional[Operand],
        x: Optional[torch.Tensor],
        wanted: Tuple[bool, bool, bool],
        late: bool,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The gradients by input, weight and bias that are `wanted` and run here.

        `inputs`: the input as it stayed on the device; else it is sent again from `x`. `late`: the
        gradients by weight and bias may come back at the end of the backward pass.
        """
        bus = self._bus
        seed = drawn_seed() if self._draws else 0
        by_input = wanted[0] and self._input_grad is not None
        by_weight = self._weight_grad is not None and any(wanted[1:])
        if not (by_input or by_weight):
            return None, None, None
        pass_ = "input_grad" if by_input else "weight_grad"
        job: Optional[WeightGradient] = None
        home = bus.lanes.begin()
        try:
            grad = self._dense(pass_, grad)
            trip = self._back(grad, weight, input_shape, by_input, seed)
            if self._weight_grad is not None and by_weight:
                job = WeightGradient(
                    bus, self._layer, self._weight_grad, (weight, bias), wanted[1:], inputs,
                    lambda: self._send("weight_grad", x, "input"), late, seed,
                    parts_of(
                        [(leg.low, leg.high) for leg in trip.legs],
                        trip.outgoing.whole, inputs, self._weight_grad,
                    ),
                    self._kept.sums(trip, inputs, self._weight_grad, weight, wanted[1:]),
                )  # fmt: skip

            def meanwhile(sent: Sent, high: int) -> None:
                if job is not None and job.take(sent, high):
                    self._kept.busy(trip, inputs)

            result, _ = self._through(pass_, trip, grad, seed, meanwhile)
            found = job.finish() if job is not None else (None, None)
            return (result if by_input else None, *found)
        except BaseException:
            bus.lanes.drain()
            raise
        finally:
            bus.lanes.end(home)

    def _back(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        input_shape: Sequence[int],
        by_input: bool,
        seed: int,
    ) -> Trip:
        """The trip of a gradient: to the product by the input and back, or up only."""
        passes = self._input_grad
        if not by_input or passes is None:
            return self._kept.upwards(grad, lambda: self._trip_up(grad, seed))
        far = self._on_device(weight, None, "input_grad")
        rest = tuple(input_shape[1:])

        def product(piece: Operand) -> torch.Tensor:
            return passes.input_grad(piece, far[0], (piece.shape[0], *rest), seed)

        def make() -> Trip:
            return self._trip(self._backwards, grad, input_shape, far, product, seed)

        return self._kept.backwards(grad, input_shape, far, passes, make)

    def _on_device(self, weight: torch.Tensor, bias: Optional[torch.Tensor], pass_: str) -> Far:
        bus = self._bus
        work = bus.lanes.work
        bus.lanes.on(work)
        far = bus.weights.on_device(self._weight, weight, self._layer, pass_, work)
        if bias is None:
            return far, None
        return far, bus.weights.on_device(self._bias, bias, self._layer, pass_, work)

    def _trip(
        self,
        route: Route,
        tensor: torch.Tensor,
        shape: Sequence[int],
        far: Far,
        product: Product,
        seed: Optional[int] = None,
    ) -> Trip:
        """Buffers and pieces for sending `tensor` and receiving what has `shape`."""
        bus, lanes = self._bus, self._bus.lanes
        spans = self._spans(route, tensor.shape, shape)
        up, work, down = lanes.trio(len(spans))
        outgoing = self._outgoing(tensor, route.sent_as, up, seed)
        incoming = Incoming(shape, route.down, route.received_as, bus.host, bus.codecs, bus.device)
        trip = Trip(outgoing, incoming, (up, work, down), far)
        trip.legs = [Leg(low, high, _product(product, outgoing, low, high)) for low, high in spans]
        return trip

    def _trip_up(self, tensor: torch.Tensor, seed: int) -> Trip:
        """For sending a gradient of which no product comes back."""
        work = self._bus.lanes.work
        outgoing = self._outgoing(tensor, "grad_output", work, seed)
        trip = Trip(outgoing, None, (work, work, work))
        trip.legs = [Leg(0, tensor.shape[0], list)]
        return trip

    def _through(
        self,
        pass_: str,
        trip: Trip,
        tensor: torch.Tensor,
        seed: Optional[int],
        meanwhile: Optional[Callable[[Sent, int], None]] = None,
    ) -> Tuple[torch.Tensor, Sent]:
        """Send a tensor, and fetch the product of each piece. `meanwhile` is called whenever a
        piece is queued, with its last image + 1, and before anything is waited for."""
        bus, outgoing, incoming = self._bus, trip.outgoing, trip.incoming
        lanes, up = bus.lanes, trip.up
        if trip.kept:
            lanes.on(up)
            if trip.busy is not None:
                lanes.wait(up, trip.busy)
            outgoing.take(tensor, seed, bus.direct(tensor))
        # Memory of other lanes, kept until the host has waited for the last copy down.
        kept: List[Any] = [trip]
        marks: List[Any] = []
        sent = Sent(outgoing.whole)
        for leg in trip.legs:
            sent.event = self._up(pass_, outgoing, leg.low, leg.high, up)
            if incoming is not None:
                if trip.work is not up:
                    lanes.on(trip.work)
                    lanes.wait(trip.work, sent.event)
                kept.append(self._down(pass_, trip, incoming, leg, seed))
                marks.append(lanes.mark(trip.down))
            if meanwhile is not None:
                meanwhile(sent, leg.high)
        if incoming is None:
            # The host's memory may change when this returns.
            with bus.ledger.stage(self._layer, pass_, "wait"):
                lanes.sync(sent.event)
            outgoing.let_go()
            return tensor, sent
        self._fetch(pass_, trip, incoming, marks)
        outgoing.let_go()
        return incoming.given(), sent

    def _down(
        self, pass_: str, trip: Trip, incoming: Incoming, leg: Leg, seed: Optional[int]
    ) -> Any:
        """Queue a piece's product and its copy down, on whose lane the last of it is."""
        bus, layer, low, high = self._bus, self._layer, leg.low, leg.high
        lanes, stage, accounts = bus.lanes, bus.ledger.stage, bus.accounts
        work, down = trip.work, trip.down
        with stage(layer, pass_, "compute", stream=work) if accounts else IDLE:
            made = leg.product()
        if trip.packed:
            sources = made
            if low == 0:
                incoming.renew()
        else:
            (piece,) = made
            if low == 0:
                incoming.begin(piece)
            with stage(layer, pass_, incoming.stage, stream=work) if accounts else IDLE:
                # Other bits than those that rounded what was sent.
                sources = incoming.ready(piece, low, None if seed is None else seed + 1)
        copies = incoming.pairs(sources, low, high)
        if down is not work:
            lanes.wait(down, lanes.mark(work))
            lanes.on(down)
        moved = byte_count(copies) if accounts else 0
        with (
            stage(layer, pass_, "from_device", stream=down, from_device=moved) if accounts else IDLE
        ):
            bus.move(copies, up=False)
        return made, copies

    def _fetch(self, pass_: str, trip: Trip, incoming: Incoming, marks: List[Any]) -> None:
        """Wait for each piece, and unpack it while the next is on its way."""
        bus, layer = self._bus, self._layer
        stage, accounts = bus.ledger.stage, bus.accounts
        for leg, mark in zip(trip.legs, marks):
            with stage(layer, pass_, "wait") if accounts else IDLE:
                bus.lanes.sync(mark)
            if incoming.unpacks:
                with stage(layer, pass_, incoming.stage) if accounts else IDLE:
                    incoming.unpack(leg.low, leg.high)

    def _spans(self, route: Route, sent: Sequence[int], received: Sequence[int]) -> Spans:
        """The pieces of a batch, looked up."""
        key = (route.pass_, sent, tuple(received), self._bus.ledger.mode)
        found = self._known.get(key)
        if found is None:
            found = self._bus.pieces_of(sent, route.sent_as, received, route.received_as)
            self._known[key] = found
        return found

    def _output_shape(self, x: torch.Tensor, weight: torch.Tensor) -> Tuple[int, ...]:
        found = self._shapes.get(x.shape)
        if found is None:
            found = self._shapes[x.shape] = self._problem.output_shape(x.shape, weight.shape)
        return found

    def _send(
        self, pass_: str, tensor: Optional[torch.Tensor], sent_as: str, seed: Optional[int] = None
    ) -> Sent:
        """Send a tensor of which no product is fetched, in one piece."""
        assert tensor is not None
        tensor = self._dense(pass_, tensor)
        work = self._bus.lanes.work
        outgoing = self._outgoing(tensor, sent_as, work, seed)
        return Sent(outgoing.whole, self._up(pass_, outgoing, 0, tensor.shape[0], work))

    def _outgoing(
        self, tensor: torch.Tensor, sent_as: str, lane: Any, seed: Optional[int]
    ) -> Outgoing:
        bus = self._bus
        bus.lanes.on(lane)
        return Outgoing(
            tensor, self._wire[sent_as], sent_as, bus.device, bus.host, bus.codecs, seed,
            bus.direct(tensor), sent_as == "grad_output",
        )  # fmt: skip

    def _up(self, pass_: str, outgoing: Outgoing, low: int, high: int, lane: Any) -> Any:
        """Queue a piece's copy up; the event of its arrival."""
        bus, layer = self._bus, self._layer
        stage, accounts = bus.ledger.stage, bus.accounts
        if outgoing.fills:
            with stage(layer, pass_, outgoing.stage) if accounts else IDLE:
                outgoing.fill(low, high)
        bus.lanes.on(lane)
        copies = outgoing.copies(low, high)
        moved = byte_count(copies) if accounts else 0
        with stage(layer, pass_, "to_device", stream=lane, to_device=moved) if accounts else IDLE:
            bus.move(copies, up=True)
        return bus.lanes.mark(lane)

    def _dense(self, pass_: str, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_contiguous():
            return tensor
        with self._bus.ledger.stage(self._layer, pass_, "reshape"):
            return dense(tensor)


def _product(
    product: Product, outgoing: Outgoing, low: int, high: int
) -> Callable[[], List[torch.Tensor]]:
    return lambda: [product(outgoing.piece(low, high))]
