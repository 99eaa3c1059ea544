"""A pass over the bus: pieces of a batch go up, through the product and down, side by side.

As the layers do it: the host fills a piece and queues its copy, its product and the copy back, each
on a lane of its own; when all is queued it waits for each piece in turn and unpacks it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from narrowgauge.planner.rates import WIDTH, Rates
from narrowgauge.planner.whatif import Machine
from narrowgauge_contract.placement_costs import Costs, Shape

__all__ = ["Staged", "Stages", "pieces_of", "through"]

_FLOAT = 4


@dataclass(frozen=True)
class Stages:
    """Seconds of each stage of one piece. `pack` is done for the first piece and all others."""

    pack: float
    fill: float
    up: float
    product: float
    down: float
    unpack: float


def pieces_of(batch: int, largest_bytes: int, piece_bytes: int, most: int) -> int:
    """How many pieces a batch travels in, by the larger of what goes up and what comes down."""
    return max(1, min(most, largest_bytes // piece_bytes, batch))


def through(stages: Stages, pieces: int, *, serial: bool) -> float:
    """Seconds until the last piece is back on the host. `serial`: the host does it all itself."""
    if serial:
        each = (stages.fill, stages.up, stages.product, stages.down, stages.unpack)
        return stages.pack + pieces * sum(each)
    host, up, work, down = stages.pack, 0.0, 0.0, 0.0
    arrivals = []
    for _ in range(pieces):
        host += stages.fill
        up = max(up, host) + stages.up
        work = max(work, up) + stages.product
        down = max(down, work) + stages.down
        arrivals.append(down)
    for arrival in arrivals:
        host = max(host, arrival) + stages.unpack
    return host


class Staged:
    """A forward pass or an input gradient in its stages, at given rates."""

    def __init__(
        self,
        costs: Costs,
        wire: str,
        shape: Shape,
        pass_: str,
        policy: str,
        rates: Rates,
        machine: Machine,
    ) -> None:
        sizes = (shape.input, shape.output)
        given, taken = sizes if pass_ == "forward" else sizes[::-1]
        self._serial, self._int8 = costs.stand_in, wire == "int8"
        largest = _FLOAT * max(prod(given), prod(taken))
        self._pieces = (
            1
            if machine.coherent
            else pieces_of(given[0], largest, costs.piece_bytes, costs.most_pieces)
        )
        count = self._pieces
        scales = _FLOAT * taken[1] if self._int8 else 0
        packed = rates.conversion("cpu", "pack", wire, prod(given))
        self._made = rates.conversion("accelerator", "pack", wire, prod(taken) / count)
        self._stages = Stages(
            # int8's scales are of the whole tensor: all of it is packed before the first piece.
            pack=packed if self._int8 else 0.0,
            fill=0.0 if self._int8 else packed / count,
            up=rates.copy(policy, "up", WIDTH[wire] * prod(given) / count),
            product=0.0,
            down=rates.copy(policy, "down", WIDTH[wire] * prod(taken) / count + scales),
            unpack=rates.conversion("cpu", "unpack", wire, prod(taken) / count),
        )

    def chain(self, product: float) -> float:
        stages = replace(self._stages, product=product / self._pieces + self._made)
        return max(1e-9, through(stages, self._pieces, serial=self._serial))

    def bus(self) -> tuple[float, float]:
        return self._pieces * self._stages.up, self._pieces * self._stages.down

    def packing(self) -> float:
        return self._pieces * self._made

    def host(self) -> float:
        stages = self._stages
        return stages.pack + self._pieces * (stages.fill + stages.unpack)
