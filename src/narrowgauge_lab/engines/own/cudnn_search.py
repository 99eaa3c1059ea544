"""The search for plans: what cuDNN's heuristics propose, then its engines one by one."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from typing import Any, Dict, List, Mapping, Sequence, Set, Tuple

import torch
from torch.nn import functional as F

from narrowgauge_lab.engines.own.cudnn_graphs import (
    ConvProblem,
    Form,
    choices,
    forms,
    label,
    make_graph,
)
from narrowgauge_lab.engines.own.cudnn_plans import ConvPlan, Found, Library, first_line

__all__ = ["Bounds", "Survey", "computes", "keeps_nan", "search"]

#: Numerical notes of engines that compute something else than what a dtype promises. Half types
#: are summed in float32, and Winograd transforms in a half type round in between.
_UNWANTED = {
    "float16": ("REDUCED_PRECISION_REDUCTION", "WINOGRAD"),
    "bfloat16": ("REDUCED_PRECISION_REDUCTION", "WINOGRAD"),
    "float32": ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"),
    "tf32": ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"),
}
#: What no sum here comes to, for memory that a plan has to write; and NaN in every type.
_BEFORE, _NAN_BYTE = 7.0, 0xFF
_MODES = ("A", "B", "FALLBACK")
#: Why a plan that gave something else than the sums is left out, by whether float32 is strict.
_OFF = {
    False: "it was seen to give something else, or to read beside its operands",
    True: "it was seen to round its operands, and float32 is strict",
}
#: How many of one engine's configurations are tried at most.
_PER_ENGINE = 2048


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Where a search ends: `limit` plans, `seconds`, and `workspace` bytes for each plan."""

    limit: int
    seconds: float
    workspace: int


@dataclasses.dataclass(frozen=True)
class Survey:
    """What was found for a problem. `refused`: reason -> configurations that were left out for it.
    `cut`: why the search ended before its end, or ""."""

    plans: Tuple[ConvPlan, ...]
    refused: Mapping[str, int]
    cut: str

    @property
    def note(self) -> str:
        """In a sentence, the commonest reasons first."""
        reasons = sorted(self.refused.items(), key=lambda item: -item[1])
        left = "; ".join(f"{count} x {reason}" for reason, count in reasons)
        parts = [f"{len(self.plans)} plans", f"left out: {left}" if left else "", self.cut]
        return ", ".join(part for part in parts if part)


def search(library: Library, problem: ConvProblem, device: torch.device, bounds: Bounds) -> Survey:
    """See `own.cudnn.survey`."""
    uncertain = problem.uncertain()
    if uncertain:
        return Survey((), {uncertain: 1}, "")
    return _Search(library, problem, device, bounds).found()


@dataclasses.dataclass(frozen=True)
class _Engine:
    """By its index among those of a form's graph, with the knobs that can be set."""

    form: Form
    number: int
    knobs: Sequence[Any]
    compiled: bool


