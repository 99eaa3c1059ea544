"""The way between the host and the accelerator: lanes, memory, weights and late gradients.

| policy     | host memory | copies                                                              |
|------------|-------------|---------------------------------------------------------------------|
| pageable   | ordinary    | one by one; the host waits for each                                 |
| pinned     | page-locked | one by one, queued; the host waits for the last                     |
| overlapped | page-locked | in pieces of the batch, beside products; weight gradients late      |
| mapped     | page-locked | as overlapped; by a kernel where `chooser` found that to be faster  |
| managed    | –           | refused: see `require_policy`                                       |

One bus serves all layers of a model; one thread uses it at a time. A CPU that stands in for an
accelerator has the same buffers and counts the same bytes, without lanes and page-locking.
"""

from __future__ import annotations

import collections
from typing import Any, Deque, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import Transfers
from narrowgauge_kernels import wire as wire_kernels
from narrowgauge_lab.layers.hetero.chooser import Chooser
from narrowgauge_lab.layers.hetero.drawing import Draws
from narrowgauge_lab.layers.hetero.host import HostMemory, elements
from narrowgauge_lab.layers.hetero.lanes import Lanes
from narrowgauge_lab.layers.hetero.late import LateGradients
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.overflow import OverflowWatch
from narrowgauge_lab.layers.hetero.replay import Recorder
from narrowgauge_lab.layers.hetero.weights import Weights
from narrowgauge_lab.layers.hetero.wire import WIRE_BYTES, Codec, Codecs, Copy

__all__ = ["MOST_PIECES", "PIECE_BYTES", "Bus", "require_policy"]

#: The least that a piece is worth. A piece costs some 35 us of launches (a copy up, a product, a
#: copy down, four events), in which a bus of 55 GB/s moves 2 MB.
PIECE_BYTES = 2 << 20
#: The first copy up and the last one down overlap with nothing; more pieces make them no shorter
#: than it pays.
# unverified: that 16 pay more than 8 | no GPU here | per-layer -p mode=overlapped -p batch=1024
MOST_PIECES = 16
#: Of the device's memory: what buffers may take that are kept from step to step.
_KEPT_SHARE = 1 / 16
#: What a CPU that stands in may keep.
_KEPT_BYTES = 1 << 28

_CPU = torch.device("cpu")


