"""Compaction on a GPU without its launches: stages captured for a ladder of batch sizes.

Launch by launch, what a batch of 256 saves by getting smaller is less than what the host needs to
launch a stage of a small network. So each stage is captured for eighths of the batch, and halves of
the smallest; the device packs who goes on to the front of the next stage's input, and the smallest
size that holds them runs. Rows beyond are computed and go nowhere.

Which size that is the device knows: each stage is a SWITCH node of one graph, whose condition the
kernel that packs sets. Without such nodes or that kernel the host reads how many come, and replays.
"""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import torch

from narrowgauge_contract.errors import BadValueError
from narrowgauge_kernels.errors import KernelsError
from narrowgauge_lab.anytime.adaptive import (
    Adaptive,
    require_capturable,
    stage_macs,
)
from narrowgauge_lab.anytime.chains import Switches
from narrowgauge_lab.anytime.conditional import DriverGraphs, why_no_switch
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.fused import MOST_SIZES, Order, Outcome, fused_or_why
from narrowgauge_lab.anytime.network import Answer, AnytimeNetwork, State
from narrowgauge_lab.anytime.policies import Memory, Policy
from narrowgauge_lab.anytime.stage_graphs import captured_in_turn, stage_names

__all__ = ["BucketedExits", "Packed", "ladder"]

_STEPS = 8
_BY_DEVICE = "compaction by captured batch sizes, the device chooses by conditional graph nodes"
_BY_HOST = "compaction by captured batch sizes, one host read for each exit"


