"""The trips of one layer that are kept from step to step, and who may write to their buffers when.

The host waits for what comes back, so buffers of a pass are its own again when it returns; but for
the weight gradient, which the side lane may still be making of a gradient and of an input: whoever
writes there next waits for it, on the device. An input that stays is leased besides.
"""

from __future__ import annotations

from typing import Callable, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.gradients import Sums, Work
from narrowgauge_lab.layers.hetero.host import elements
from narrowgauge_lab.layers.hetero.prepared import (
    MOST_BYTES,
    Form,
    Forms,
    Leg,
    Trip,
    address_of,
)
from narrowgauge_lab.layers.hetero.replay import Replay
from narrowgauge_lab.layers.passes import Operand, Passes, Problem
from narrowgauge_lab.layers.passes.matrix import DEEPEST
from narrowgauge_lab.measure.watch import is_watched

__all__ = ["Keeper"]

Make = Callable[[], Trip]
Far = Sequence[Optional[torch.Tensor]]
#: Ledgers that look at products and at what packs them one by one.
_LOOKS = ("serial", "overlapped")


class Keeper:
    """`outwards`, `backwards` and `upwards` give the trip for a tensor: a kept one, or one that
    `make` makes, and that is kept where there is room and reason."""

    def __init__(self, bus: Bus, problem: Problem) -> None:
        self._bus, self._problem = bus, problem
        self._outwards, self._backwards, self._upwards = Forms(), Forms(), Forms()
        #: Trips whose inputs stay on the device, by where these lie.
        self._staying: Dict[int, Trip] = {}

    def outwards(
        self, x: torch.Tensor, shape: Sequence[int], far: Far, passes: Passes, make: Make
    ) -> Trip:
        """Of a forward pass."""
        trip = self._kept(self._outwards, x, shape, far, passes, make, draws=False)
        if trip is None:
            return make()
        self._staying[address_of(trip.outgoing.whole)] = trip
        return trip

    def backwards(
        self, grad: torch.Tensor, shape: Sequence[int], far: Far, passes: Passes, make: Make
    ) -> Trip:
        """Of a gradient by the input."""
        trip = None
        if not self._draws(passes):
            trip = self._kept(self._backwards, grad, shape, far, passes, make, draws=True)
        return make() if trip is None else trip

    def upwards(self, grad: torch.Tensor, make: Make) -> Trip:
        """Of a gradient that only goes up."""
        trip = self._kept(self._upwards, grad, (0,), (), None, make, draws=False)
        return make() if trip is None else trip

    def sums(
        self,
        trip: Trip,
        inputs: Optional[Operand],
        passes: Passes,
        weight: torch.Tensor,
        wanted: Tuple[bool, bool],
    ) -> Optional[Sums]:
        """What captures the weight gradient of a gradient's trip and a forward pass's input; None
        where one of them is not kept, or where it has to be rounded anew each time."""
        staying = self._of(inputs)
        if staying is None or not trip.kept or self._draws(passes):
            return None
        key = (id(trip), wanted)
        found = staying.weight_grads.get(key)
        if found is None:
            recorder, side = self._bus.recorder, self._bus.lanes.side
            captures = self._captures(passes, weight)

            def record(work: Work) -> Replay:
                return recorder.record(work, side, may_capture=captures)

            # The trip is kept beside, so that no other one gets its id.
            found = staying.weight_grads[key] = (trip, Sums(record))
        return found[1]

    def busy(self, trip: Trip, inputs: Optional[Operand]) -> None:
        """The side lane has been given work with these; nothing may be written there before."""
        staying = self._of(inputs)
        if trip.kept or staying is not None:
            event = self._bus.lanes.own_mark(self._bus.lanes.side)
            trip.busy = event
            if staying is not None:
                staying.busy = event

    def _of(self, inputs: Optional[Operand]) -> Optional[Trip]:
        return None if inputs is None else self._staying.get(address_of(inputs))

    def _kept(
        self,
        forms: Forms,
        tensor: torch.Tensor,
        shape: Sequence[int],
        far: Far,
        passes: Optional[Passes],
        make: Make,
        *,
        draws: bool,
    ) -> Optional[Trip]:
        """`draws`: what comes back is rounded stochastically where it is int8."""
        bus = self._bus
        if not bus.prepares or is_watched():
            return None
        mode = bus.ledger.mode
        form = (tensor.shape, tensor.is_contiguous(), tuple(shape), mode, bus.choices())
        if not forms.met(form):
            return None
        trip = forms.find(form)
        if trip is not None:
            if trip.reads(far):
                return trip
            self._drop(forms, form, trip)
        if forms.full(form) or not self._affords(tensor, shape):
            return None
        trip = make()
        trip.kept = True
        if passes is not None and trip.incoming is not None:
            packs = not (draws and trip.incoming.packs)
            trip.packed = packs and mode not in _LOOKS
            assert far[0] is not None
            self._record(trip, self._captures(passes, far[0]))
        forms.add(form, trip)
        return trip

    def _record(self, trip: Trip, captures: bool) -> None:
        bus = self._bus
        bus.lanes.on(trip.work)
        for at, leg in enumerate(trip.legs):
            work = _packing(trip, leg) if trip.packed else leg.product
            replay = bus.recorder.record(work, trip.work, may_capture=captures)
            trip.legs[at] = Leg(leg.low, leg.high, replay)

    def _drop(self, forms: Forms, form: Form, trip: Trip) -> None:
        """Let go of a trip whose parameters have moved; the side lane may still be reading."""
        self._bus.lanes.sync(trip.busy)
        forms.drop(form, trip)
        self._staying.pop(address_of(trip.outgoing.whole), None)

    def _affords(self, tensor: torch.Tensor, shape: Sequence[int]) -> bool:
        """Whether a trip's buffers are worth their memory, and there is some left: two of what goes
        up and two of what comes down, in float32 at most."""
        sent, received = 4 * tensor.numel(), 4 * elements(shape)
        if not 0 < sent <= MOST_BYTES or received > MOST_BYTES:
            return False
        return self._bus.keeps(2 * (sent + received))

    def _draws(self, passes: Passes) -> bool:
        """Whether a product rounds gradients stochastically itself: by numbers that differ each
        time, which a graph would repeat."""
        return passes.precision == "int8" and self._bus.transfers.wire["grad_output"] != "int8"

    def _captures(self, passes: Passes, weight: torch.Tensor) -> bool:
        """Whether a product's kernels may be captured: cuDNN's and Triton's, not cuBLAS's."""
        if passes.product == "triton":
            # Longer sums go to float64 products, which are cuBLAS's.
            return max(weight[0].numel(), weight.numel() // weight.shape[1]) <= DEEPEST
        cudnn = torch.backends.cudnn.enabled
        return passes.product == "torch" and self._problem.kind == "conv2d" and cudnn


def _packing(trip: Trip, leg: Leg) -> Work:
    """A leg's product together with what packs it for the way back."""
    incoming = trip.incoming
    assert incoming is not None
    low, product = leg.low, leg.product

    def work() -> List[torch.Tensor]:
        (piece,) = product()
        if low == 0:
            incoming.adopt(piece)
        return incoming.ready(piece, low, None)

    return work