class Bus:
    """Opened at its first use: making one touches no device, so models that have one can be copied
    and pickled. A copy is a bus of its own."""

    def __init__(
        self, device: torch.device, transfers: Transfers, ledger: Optional[Ledger] = None
    ) -> None:
        self.device, self.transfers = device, transfers
        self.ledger = ledger if ledger is not None else Ledger()
        self.overlapping = transfers.policy in ("overlapped", "mapped")
        #: Copies are queued, and the host goes on.
        self.queues = transfers.policy != "pageable"
        self.cuda = device.type == "cuda"
        self.draws = Draws(device)
        #: Set while statistics are asked for.
        self.overflow: Optional[OverflowWatch] = None
        #: Which way small copies go; `mapped` only.
        self.chooser: Optional[Chooser] = None
        #: Whether passes are prepared and captured; False: each is launched operator by operator.
        self.prepares = self.overlapping
        self._opened = False
        self._held: Deque[Tuple[Any, Any]] = collections.deque()

    def __reduce__(self) -> Tuple[Any, ...]:
        return Bus, (self.device, self.transfers, self.ledger)

    def open(self) -> None:
        """Make streams and memory, and on CUDA, for `mapped`, measure. Raises NotApplicableError
        where the policy does not go with this device."""
        if self._opened:
            return
        require_policy(self.transfers.policy, self.device)
        self.host = HostMemory(self.cuda and self.queues)
        self.lanes = Lanes(self.device, self.ledger, overlapping=self.overlapping)
        self.codecs = Codecs(Codec(_CPU), Codec(self.device))
        self.weights = Weights(
            self.device,
            self.host,
            self.ledger,
            each_call=self.transfers.weights == "each-call",
            waits=not self.queues,
        )
        self.late = LateGradients(self.lanes, self.host, self.ledger)
        self.recorder = Recorder(self.device, self.host.note)
        self._room = _KEPT_BYTES
        if self.cuda:
            total = torch.cuda.get_device_properties(self.device).total_memory
            self._room = int(total * _KEPT_SHARE)
        if self.transfers.policy == "mapped" and self.cuda and self.chooser is None:
            self.chooser = Chooser.measured(self.device)
        self._opened = True

    @property
    def accounts(self) -> bool:
        """Whether anybody counts; where not, not even calls of the ledger are made."""
        return self.ledger.mode != "off"

    def pieces(self, batch: int, size: int) -> List[Tuple[int, int]]:
        """(first image, last + 1) of the pieces that a batch travels in: as many as the plan says,
        or of at least `PIECE_BYTES` of `size`, the larger of what goes up and what comes down.

        Where nothing overlaps, and where a serial ledger looks at stages one by one, it is one.
        """
        count = self.transfers.pieces
        if not count:
            apart = self.overlapping and self.ledger.mode != "serial"
            count = min(MOST_PIECES, size // PIECE_BYTES) if apart else 1
        count = max(1, min(count, batch))
        cuts = [batch * each // count for each in range(count + 1)]
        return list(zip(cuts, cuts[1:]))

    def pieces_of(
        self, sent: Sequence[int], sent_as: str, received: Sequence[int], received_as: str
    ) -> List[Tuple[int, int]]:
        """The pieces of a pass, by the shapes of what goes up and comes down and their names."""
        wire = self.transfers.wire
        up, down = WIRE_BYTES[wire[sent_as]], WIRE_BYTES[wire[received_as]]
        return self.pieces(sent[0], max(elements(sent) * up, elements(received) * down))

    def may_defer(self) -> bool:
        """Whether weight gradients may come back late at all."""
        return self.overlapping and self.ledger.mode != "serial"

    def keeps(self, size: int) -> bool:
        """Whether there is room for so many more bytes on the device that are kept for good; then
        they are taken."""
        if size > self._room:
            return False
        self._room -= size
        return True

    def choices(self) -> Tuple[bool, ...]:
        """What else decides which kernels torch takes for a product: one that was captured is for
        the same only."""
        if not self.cuda:
            return ()
        cudnn = torch.backends.cudnn
        strict = torch.are_deterministic_algorithms_enabled()
        return cudnn.enabled, cudnn.benchmark, cudnn.deterministic, strict

    def direct(self, tensor: torch.Tensor) -> bool:
        """Whether the device may read a host tensor without somebody copying it aside first."""
        return not self.host.locks or self.host.locked(tensor)

    def move(self, copies: List[Copy], *, up: bool) -> None:
        """Queue copies on the current stream."""
        chooser, queues = self.chooser, self.queues
        for into, source in copies:
            if chooser is not None:
                size = source.numel() * source.element_size()
                maps = chooser.maps("up" if up else "down", size)
                if maps and self.host.locked(source if up else into):
                    wire_kernels.mapped_copy(into, source)
                    continue
            into.copy_(source, non_blocking=queues)

    def hold(self, lane: Any, *kept: Any) -> None:
        """Keep tensors of other lanes until this one is through with them."""
        held = self._held
        while held and held[0][0].query():
            held.popleft()
        event = self.lanes.own_mark(lane)
        if event is not None:
            held.append((event, kept))

    def notes(self) -> List[str]:
        """What went otherwise than the plan asks, for the record."""
        found = self.host.notes() if self._opened else []
        if self.transfers.policy == "mapped" and not self.cuda:
            found.append("policy mapped: a CPU stand-in has nothing to map; copies are copies")
        return found

    def facts(self) -> Dict[str, Any]:
        """How copies are made here; the record of a row has it."""
        self.open()
        chosen = self.chooser.document() if self.chooser is not None else {}
        return {
            "accelerator": str(self.device) if self.cuda else "cpu (stand-in)",
            "policy": self.transfers.policy,
            "page_locked": self.host.page_locking(),
            "int8_on_the_wire": {
                "host": self.codecs.near.name,
                "accelerator": self.codecs.far.name,
            },
            "mapped_or_copied": chosen,
            "captured": self.recorder.captured,
            "notes": self.notes(),
        }


def require_policy(policy: str, device: torch.device) -> None:
    """Raises NotApplicableError where the device does not have what the policy is about."""
    if policy != "managed":
        return
    # A GPU with memory of its own gets pages over the bus one fault at a time; torch offers managed
    # memory nowhere. Where GPU and CPU share one memory `mapped` comes nearest: a kernel reads the
    # host's pages where they are, but into a buffer of the layer's, as everywhere.
    # unverified: mapped in place of managed memory on a Tegra | no board here | hetero plans there
    raise NotApplicableError(
        f"the transfer policy 'managed' cannot be had on {device}",
        why="torch gives no managed memory, and a GPU with memory of its own would fault its pages "
        "over the bus one by one",
        next_step='policy = "mapped" has a kernel copy small tensors out of page-locked memory (on '
        'a Tegra the same memory), "overlapped" has the copy engine do it',
    )
