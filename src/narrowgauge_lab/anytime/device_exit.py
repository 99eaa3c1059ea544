"""The decision to leave, without asking the host: for one image, or a whole batch of one size.

Stages are captured once, with the policy inside them. Then either the device itself goes from one
to the next or stops, by conditional graph nodes; or the host reads one flag after each, which is
the fallback, and the way it is compared with. All of a batch goes on while anybody does; each
sample keeps the answer of the exit at which it would have left.
"""

from __future__ import annotations

from typing import Callable, Optional, Union

import torch

from narrowgauge_contract.errors import BadValueError, NotApplicableError
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab.anytime.adaptive import (
    Adaptive,
    adaptive,
    of_nobody,
    require_capturable,
    require_eval,
    stage_macs,
)
from narrowgauge_lab.anytime.chains import Chain
from narrowgauge_lab.anytime.conditional import DriverGraphs, why_not
from narrowgauge_lab.anytime.costs import ExitCosts, exit_costs
from narrowgauge_lab.anytime.fused import Outcome, fused_or_why
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.policies import Memory, Policy
from narrowgauge_lab.anytime.stage_graphs import captured_in_turn, stage_names
from narrowgauge_lab.graphs import CaptureError

__all__ = [
    "CapturedStages", "ConditionalExits", "EagerExits", "Exits", "SteppedExits", "all_stages",
    "make_exits",
]  # fmt: skip


class CapturedStages:
    """The stages of a network in eval mode, each in a CUDA graph, for batches like `images`.

    What they leave is in `logits`, `exits`, `macs` (see Adaptive) and `flag`, a bool: whether
    anybody goes on. `decides` says what the policy is there, one kernel or torch's operators. A
    kernel also sets the conditions whose handles are in `cells`, int64, one for each exit but the
    last; where nothing does there are no cells.
    Raises CaptureError for a network that does what cannot be captured, NotApplicableError where
    there are no CUDA graphs, and BadValueError for no images.
    """

    def __init__(
        self, net: AnytimeNetwork, images: torch.Tensor, policy: Policy, costs: ExitCosts
    ) -> None:
        require_capturable(net, images)
        self._net, self._policy, self._costs = net, policy.for_exits(net.exits), costs
        device, batch = images.device, images.shape[0]
        self.images = images.clone()
        self.exits = torch.zeros(batch, dtype=torch.int64, device=device)
        self.macs = torch.zeros(batch, dtype=torch.float64, device=device)
        self.flag = torch.ones((), dtype=torch.bool, device=device)
        self.cells: Optional[torch.Tensor] = None
        self._undecided = torch.ones(batch, dtype=torch.bool, device=device)
        with torch.no_grad():
            logits = net.advance(0, net.begin(self.images)).logits
            self.logits = torch.zeros_like(logits, memory_format=torch.contiguous_format)
            self._fused, self.decides = fused_or_why(self._policy, costs, self.logits)
            if self._fused is not None and self._fused.sets_conditions:
                self.cells = torch.zeros(net.exits, dtype=torch.int64, device=device)
            self.graphs = captured_in_turn(
                stage_names(net.exits),
                device,
                self._pass,
                "the passes run without graphs: EagerExits",
            )

    def load(self, images: torch.Tensor) -> None:
        """What the next run works on. Raises BadValueError for images of another shape."""
        if images.shape != self.images.shape:
            raise BadValueError(
                f"images {tuple(images.shape)} for stages captured with {tuple(self.images.shape)}",
                next_step="capture them for this batch too",
            )
        self.images.copy_(images)

    @property
    def answer(self) -> Adaptive:
        """The last run's, in tensors that the next one overwrites."""
        return Adaptive(self.logits, self.exits, self.macs)

    def of_nobody(self, images: torch.Tensor) -> Adaptive:
        """The answer for a batch of none, which nothing has to run for."""
        return of_nobody(self._net, images)

    def _pass(self) -> Callable[[int], None]:
        state: State = ()
        memory = Memory()

        def stage(number: int) -> None:
            nonlocal state
            state = self._stage(number, state, memory)

        return stage

    def _stage(self, number: int, state: State, memory: Memory) -> State:
        """Everything in place: a captured stage has no other way to leave anything. The first one
        is given no state: what `begin` makes of the images has to be made anew by each replay."""
        if number == 0:
            state = self._net.begin(self.images)
        answer = self._net.advance(number, state)
        if self._fused is None:
            self._by_operators(number, answer, memory)
        else:
            outcome = Outcome(self.logits, self.exits, self.macs)
            cell = self.cells[number] if self.cells is not None else None
            self._fused.decide(number, answer, outcome, self._undecided, self.flag, cell)
        return answer.state

    def _by_operators(self, number: int, answer: Answer, memory: Memory) -> None:
        if number == 0:
            self._undecided.fill_(True)
            self.macs.zero_()
        here = self._undecided
        self.logits.copy_(torch.where(here.unsqueeze(1), answer.logits, self.logits))
        self.exits.masked_fill_(here, number)
        self.macs.add_(stage_macs(self._costs, number, answer) * here)
        if number < self._net.exits - 1:
            leaves = self._policy.leaves(number, answer.logits, memory)
            here.logical_and_(leaves.logical_not())
            self.flag.copy_(here.any())


