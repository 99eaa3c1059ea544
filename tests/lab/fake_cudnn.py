"""A stand-in for the Python frontend of cuDNN, as nvidia-cudnn-frontend 1.23 has it, that computes.

Its graphs run on the CPU in the memory whose addresses they are given, so that what a test sees in
y is what the graph said. Its engines are made up; how it says no is the real one's.
"""

from __future__ import annotations

import ctypes
import enum
import json
import math
from typing import Any, Callable, Dict, List, Optional, Tuple

import numpy
import torch
from torch.nn import functional as F

__version__ = "1.23.0"
VERSION = [91900]
SIZES = {"HALF": (numpy.float16, torch.float16), "FLOAT": (numpy.float32, torch.float32)}


class cudnnGraphNotSupportedError(Exception):  # noqa: N801 - the frontend's own name
    pass


class data_type(enum.Enum):  # noqa: N801
    HALF = 1
    BFLOAT16 = 2
    FLOAT = 3


class heur_mode(enum.Enum):  # noqa: N801
    A = 0
    B = 1
    FALLBACK = 2


class knob_type(enum.Enum):  # noqa: N801
    NOT_SET = 0
    TILE_SIZE = 2
    SPLIT_K_SLC = 17
    KERNEL_CFG = 24


class numerical_note(enum.Enum):  # noqa: N801
    TENSOR_CORE = 1
    DOWN_CONVERT_INPUTS = 2
    REDUCED_PRECISION_REDUCTION = 3
    WINOGRAD = 4


class behavior_note(enum.Enum):  # noqa: N801
    RUNTIME_COMPILATION = 0


class Knob:
    def __init__(self, kind: knob_type, least: int, most: int) -> None:
        self.type, self.min_value, self.max_value, self.stride = kind, least, most, 1


class Engine:
    """`takes` says of a graph's operations (as words) whether the engine knows them."""

    def __init__(
        self,
        takes: Callable[[List[str]], bool] = lambda words: True,
        knobs: Tuple[Knob, ...] = (),
        notes: Tuple[str, ...] = (),
        compiled: bool = False,
        rounds: bool = False,
        fails: Optional[Callable[[Dict[int, int]], bool]] = None,
        workspace: int = 0,
        loses_nan: bool = False,
        loses_overflow: bool = False,
        reads_workspace: bool = False,
    ) -> None:
        self.takes, self.knobs, self.workspace = takes, knobs, workspace
        self.notes = {numerical_note[note] for note in notes}
        self.compiled, self.rounds, self.loses_nan = compiled, rounds, loses_nan
        self.loses_overflow, self.reads_workspace = loses_overflow, reads_workspace
        self.fails = fails or (lambda choice: False)


#: What this cuDNN has, and what its heuristics propose: (engine, knobs by number).
ENGINES: List[Engine] = []
PROPOSED: Dict[str, List[Tuple[int, Dict[int, int]]]] = {}


def backend_version() -> int:
    return VERSION[0]


class Tensor:
    def __init__(self) -> None:
        self.dim: List[int] = []
        self.stride: List[int] = []
        self.data_type: Optional[data_type] = None
        self.uid = 0
        self.output = False
        self.compute: Any = None

    def set_output(self, output: bool) -> None:
        self.output = output

    def set_data_type(self, kind: data_type) -> None:
        self.data_type = kind

    def set_uid(self, uid: int) -> None:
        self.uid = uid

    def set_dim(self, dim: List[int]) -> None:
        self.dim = dim

    def set_stride(self, stride: List[int]) -> None:
        self.stride = stride

    def at(self, address: int) -> torch.Tensor:
        """The memory there, seen as this tensor."""
        assert self.data_type is not None
        of_numpy, _ = SIZES[self.data_type.name]
        extent = 1 + sum((size - 1) * step for size, step in zip(self.dim, self.stride))
        size = extent * numpy.dtype(of_numpy).itemsize
        raw = (ctypes.c_uint8 * size).from_address(address)
        flat = torch.from_numpy(numpy.frombuffer(raw, dtype=of_numpy))
        return flat.as_strided(self.dim, self.stride)


def _rounded(x: torch.Tensor) -> torch.Tensor:
    """To ten bits, as TF32 has: float16's, in float16's range."""
    return x.half().float()


