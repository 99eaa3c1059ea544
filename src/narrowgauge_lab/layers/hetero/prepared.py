"""What a pass of one layer needs for tensors of one form, made once: buffers on the device, its
pieces, the lanes that they take, and products that are captured.

A pass is prepared when its form comes for the second time. The first time ran launch by launch, so
that libraries have chosen their kernels, and forms that come once cost nothing. Buffers of a
forward pass that a gradient is going to be made from are *leased* until nobody can ask for it any
more; a pass that finds all of them leased runs launch by launch again.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_lab.layers.hetero.gradients import Sums
from narrowgauge_lab.layers.hetero.wire import Incoming, Outgoing
from narrowgauge_lab.layers.passes import Operand, Quantised

__all__ = ["MOST_BYTES", "Form", "Forms", "Lease", "Leg", "Trip", "address_of"]

#: Of a tensor: copying a larger one takes longer than all that is saved, and its memory, which is
#: kept for good, is worth more.
MOST_BYTES = 64 << 20
#: Forms that a layer's pass is prepared for; more are a matter of batches that keep changing.
_FORMS = 8
#: Forward passes in flight at a time: one whose gradients are made while the loss of the step
#: before it is still held, or a layer that is used twice.
_LEASES = 3

#: (shape, whether it is contiguous, and whatever else decides about pieces and kernels).
Form = Tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Leg:
    """Images `low` to `high` of a trip. `product` gives what travels back where the trip is
    `packed`, else the one tensor that it is made of."""

    low: int
    high: int
    product: Callable[[], List[torch.Tensor]]


class Lease:
    """Whoever holds it may still want the operand that a forward pass left on the device."""

    __slots__ = ("_trip",)

    def __init__(self, trip: Trip) -> None:
        self._trip = trip
        trip.leased = True

    def __del__(self) -> None:
        self._trip.leased = False


class Trip:
    """A tensor's way to the device, and its product's back. `lanes`: up, work and down.

    `incoming` is None where no product comes back. `far`: parameters on the device, which products
    read. `busy`: an event after which the buffers on the device may be written again, beyond what
    the host itself has waited for.
    """

    def __init__(
        self,
        outgoing: Outgoing,
        incoming: Optional[Incoming],
        lanes: Tuple[Any, Any, Any],
        far: Sequence[Optional[torch.Tensor]] = (),
    ) -> None:
        self.outgoing, self.incoming = outgoing, incoming
        self.up, self.work, self.down = lanes
        self.far = far
        self.legs: List[Leg] = []
        #: Whether products pack what travels.
        self.packed = False
        self.leased = False
        self.busy: Any = None
        #: Whether its buffers are kept for the next tensor of the form.
        self.kept = False
        #: Of a forward pass: its weight gradients, by the trip that brings the gradient.
        self.weight_grads: Dict[Tuple[int, Tuple[bool, bool]], Tuple[Trip, Sums]] = {}

    def reads(self, far: Sequence[Optional[torch.Tensor]]) -> bool:
        """Whether products were made for parameters that lie there."""
        return all(_same(old, new) for old, new in zip(self.far, far))


class Forms:
    """The trips of one pass, by form."""

    def __init__(self) -> None:
        self._trips: Dict[Form, List[Trip]] = {}

    def met(self, form: Form) -> bool:
        """Whether a form came before and may be prepared; from now on it did."""
        if form in self._trips:
            return True
        if len(self._trips) < _FORMS:
            self._trips[form] = []
        return False

    def find(self, form: Form) -> Optional[Trip]:
        """One that nobody has leased."""
        return next((trip for trip in self._trips[form] if not trip.leased), None)

    def drop(self, form: Form, trip: Trip) -> None:
        self._trips[form].remove(trip)

    def add(self, form: Form, trip: Trip) -> None:
        self._trips[form].append(trip)

    def full(self, form: Form) -> bool:
        """Whether there are as many as there may be."""
        return len(self._trips[form]) >= _LEASES


def address_of(operand: Operand) -> int:
    """Of its values: a trip's buffer is nobody else's as long as the trip is kept."""
    values = operand.values if isinstance(operand, Quantised) else operand
    return int(values.data_ptr())


def _same(old: Optional[torch.Tensor], new: Optional[torch.Tensor]) -> bool:
    if old is None or new is None:
        return old is new
    return old is new or (old.data_ptr() == new.data_ptr() and old.shape == new.shape)