class _Search:
    def __init__(
        self, library: Library, problem: ConvProblem, device: torch.device, bounds: Bounds
    ) -> None:
        self._library, self._front = library, library.front
        self._problem, self._device, self._bounds = problem, device, bounds
        self._deadline = time.monotonic() + bounds.seconds
        self._plans: List[ConvPlan] = []
        self._seen: Set[Tuple[Form, str]] = set()
        self._refused: Dict[str, int] = {}
        self._cut = ""

    def found(self) -> Survey:
        written = forms(self._problem)
        for form in written:
            for mode in _MODES:
                self._ask(form, mode)
        engines = [engine for form in written for engine in self._engines(form)]
        for compiled in (False,) if self._problem.strict else (False, True):
            self._enumerate([engine for engine in engines if engine.compiled is compiled])
        return Survey(tuple(self._plans), dict(self._refused), self._cut)

    def _done(self) -> bool:
        if len(self._plans) >= self._bounds.limit:
            self._cut = f"stopped at the limit of {self._bounds.limit}"
        elif time.monotonic() > self._deadline:
            self._cut = f"stopped after {self._bounds.seconds:g} s"
        return bool(self._cut)

    def _graph(self, form: Form) -> Any:
        handle = self._library.handle(self._device)
        return make_graph(self._front, self._problem, form, handle)

    def _ask(self, form: Form, mode: str) -> None:
        """What a heuristic proposes."""
        if self._done():
            return
        try:
            graph = self._graph(form)
            graph.create_execution_plans([getattr(self._front.heur_mode, mode)])
            count = graph.get_execution_plan_count()
        except self._library.errors as error:
            self._refuse(error)
            return
        self._restrict(graph)
        for index in range(count):
            if self._done():
                return
            self._take(form, graph, index, f"heuristic {mode}")

    def _engines(self, form: Form) -> List[_Engine]:
        """Those that know the form. Most do not: they are of other graphs, or other GPUs."""
        found: List[_Engine] = []
        if self._done():
            return found
        try:
            graph = self._graph(form)
            count = graph.get_engine_count()
        except self._library.errors as error:
            self._refuse(error)
            return found
        nameless = self._front.knob_type.NOT_SET  # the frontend cannot set these
        for number in range(count):
            try:
                knobs = graph.get_knobs_for_engine(number)
                probe = self._graph(form)
                probe.create_execution_plan(number, {})
                compiled = self._compiles(probe, 0)
            except self._library.errors:
                continue
            known = [knob for knob in knobs if knob.type != nameless]
            found.append(_Engine(form, number, known, compiled))
        return found

    def _enumerate(self, engines: Sequence[_Engine]) -> None:
        """One configuration of each engine in turn."""
        waiting = [(engine, choices(engine.knobs)) for engine in engines]
        for _ in range(_PER_ENGINE):
            going = []
            for engine, rest in waiting:
                choice = next(rest, None)
                if choice is None or self._done():
                    continue
                going.append((engine, rest))
                self._try(engine, choice)
            if not going:
                return
            waiting = going

    def _try(self, engine: _Engine, choice: Mapping[Any, int]) -> None:
        # A graph each: the frontend finds notes by position, and loses count in one that grows.
        try:
            graph = self._graph(engine.form)
            graph.create_execution_plan(engine.number, choice)
        except self._library.errors as error:
            self._refuse(error)
            return
        self._restrict(graph)
        self._take(engine.form, graph, 0, "by index")

    def _take(self, form: Form, graph: Any, index: int, source: str) -> None:
        name = label(graph.get_plan_name_at_index(index))
        if (form, name) in self._seen:
            return
        self._seen.add((form, name))
        compiled = self._compiles(graph, index)
        if compiled and self._problem.strict:
            self._refuse("it compiles at run time, and float32 is strict")
            return
        try:
            graph.build_plan_at_index(index)
            needed = int(graph.get_workspace_size_plan_at_index(index))
        except self._library.errors as error:
            self._refuse(error)
            return
        found = Found(f"{name} {form.name}".strip(), source, needed, compiled)
        plan = ConvPlan(self._library, self._problem, self._device, form, graph, index, found)
        if not computes(plan):
            self._refuse(_OFF[self._problem.strict])
            return
        if not keeps_nan(plan):
            self._refuse("it was seen to make numbers of NaN")
            return
        self._plans.append(plan)

    def _restrict(self, graph: Any) -> None:
        """Bar configurations among those there are by now; building one says that it is barred."""
        unwanted = _UNWANTED[self._problem.dtype]
        graph.deselect_numeric_notes([getattr(self._front.numerical_note, n) for n in unwanted])
        graph.deselect_workspace_greater_than(self._bounds.workspace)

    def _compiles(self, graph: Any, index: int) -> bool:
        notes = graph.get_behavior_notes_for_plan_at_index(index)
        return self._front.behavior_note.RUNTIME_COMPILATION in notes

    def _refuse(self, reason: Any) -> None:
        text = reason if isinstance(reason, str) else first_line(reason)
        if "out of memory" in text or "ALLOC_FAILED" in text:
            raise reason
        self._refused[text] = self._refused.get(text, 0) + 1