class pygraph:  # noqa: N801
    def __init__(
        self,
        io_data_type: Any = None,
        intermediate_data_type: Any = None,
        compute_data_type: Any = None,
        handle: Any = None,
    ) -> None:
        self.handle, self.types = handle, (intermediate_data_type, compute_data_type)
        self.words: List[str] = []
        self.inputs: List[Tensor] = []
        self.last: Optional[Tensor] = None
        self.plans: List[Tuple[int, Dict[int, int]]] = []
        self.barred: List[bool] = []
        self.most = 1 << 62
        self.candidate = -1
        self.ready = False

    # ---- the graph

    def tensor(
        self, name: str, dim: List[int], stride: List[int], data_type: Any, uid: int
    ) -> Tensor:
        made = Tensor()
        made.dim, made.stride, made.data_type, made.uid = dim, stride, data_type, uid
        made.compute = lambda memory, rounds: memory[uid].float()
        self.inputs.append(made)
        return made

    def _operation(self, word: str, compute: Any) -> Tensor:
        self.words.append(word)
        made = self.last = Tensor()
        made.compute = compute
        return made

    def conv_fprop(
        self,
        image: Tensor,
        weight: Tensor,
        padding: List[int],
        stride: List[int],
        dilation: List[int],
    ) -> Tensor:
        groups = image.dim[1] // weight.dim[1]

        def compute(memory: Any, rounds: bool) -> torch.Tensor:
            x, w = memory[image.uid].float(), memory[weight.uid].float()
            if rounds:
                x, w = _rounded(x), _rounded(w)
            return F.conv2d(x, w, None, stride, padding, dilation, groups)

        return self._operation("conv", compute)

    # The frontend's own argument names.
    def bias(self, input: Tensor, bias: Tensor) -> Tensor:  # noqa: A002
        assert bias.data_type is not None
        return self._operation(
            f"bias:{bias.data_type.name}",
            lambda memory, rounds: input.compute(memory, rounds) + memory[bias.uid].float(),
        )

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        return self._operation(
            "add", lambda memory, rounds: a.compute(memory, rounds) + memory[b.uid].float()
        )

    def relu(
        self,
        input: Tensor,  # noqa: A002
        lower_clip: Optional[float] = None,
        upper_clip: Optional[float] = None,
    ) -> Tensor:
        return self._operation(
            "relu" if upper_clip is None else f"clip:{lower_clip}:{upper_clip}",
            lambda memory, rounds: input.compute(memory, rounds).clamp(0.0, upper_clip),
        )

    def validate(self) -> None:
        if self.last is None or not self.last.output:
            raise ValueError("no output")

    def build_operation_graph(self) -> None:
        self.ready = True

    # ---- plans

    def _add(self, number: int, choice: Dict[int, int]) -> None:
        self.plans.append((number, choice))
        self.barred.append(False)

    def create_execution_plans(self, modes: List[heur_mode]) -> None:
        assert self.ready
        assert not self.plans, "notes go wrong in a graph that grows"
        for mode in modes:
            for number, choice in PROPOSED.get(mode.name, []):
                if ENGINES[number].takes(self.words):
                    self._add(number, choice)
        if not self.plans:
            raise cudnnGraphNotSupportedError("No valid engine configs for ___\nReason: none")

    def create_execution_plan(self, number: int, choice: Dict[knob_type, int]) -> None:
        assert not self.plans, "notes go wrong in a graph that grows"
        numbers = {kind.value: value for kind, value in choice.items()}
        if not ENGINES[number].takes(self.words) or numbers.get(17, 1) > 4:
            raise RuntimeError("detail::finalize(engine_config) failed")
        self._add(number, numbers)

    def get_execution_plan_count(self) -> int:
        return len(self.plans)

    def get_engine_count(self) -> int:
        return len(ENGINES)

    def get_knobs_for_engine(self, number: int) -> List[Knob]:
        if not ENGINES[number].takes(self.words):
            raise RuntimeError("not of this graph")
        return list(ENGINES[number].knobs)

    def get_plan_name_at_index(self, index: int) -> str:
        number, choice = self.plans[index]
        return f"eng{number}" + "".join(f"_k{kind}={value}" for kind, value in choice.items())

    def get_behavior_notes_for_plan_at_index(self, index: int) -> List[behavior_note]:
        compiled = ENGINES[self.plans[index][0]].compiled
        return [behavior_note.RUNTIME_COMPILATION] if compiled else []

    def deselect_numeric_notes(self, notes: List[numerical_note]) -> None:
        for index, (number, _) in enumerate(self.plans):
            self.barred[index] |= bool(ENGINES[number].notes & set(notes))

    def deselect_workspace_greater_than(self, most: int) -> None:
        self.most = most

    def build_plan_at_index(self, index: int) -> None:
        number, choice = self.plans[index]
        if self.barred[index]:
            raise cudnnGraphNotSupportedError("Deselecting execution plan")
        if ENGINES[number].workspace > self.most:
            raise cudnnGraphNotSupportedError("workspace violation")
        if ENGINES[number].fails(choice):
            raise cudnnGraphNotSupportedError("cudnnFinalize Descriptor Failed")
        self.candidate = index

    def get_workspace_size_plan_at_index(self, index: int) -> int:
        return ENGINES[self.plans[index][0]].workspace

    def execute_plan_at_index(
        self, pack: Dict[int, int], workspace: int, index: int, handle: Any = None
    ) -> None:
        assert self.last is not None
        assert handle is not None
        memory = {each.uid: each.at(pack[each.uid]) for each in self.inputs}
        engine = ENGINES[self.plans[index][0]]
        if engine.loses_nan:
            memory = {uid: each.nan_to_num() for uid, each in memory.items()}
        out = self.last.at(pack[self.last.uid])
        out.copy_(self.last.compute(memory, engine.rounds))
        if engine.loses_overflow:
            out.masked_fill_(out == -math.inf, 0.0)
        if engine.reads_workspace:
            out.add_(0 * ctypes.c_float.from_address(workspace).value)

    # ---- storing

    def serialize(self) -> List[int]:
        number, choice = self.plans[self.candidate]
        return list(json.dumps([number, sorted(choice.items()), self.words]).encode())

    def deserialize(self, data: List[int]) -> None:
        number, choice, self.words = json.loads(bytes(data).decode())
        self._add(number, dict(choice))
