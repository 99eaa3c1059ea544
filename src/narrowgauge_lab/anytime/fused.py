"""What follows a stage, in one kernel: of networks as small as these a dozen of torch's operators
take longer than the stage.

For rules that hold a measure of float32 logits against a threshold, up to 1024 samples at once;
`why_not` says what there is not. Torch's operators are the reference and the fallback: measures
are summed in another order here, so a sample whose measure is the threshold but for that may leave
elsewhere. What is launched is put on torch's current stream, and may be captured.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import struct
from pathlib import Path
from typing import Callable, List, Optional, Sequence, Tuple, Union

import torch

from narrowgauge_kernels.errors import KernelBuildError, KernelsError
from narrowgauge_kernels.sparse.compiling import compile_source
from narrowgauge_kernels.sparse.driver import Argument, CudaDriver, Pointer
from narrowgauge_lab.anytime.conditional import why_not as why_no_conditions
from narrowgauge_lab.anytime.costs import ExitCosts
from narrowgauge_lab.anytime.decision_source import (
    DECIDE,
    DECIDE_THREADS,
    KINDS,
    MOST_SAMPLES,
    MOST_SIZES,
    PACK,
    SOURCE,
    SOURCE_WITH_CONDITIONS,
)
from narrowgauge_lab.anytime.network import Answer
from narrowgauge_lab.anytime.policies import Entropy, Margin, MaxProbability, Policy, Threshold

__all__ = [
    "BY_KERNEL", "MOST_SIZES", "Fused", "Given", "Launch", "Order", "Outcome", "driver_launch",
    "fused_or_why", "why_not",
]  # fmt: skip

#: What records say of who decides.
BY_KERNEL = "one kernel decides"
_BY_OPERATORS = "torch's operators decide"

#: An argument of a kernel: a tensor's address (of None 0), or a number of 32 bits.
Given = Union[torch.Tensor, int, None]
#: Puts a kernel of this name on a stream: blocks, threads of each, arguments.
Launch = Callable[[str, int, int, Sequence[Given]], None]
Compile = Callable[[str, str], Path]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What samples leave: `logits` [rows, classes] float32, `exits` [rows] int64 and `macs` [rows]
    float64 of the exit that each left at so far."""

    logits: torch.Tensor
    exits: torch.Tensor
    macs: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Order:
    """Who comes to a stage and where those who go on are put: `rest` [n] int64, the sample of each
    row (the batch's size is nobody); and what is written, `next_rest` [batch + 1] int64 in order,
    `place` [n or more] int64, in front or the batch's size for nowhere, `count` int64 [].

    `sizes`, int64, ascending, at most `MOST_SIZES`, and `cell` int64 []: where the handle of a
    condition lies there (0: none), it becomes the place of the smallest of the sizes that holds all
    who go on, or their number where nobody does."""

    rest: torch.Tensor
    next_rest: torch.Tensor
    place: torch.Tensor
    count: torch.Tensor
    sizes: Optional[torch.Tensor] = None
    cell: Optional[torch.Tensor] = None