def ladder(batch: int, steps: int = _STEPS) -> Tuple[int, ...]:
    """Ascending sizes, the last of which is the batch: its eighths, rounded up, and halves of the
    smallest down to 1; at most `MOST_SIZES`, of which the smallest are left out."""
    sizes = {-(-batch * step // steps) for step in range(1, steps + 1)}
    small = min(sizes)
    while small > 1:
        small = -(-small // 2)
        sizes.add(small)
    return tuple(sorted(sizes)[-MOST_SIZES:])


@dataclasses.dataclass(frozen=True)
class Packed:
    """What a stage starts from: of who comes, in front, the `state` and the policy's `memory`, and
    where in the batch they stand, `rest` int64. All have one row more than the batch, where what
    goes nowhere is written; `rest` says that row for rows that nobody has."""

    state: State
    memory: State
    rest: torch.Tensor

    def first(self, size: int) -> Packed:
        """Views of the front rows."""
        cut = tuple(part[:size] for part in self.state), tuple(part[:size] for part in self.memory)
        return Packed(cut[0], cut[1], self.rest[:size])

    def fill(self, state: State, memory: State, rest: torch.Tensor, onward: torch.Tensor) -> None:
        """Take over those rows for which `onward` [n] is true, in order, in front."""
        nowhere = self.rest.shape[0] - 1
        place = onward.cumsum(0) - 1
        place = torch.where(onward, place, torch.full_like(place, nowhere))
        self.put(state, memory, place)
        self.rest.fill_(nowhere)
        self.rest.index_copy_(0, place, rest)
        self.rest[nowhere:].fill_(nowhere)

    def put(self, state: State, memory: State, place: torch.Tensor) -> None:
        """Each row [n] at its place here: int64 [n], the batch's size for nowhere. `rest` stays."""
        for mine, theirs in zip(self.state + self.memory, state + memory):
            mine.index_copy_(0, place, theirs)


class BucketedExits:
    """A pass with compaction, by captured stages. Raises what CapturedStages raises, BadValueError
    for a batch of none among it.

    A call answers in tensors that the next call overwrites, without waiting where the device
    chooses, which it does where it can unless `by_device` is false. `description`, for the record,
    says which way it is and why not the other.
    """

    def __init__(
        self,
        net: AnytimeNetwork,
        images: torch.Tensor,
        policy: Policy,
        costs: ExitCosts,
        by_device: bool = True,
    ) -> None:
        require_capturable(net, images)
        self._net, self._policy, self._costs = net, policy.for_exits(net.exits), costs
        device, self._batch = images.device, images.shape[0]
        rows = self._batch + 1
        self._images = images.clone()
        self._exits = torch.zeros(rows, dtype=torch.int64, device=device)
        self._macs = torch.zeros(rows, dtype=torch.float64, device=device)
        self._count = torch.zeros((), dtype=torch.int64, device=device)
        self._place = torch.zeros(rows, dtype=torch.int64, device=device)
        self.sizes = ladder(self._batch)
        self._sizes = torch.tensor(self.sizes, dtype=torch.int64, device=device)
        self._cells = torch.zeros(net.exits, dtype=torch.int64, device=device)
        with torch.no_grad():
            self._inputs, self._logits = self._buffers()
            everybody = self._logits[: self._batch]
            self._fused, decides = fused_or_why(self._policy, costs, everybody)
            self._graphs = self._captured(device)
        self._switches, why = self._switched(device, by_device)
        self.description = f"{_BY_HOST if why else _BY_DEVICE}, {decides}"
        if why:
            self.description += f"; the device does not choose: {why}"

    def __call__(self, images: torch.Tensor) -> Adaptive:
        """Of a batch as large as the one that was captured; else BadValueError."""
        if images.shape != self._images.shape:
            raise BadValueError(
                f"images {tuple(images.shape)} for a pass captured with "
                f"{tuple(self._images.shape)}",
                next_step="capture one for this batch too",
            )
        self._images.copy_(images)
        self._macs.zero_()
        if self._switches is not None:
            self._switches.launch()
        else:
            self._step()
        batch = self._batch
        return Adaptive(self._logits[:batch], self._exits[:batch], self._macs[:batch])

    def _step(self) -> None:
        """The host goes from stage to stage."""
        coming = self._batch
        for number in range(len(self._graphs)):
            self.graph_for(number, coming).replay()
            if number == len(self._graphs) - 1:
                break
            coming = int(self._count.item())
            if not coming:
                break

    @property
    def by_device(self) -> bool:
        """Whether a call is one launch, the device choosing the sizes."""
        return self._switches is not None

    def graph_for(self, number: int, coming: int) -> torch.cuda.CUDAGraph:
        """What runs of a stage for so many images, at least one. Where the device chooses it is not
        to be replayed."""
        place = next(place for place, size in enumerate(self.sizes) if size >= coming)
        return self._graphs[number][place if number else 0]

    def _switched(self, device: torch.device, asked: bool) -> Tuple[Optional[Switches], str]:
        """All stages as one graph; or why the device does not choose."""
        why = why_no_switch(device) if asked else "it was not asked to"
        if self._fused is None or not self._fused.sets_conditions:
            why = why or "nothing here sets a condition"
        if why:
            return None, why
        first, later = self._graphs[0][0], self._graphs[1:]
        try:
            return Switches(DriverGraphs(device), first, later, self._cells), ""
        except KernelsError as error:
            return None, f"{error.what}: {error.why}"

    def _buffers(self) -> Tuple[List[Packed], torch.Tensor]:
        """Input of each stage, as large as it can be, and of the logits, by a pass of all."""
        rest = torch.arange(self._batch + 1, device=self._images.device)
        state, memory = self._net.begin(self._images), Memory()
        inputs = [Packed(state, (), rest)]
        logits = torch.empty(0)
        for number in range(self._net.exits):
            answer = self._net.advance(number, state)
            state = answer.state
            if number < self._net.exits - 1:
                self._policy.leaves(number, answer.logits, memory)
                more = tuple(map(_one_more, state)), tuple(map(_one_more, memory.parts))
                inputs.append(Packed(more[0], more[1], rest.clone()))
            logits = answer.logits
        return inputs, _one_more(logits)

    def _captured(self, device: torch.device) -> List[List[torch.cuda.CUDAGraph]]:
        """By stage and size; the first stage always has the whole batch."""
        sizes = [self.sizes if number else self.sizes[-1:] for number in range(self._net.exits)]
        pieces = [(number, size) for number, each in enumerate(sizes) for size in each]
        stages = stage_names(self._net.exits)
        names = [f"{stages[number]} for {size} images" for number, size in pieces]
        graphs = iter(
            captured_in_turn(
                names, device, lambda: lambda place: self._stage(*pieces[place]),
                "adaptive() captures nothing",
            )
        )  # fmt: skip
        return [[next(graphs) for _ in each] for each in sizes]

    def _stage(self, number: int, size: int) -> None:
        """From this stage's input to the next one's."""
        if number == 0:
            given = Packed(self._net.begin(self._images), (), self._inputs[0].rest[:size])
        else:
            given = self._inputs[number].first(size)
        answer = self._net.advance(number, given.state)
        if self._fused is None:
            self._by_operators(number, given, answer)
            return
        outcome = Outcome(self._logits, self._exits, self._macs)
        onward = self._inputs[min(number + 1, self._net.exits - 1)]
        place = self._place[:size]
        order = Order(given.rest, onward.rest, place, self._count, self._sizes, self._cells[number])
        self._fused.pack(number, answer, outcome, order)
        if number < self._net.exits - 1:
            onward.put(answer.state, (), place)

    def _by_operators(self, number: int, given: Packed, answer: Answer) -> None:
        self._logits.index_copy_(0, given.rest, answer.logits)
        self._exits.index_fill_(0, given.rest, number)
        self._macs.index_add_(0, given.rest, stage_macs(self._costs, number, answer))
        if number == self._net.exits - 1:
            return
        memory = Memory()
        memory.parts = given.memory
        leaves = self._policy.leaves(number, answer.logits, memory)
        onward = leaves.logical_not() & (given.rest < self._batch)
        self._inputs[number + 1].fill(answer.state, memory.parts, given.rest, onward)
        self._count.copy_(onward.sum())


def _one_more(part: torch.Tensor) -> torch.Tensor:
    """Zeros like `part` [B, …] with a row more, in the same order in memory."""
    return torch.cat([part, part[:1]]).zero_()
