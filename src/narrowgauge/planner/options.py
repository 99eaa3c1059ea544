"""What each pass of each layer costs at each place, as an instance to solve.

Where a whole pass over the bus was measured, its stages are told apart by the model of `pipeline`;
what the measurement takes longer is the call's own cost (launches, events, Python), and where it
takes less, the model's stages shrink. Both then follow a change of the machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from statistics import median

from narrowgauge.planner.instance import Choice, Cost, Group, Instance, Native, total
from narrowgauge.planner.pipeline import Staged
from narrowgauge.planner.rates import WIDTH, Rates
from narrowgauge.planner.whatif import HERE, Machine
from narrowgauge_contract.placement import PASSES
from narrowgauge_contract.placement_costs import NATIVE, Costs, NativeCost, PlacedLayer

__all__ = ["Options", "Unmodelled", "Variant"]

_FLOAT = 4
#: Tensors of a layer that autograd keeps where everything lives there: output and gradient of it.
_ALIVE = 2


@dataclass(frozen=True)
class Variant:
    """What a plan says once for all layers. `wire`: of all tensors that travel."""

    elsewhere: str
    wire: str = "fp32"
    policy: str = "overlapped"
    resident: bool = True


@dataclass(frozen=True)
class Unmodelled:
    """Seconds that whole steps took beyond what their parts say: per step, and per pass over the
    bus."""

    step: float = 0.0
    per_pass: float = 0.0


class Options:
    """Costs of parts on one machine, for one variant."""

    def __init__(self, costs: Costs, variant: Variant, machine: Machine = HERE) -> None:
        self.costs, self.variant, self.machine = costs, variant, machine
        self._rates, self._here = Rates(costs, machine), Rates(costs, HERE)
        self._seconds = {
            (each.shape, each.pass_, each.device, each.precision, each.form): (
                median(each.seconds), median(each.host_seconds),
            )
            for each in costs.products
        }  # fmt: skip
        self._placed = {
            (each.shape, each.pass_, each.precision, each.wire): median(each.seconds)
            for each in costs.placed
        }
        self._fixed = {(each.name, each.device): median(each.seconds) for each in costs.fixed}

    def instance(
        self, precisions: Sequence[str], unmodelled: Unmodelled, memory: float | None = None
    ) -> Instance:
        """The problem with these precisions allowed."""
        groups: dict[tuple[int, bool], list[str]] = {}
        for layer in self.costs.layers:
            groups.setdefault((layer.shape, layer.input_grad), []).append(layer.name)
        made = [
            self._group(shape, wanted, tuple(names), precisions, unmodelled)
            for (shape, wanted), names in groups.items()
        ]
        split = self.variant.elsewhere == "cpu"
        everything = _ALIVE * sum(self._bytes(layer, "output") for layer in self.costs.layers)
        at_home = self.costs.accelerator_bytes or everything + 4 * _FLOAT * self.costs.parameters
        working = max(
            self._bytes(layer, "input") + self._bytes(layer, "output")
            for layer in self.costs.layers
        )
        longer = unmodelled.step / self.machine.cpu
        step = Cost(chain=longer, cpu=longer)
        weights = _FLOAT * self.costs.parameters
        return Instance(
            groups=tuple(made),
            split=split,
            forward=self._elsewhere("forward") + step,
            backward=self._elsewhere("backward") + self._elsewhere("optimiser"),
            weights=self._sent("fp32", self.costs.parameters, 0) if split else Cost(),
            late=self._late[1] if split else 0.0,
            late_per_byte=self._rates.per_byte("down") if split else 0.0,
            resident=self.variant.resident,
            base_bytes=0 if split else at_home,
            working_bytes=weights + working if split else 0,
            memory=memory,
        )

    def _group(
        self,
        number: int,
        wanted: bool,
        names: tuple[str, ...],
        precisions: Sequence[str],
        unmodelled: Unmodelled,
    ) -> Group:
        shape = self.costs.shapes[number]
        passes = [name for name in PASSES if wanted or name != "input_grad"]
        choices = {
            name: tuple(
                choice
                for device in ("cpu", "accelerator")
                for precision in precisions
                for choice in self._choice(number, name, device, precision, wanted, unmodelled)
            )
            for name in passes
        }
        channels = shape.input[1], shape.output[1]
        return Group(
            layers=names,
            choices=choices,
            native=tuple(self._native(number, wanted, precisions, choices)),
            resend=self._sent(self.variant.wire, prod(shape.input), channels[0]),
            send=self._sent(self.variant.wire, prod(shape.output), channels[1]),
            kept_bytes=self._wired(prod(shape.input), channels[0]),
            weight_bytes=_FLOAT * prod(shape.weight),
        )

    def _choice(
        self,
        number: int,
        pass_: str,
        device: str,
        precision: str,
        wanted: bool,
        unmodelled: Unmodelled,
    ) -> list[Choice]:
        """The one choice of a device and precision; none where it was not measured there."""
        away = self.variant.elsewhere == "cpu" and device == "accelerator"
        form = self.variant.wire if away else "fp32"
        if (number, pass_, device, precision, form) not in self._seconds:
            return []
        if not away:
            cost = self._local(number, pass_, device, precision, wanted)
        elif pass_ == "weight_grad":
            cost = self._later(number, precision, wanted)
        else:
            found = self._over_the_bus(number, pass_, precision)
            if found is None:
                return []
            cost = found
        if away:
            longer = unmodelled.per_pass / self.machine.cpu
            # A call that takes less within a step than by itself is the host's, which is busy for
            # that much less. Of one that takes longer nobody knows who waits for whom.
            busy = max(0.0, cost.cpu + min(0.0, longer))
            cost = replace(cost, chain=max(0.0, cost.chain + longer), cpu=busy)
        return [Choice(device, precision, cost, away)]

    def _local(self, number: int, pass_: str, device: str, precision: str, wanted: bool) -> Cost:
        """A product where everything lives; or, from the accelerator, on the CPU and back."""
        cost = self._product(number, pass_, device, precision)
        first = pass_ == "forward" or pass_ == ("input_grad" if wanted else "weight_grad")
        if first:
            direction = "forward" if pass_ == "forward" else "backward"
            cost = cost + self._function(direction)
        if device == self.variant.elsewhere or self.costs.stand_in:
            return cost
        shape = self.costs.shapes[number]
        sizes = {
            "forward": (shape.input, shape.weight, shape.output),
            "input_grad": (shape.output, shape.weight, shape.input),
            "weight_grad": (shape.output, shape.input, shape.weight),
        }[pass_]
        down = sum(self._rates.copy("pageable", "down", _FLOAT * prod(each)) for each in sizes[:2])
        up = self._rates.copy("pageable", "up", _FLOAT * prod(sizes[2]))
        # The queue runs empty before the copy, and the device waits for the CPU.
        both = cost.chain + down + up
        return Cost(chain=both, accelerator=both, up=up, down=down, cpu=both)

    def _product(self, number: int, pass_: str, device: str, precision: str) -> Cost:
        """A product among tensors of its device, in float32."""
        seconds, host = self._seconds[(number, pass_, device, precision, "fp32")]
        if device == "cpu":
            seconds /= self.machine.cpu
            return Cost(chain=seconds, cpu=seconds)
        return self._queued(seconds, host)

    def _queued(self, seconds: float, host: float) -> Cost:
        """Work of the accelerator that the host queues; a CPU that stands in does it itself."""
        seconds /= self.machine.accelerator
        if self.costs.stand_in:
            return Cost(chain=seconds, accelerator=seconds)
        host = self._launched(host)
        return Cost(chain=host, accelerator=seconds, cpu=host)

    def _function(self, direction: str) -> Cost:
        """What a placed layer costs beyond its products, where nothing travels."""
        device = self.variant.elsewhere
        local, tiny = (self._fixed[(f"{kind}.{direction}", device)] for kind in ("local", "tiny"))
        engine = self._fixed[("engine", device)] if direction == "backward" else 0.0
        seconds = max(0.0, local - tiny - engine) / self.machine.cpu
        return Cost(chain=seconds, cpu=seconds)

    def _over_the_bus(self, number: int, pass_: str, precision: str) -> Cost | None:
        """A forward pass or an input gradient, as it was measured and as the machine has it."""
        costs, wire = self.costs, self.variant.wire
        key = (number, pass_, precision, wire)
        if key not in self._placed:
            return None
        # The backward one was measured with a start of autograd's engine of its own.
        engine = self._fixed[("engine", "cpu")] if pass_ == "input_grad" else 0.0
        measured = max(0.0, self._placed[key] - engine)
        shape = self.costs.shapes[number]
        seconds, _ = self._seconds[(number, pass_, "accelerator", precision, wire)]
        modelled = Staged(costs, wire, shape, pass_, "overlapped", self._here, HERE).chain(seconds)
        call, share = max(0.0, measured - modelled), min(1.0, measured / modelled)
        now = Staged(costs, wire, shape, pass_, self.variant.policy, self._rates, self.machine)
        seconds /= self.machine.accelerator
        call = self._launched(call)
        up, down = now.bus()
        ends = share * now.host()
        return Cost(
            chain=share * now.chain(seconds) + call,
            accelerator=seconds + now.packing(),
            up=up,
            down=down,
            cpu=ends + call,
        )

    def _later(self, number: int, precision: str, wanted: bool) -> Cost:
        """A weight gradient over the bus: queued now, there at the end."""
        wire = self.variant.wire
        seconds, host = self._seconds[(number, "weight_grad", "accelerator", precision, wire)]
        cost = self._queued(seconds, host)
        late = self._late[0]
        cost = cost + Cost(chain=late, cpu=late)
        return cost if wanted else cost + self._function("backward")

    @cached_property
    def _late(self) -> tuple[float, float]:
        """(per late weight gradient, per backward pass that has any), beyond products."""
        one, five = (
            self._fixed[(f"late.{n}", "accelerator")] - self._fixed[(f"kept.{n}", "accelerator")]
            for n in (1, 5)
        )
        each = max(0.0, (five - one) / 4)
        return self._launched(each), self._launched(max(0.0, one - each))

    def _native(
        self,
        number: int,
        wanted: bool,
        precisions: Sequence[str],
        choices: dict[str, tuple[Choice, ...]],
    ) -> list[Native]:
        """torch's own layer. The runtime takes it wherever it can, so it costs no more here than
        the same passes one by one."""
        home = self.variant.elsewhere
        engine = self._fixed[("engine", home)]
        found = []
        for precision in (name for name in NATIVE if name in precisions):
            whole = {
                each.direction: each
                for each in self.costs.native
                if (each.shape, each.device, each.precision) == (number, home, precision)
                and (each.direction == "forward" or each.input_grad == wanted)
            }
            apart = {
                name: [c.cost for c in each if (c.device, c.precision) == (home, precision)]
                for name, each in choices.items()
            }
            if len(whole) < 2 or not all(apart.values()):
                continue
            made = []
            for direction, begun in (("forward", 0.0), ("backward", engine)):
                cost = self._whole(whole[direction], begun)
                parts = [c for name, each in apart.items() for c in each
                         if (name == "forward") == (direction == "forward")]  # fmt: skip
                made.append(_least(cost, total(parts)))
            found.append(Native(home, precision, made[0], made[1]))
        return found

    def _whole(self, native: NativeCost, begun: float) -> Cost:
        seconds, host = (
            max(0.0, median(getattr(native, name)) - begun) for name in ("seconds", "host_seconds")
        )
        if self.variant.elsewhere == "cpu":
            return Cost(chain=seconds / self.machine.cpu, cpu=seconds / self.machine.cpu)
        return self._queued(seconds if self.costs.stand_in else median(native.seconds), host)

    def _elsewhere(self, direction: str) -> Cost:
        home = self.variant.elsewhere
        found = Cost()
        for each in self.costs.segments:
            if (each.device, each.direction) == (home, direction):
                if home == "cpu":
                    seconds = median(each.seconds) / self.machine.cpu
                    found = found + Cost(chain=seconds, cpu=seconds)
                else:
                    found = found + self._queued(median(each.seconds), median(each.host_seconds))
        return found

    def _sent(self, wire: str, elements: int, channels: int) -> Cost:
        """A tensor's way up by itself: the host packs it, and waits."""
        packed = self._rates.conversion("cpu", "pack", wire, elements)
        size = WIDTH[wire] * elements + (_FLOAT * channels if wire == "int8" else 0)
        up = self._rates.copy(self.variant.policy, "up", size)
        return Cost(chain=packed + up, up=up, cpu=packed + (up if self.costs.stand_in else 0.0))

    def _launched(self, seconds: float) -> float:
        """The host's own cost of a call, on this machine."""
        launch = self._fixed[("tiny.forward", "accelerator")]
        latency = self.machine.latency
        share = 1.0 if latency is None else min(1.0, latency / launch)
        return share * seconds / self.machine.cpu

    def _wired(self, elements: int, channels: int) -> int:
        wire = self.variant.wire
        return WIDTH[wire] * elements + (_FLOAT * channels if wire == "int8" else 0)

    def _bytes(self, layer: PlacedLayer, tensor: str) -> int:
        shape = self.costs.shapes[layer.shape]
        return _FLOAT * prod(shape.input if tensor == "input" else shape.output)


def _least(one: Cost, other: Cost) -> Cost:
    return Cost(
        min(one.chain, other.chain),
        min(one.accelerator, other.accelerator),
        min(one.up, other.up),
        min(one.down, other.down),
        min(one.cpu, other.cpu),
    )