class Fused:
    """The kernels for one policy, made to fit its network, and the costs of its exits.

    `sets_conditions`: whether they set the conditions whose handles are in their cells.
    """

    def __init__(
        self,
        policy: Threshold,
        costs: ExitCosts,
        launch: Launch,
        device: torch.device,
        sets_conditions: bool = True,
    ) -> None:
        self.sets_conditions = sets_conditions
        self._policy, self._costs, self._launch = policy, costs, launch
        # Zero between any two launches, which come one after another.
        self._turn = torch.zeros((), dtype=torch.int32, device=device)

    def decide(
        self,
        number: int,
        answer: Answer,
        outcome: Outcome,
        undecided: torch.Tensor,
        flag: torch.Tensor,
        cell: Optional[torch.Tensor] = None,
    ) -> None:
        """Behind stage `number`, of all samples: those `undecided` [B] take its answer; but behind
        the last one, who is sure of it is decided then, and `flag` [] is whether anybody is not, as
        is the condition whose handle lies in `cell` int64 [], 0 for none. Stage 0 begins with
        everybody."""
        logits = _rows(answer)
        lanes = _lanes(logits.shape[1])
        blocks = -(-logits.shape[0] * lanes // DECIDE_THREADS)
        macs, each = self._macs(number, answer)
        self._launch(
            DECIDE, blocks, DECIDE_THREADS,
            [logits, outcome.logits, outcome.exits, outcome.macs, undecided, flag, self._turn,
             each, cell, *logits.shape, lanes, *self._rule(number, logits.shape[1]), *macs,
             number, self._is_last(number)],
        )  # fmt: skip

    def pack(self, number: int, answer: Answer, outcome: Outcome, order: Order) -> None:
        """Behind stage `number`, of the samples in `order`, which take its answer; who goes on is
        put in order there, but behind the last stage. `outcome` may have more rows."""
        logits = _rows(answer)
        rows, classes = logits.shape
        lanes, nobody = _lanes(classes), order.next_rest.shape[0] - 1
        threads = min(MOST_SAMPLES, -(-rows * lanes // 32) * 32)
        macs, each = self._macs(number, answer)
        self._launch(
            PACK, 1, threads,
            [logits, outcome.logits, outcome.exits, outcome.macs, each, order.rest,
             order.next_rest, order.place, order.count, order.sizes, order.cell, rows, nobody,
             classes, lanes, *self._rule(number, classes), *macs, number, self._is_last(number),
             0 if order.sizes is None else order.sizes.shape[0]],
        )  # fmt: skip

    def _is_last(self, number: int) -> int:
        return int(number == len(self._costs.stages) - 1)

    def _rule(self, number: int, classes: int) -> Tuple[int, int, int]:
        """Which measure, its threshold and its factor; of the last exit nothing is asked."""
        policy = self._policy
        limit = 0.0 if self._is_last(number) else policy.thresholds[number]
        scale = 1.0
        if isinstance(policy, Entropy) and policy.normalised:
            # As a GPU divides by a number: times its reciprocal in float32.
            scale = 1.0 / _float32(math.log(max(classes, 2)))
        return KINDS.index(_kind(policy)), _bits(limit), _bits(scale)

    def _macs(self, number: int, answer: Answer) -> Tuple[Tuple[int, int], Optional[torch.Tensor]]:
        """Of one image, as halves of a float64; or of each, where the answer says so."""
        if answer.macs is not None:
            return (0, 0), answer.macs.to(torch.float64).contiguous()
        low, high = struct.unpack("<II", struct.pack("<d", float(self._costs.stages[number])))
        return (low, high), None


def why_not(policy: Policy, logits: torch.Tensor) -> str:
    """Why the kernels are not for this policy and logits like these [B, classes]; empty where they
    are."""
    if not isinstance(policy, Threshold) or not _kind(policy):
        return f"{type(policy).__name__.lower()} holds no measure against a threshold"
    if logits.dtype != torch.float32:
        return f"logits are {str(logits.dtype).partition('.')[2]}"
    if logits.shape[0] > MOST_SAMPLES:
        return f"{logits.shape[0]} samples are more than {MOST_SAMPLES}"
    return "" if logits.is_cuda else f"the kernel is CUDA, the logits are on a {logits.device.type}"


def fused_or_why(
    policy: Policy, costs: ExitCosts, logits: torch.Tensor
) -> Tuple[Optional[Fused], str]:
    """The kernels for a policy that fits its network and logits like these, where there are any;
    and what a record says of who decides, with the reason where torch's operators do."""
    lacking = why_not(policy, logits)
    if not lacking:
        assert isinstance(policy, Threshold)
        try:
            launch, conditions = driver_launch(logits.device)
            return Fused(policy, costs, launch, logits.device, conditions), BY_KERNEL
        except KernelsError as error:
            lacking = f"{error.what}: {error.why}"
    return None, f"{_BY_OPERATORS}: {lacking}"


def driver_launch(
    device: torch.device,
    library: str = "libcuda.so.1",
    compile_for: Compile = compile_source,
) -> Tuple[Launch, bool]:
    """Launches by the driver on torch's current stream of a GPU, for which the kernels are compiled
    and loaded here; and whether they set conditions: where there are conditional nodes, and a
    compiler that knows of them. Raises DeviceError where the driver refuses, and what compiling
    raises."""
    index = device.index if device.index is not None else torch.cuda.current_device()
    major, minor = torch.cuda.get_device_capability(index)
    driver = CudaDriver(library)
    driver.make_current(index)
    arch, conditions = f"{major}.{minor}", not why_no_conditions(device, library)
    try:
        code = compile_for(SOURCE_WITH_CONDITIONS if conditions else SOURCE, arch)
    except KernelBuildError:
        if not conditions:
            raise
        code, conditions = compile_for(SOURCE, arch), False  # a compiler before CUDA 12.4
    functions = {name: driver.function(code, name, 0, index) for name in (DECIDE, PACK)}

    def launch(name: str, blocks: int, threads: int, given: Sequence[Given]) -> None:
        stream = torch.cuda.current_stream(index).cuda_stream
        driver.launch(functions[name], (blocks, 1), threads, 0, stream, _arguments(given))

    return launch, conditions


def _arguments(given: Sequence[Given]) -> List[Argument]:
    return [
        each if isinstance(each, int) else Pointer(0 if each is None else each.data_ptr())
        for each in given
    ]


def _rows(answer: Answer) -> torch.Tensor:
    """float32 [B, classes] as the kernels read them: what an exit says otherwise is converted."""
    return answer.logits.to(torch.float32).contiguous()


def _lanes(classes: int) -> int:
    """Threads of one row: a power of two within a warp."""
    lanes = 1
    while lanes < min(classes, 32):
        lanes *= 2
    return lanes


def _kind(policy: Threshold) -> str:
    """Its name in KINDS, empty for a rule of somebody else."""
    named = {Entropy: "entropy", MaxProbability: "max-probability", Margin: "margin"}
    return named.get(type(policy), "")


def _float32(value: float) -> float:
    return float(ctypes.c_float(value).value)


def _bits(value: float) -> int:
    """Of the float32 next to it, infinity for what is beyond, as torch compares."""
    return int(ctypes.c_uint32.from_buffer(ctypes.c_float(value)).value)