class ConditionalExits:
    """The device decides. Raises NotApplicableError, saying why, where it cannot.

    The stages are its own from then on: what decides in them sets conditions of its graph.
    """

    def __init__(self, stages: CapturedStages) -> None:
        device = stages.images.device
        lacking = why_not(device)
        if lacking:
            raise NotApplicableError("no conditional graph nodes here", why=lacking)
        self.description = f"conditional graph node, {stages.decides}"
        self._stages = stages
        self._chain = Chain(DriverGraphs(device), stages.graphs, stages.flag, stages.cells)

    def __call__(self, images: torch.Tensor) -> Adaptive:
        """In tensors that the next call overwrites; nothing is waited for. Of no images, empty."""
        if not images.shape[0]:
            return self._stages.of_nobody(images)
        self._stages.load(images)
        self._chain.launch()
        return self._stages.answer


class SteppedExits:
    """The host reads the flag after each stage but the last."""

    def __init__(self, stages: CapturedStages, why: str = "") -> None:
        how = f"host read between captured stages, {stages.decides}"
        self.description = how + (f": {why}" if why else "")
        self._stages = stages

    def __call__(self, images: torch.Tensor) -> Adaptive:
        """In tensors that the next call overwrites. Of no images, empty."""
        stages = self._stages
        if not images.shape[0]:
            return stages.of_nobody(images)
        stages.load(images)
        last = len(stages.graphs) - 1
        for number, graph in enumerate(stages.graphs):
            graph.replay()
            if number < last and not stages.flag.item():
                break
        return stages.answer


class EagerExits:
    """`adaptive`, with its compaction; takes batches of any size."""

    def __init__(
        self, net: AnytimeNetwork, policy: Policy, costs: ExitCosts, why: str = ""
    ) -> None:
        self.description = "host read of who goes on, launch by launch" + (
            f": {why}" if why else ""
        )
        self._net, self._policy, self._costs = net, policy, costs

    def __call__(self, images: torch.Tensor) -> Adaptive:
        """See `adaptive`. Of no images, empty."""
        return adaptive(self._net, images, self._policy, self._costs)


Exits = Union[ConditionalExits, SteppedExits, EagerExits]


def make_exits(net: AnytimeNetwork, images: torch.Tensor, policy: Policy) -> Exits:
    """The fastest way to leave early that works here for batches like `images`, at least one.

    Its `description` says which it is and, where it is not the conditional node, why: what a record
    has to name. Raises BadValueError for a policy that does not fit the network, no images, and a
    network in training mode.
    """
    require_eval(net)
    fitted = policy.for_exits(net.exits)
    costs = exit_costs(net, images[:1])
    if images.device.type != "cuda":
        return EagerExits(net, fitted, costs, f"the {images.device.type} is the host")
    try:
        stages = CapturedStages(net, images, fitted, costs)
    except (CaptureError, KernelsError, NotApplicableError) as error:
        return EagerExits(net, fitted, costs, f"{error.what}: {error.why}")
    try:
        return ConditionalExits(stages)
    except (KernelsError, NotApplicableError) as error:
        return SteppedExits(stages, f"{error.what}: {error.why}")


def all_stages(stages: CapturedStages) -> Chain:
    """The same captured work with no decision between: what a decision's own time is over."""
    return Chain(DriverGraphs(stages.images.device), stages.graphs, None)