def computes(plan: ConvPlan) -> bool:
    """Whether equal operands give their sums, by a run, with NaN wherever the plan has no business:
    between the pixels of a slice, and in the workspace before it was written.

    Operands of strict problems are 1 + 2^-12, which TF32 and the half types round to 1, so that a
    sum of products tells what was multiplied. (eng8 of cuDNN 9.19 reads what lies between.)
    """
    strict = plan.problem.strict
    taps = _taps(plan.problem) * (plan.problem.channels // plan.problem.groups)
    # A power of two is exact, and keeps the sums below the bound of ReLU6.
    shrink = 2.0 ** -math.ceil(math.log2(max(1.0, float(taps.max()))))
    exact = 1 + 2.0**-12 if strict else 1.0
    y = _ran(plan, _filled(plan.problem, "x", exact, plan.device), exact * shrink)
    expected = (taps * (exact * exact * shrink)).to(plan.device)
    ends = torch.cat([y[:1], y[-1:]]).double()
    # One operand rounded changes a sum by 2.4e-4 of it; Winograd in float32 does by some 1e-6.
    near = 5e-5 if strict else 1e-2
    return bool(((ends - expected).abs() <= near * expected + 1e-6).all())


def keeps_nan(plan: ConvPlan) -> bool:
    """Whether NaN comes out wherever it went in, by a run on nothing else.

    All bits but the sign's are set, as in what GPUs compute: an engine that rounds to TF32 by
    adding to the bits (eng39 of cuDNN 9.19 does) carries into the sign then, and leaves a zero.
    """
    x = _filled(plan.problem, "x", math.nan, plan.device)
    whole = torch.int16 if x.element_size() == 2 else torch.int32
    x.view(whole).fill_(torch.iinfo(whole).max)
    y = _ran(plan, x, 1.0)
    reached = (_taps(plan.problem) > 0).to(plan.device)
    return bool((torch.isnan(y) | ~reached).all())


@functools.lru_cache(maxsize=1)
def _taps(problem: ConvProblem) -> torch.Tensor:
    """[1, 1, P, Q]: how many pixels of the image each sum is over, without the border. A search
    asks twice for each plan of one problem; nobody writes to it."""
    return F.conv2d(
        torch.ones(1, 1, problem.height, problem.width, dtype=torch.float64),
        torch.ones(1, 1, problem.rows, problem.columns, dtype=torch.float64),
        stride=problem.stride,
        padding=problem.padding,
        dilation=problem.dilation,
    )


def _ran(plan: ConvPlan, x: torch.Tensor, weight: float) -> torch.Tensor:
    """What the plan makes of `x` and equal weights."""
    problem, device = plan.problem, plan.device
    w = _filled(problem, "w", weight, device)
    bias = None
    if problem.bias:
        bias = torch.zeros(problem.shape("bias"), dtype=plan.bias_dtype, device=device)
    residual = _filled(problem, "residual", 0.0, device) if problem.residual else None
    y = _filled(problem, "y", _BEFORE, device)
    plan.start(x, w, bias, residual, y, plan.own_workspace().fill_(_NAN_BYTE))
    return y


def _filled(problem: ConvProblem, name: str, value: float, device: torch.device) -> torch.Tensor:
    """An operand in memory of its own, laid out as the problem says; what lies between is NaN."""
    shape, strides = problem.shape(name), problem.strides(name)
    size = shape[0] * strides[0]
    memory = torch.full((size,), math.nan, dtype=problem.torch_dtype, device=device)
    return memory.as_strided(shape, strides).fill_(value)
