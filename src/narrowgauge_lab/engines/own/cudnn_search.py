"""The search for plans: what cuDNN's heuristics propose, then its engines one by one."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Dict, Iterator, List, Mapping, Sequence, Set, Tuple

import torch

from narrowgauge_lab.engines.own.cudnn_graphs import (
    ConvProblem,
    Form,
    choices,
    forms,
    label,
    make_graph,
)
from narrowgauge_lab.engines.own.cudnn_plans import ConvPlan, Found, Library, first_line
from narrowgauge_lab.engines.own.cudnn_trials import fault_of

__all__ = ["Bounds", "Survey", "search"]

#: Numerical notes of engines that compute something else than what a dtype promises. Half types
#: are summed in float32, and Winograd transforms in a half type round in between.
_UNWANTED = {
    "float16": ("REDUCED_PRECISION_REDUCTION", "WINOGRAD"),
    "bfloat16": ("REDUCED_PRECISION_REDUCTION", "WINOGRAD"),
    "float32": ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"),
    "tf32": ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION"),
}
_MODES = ("A", "B", "FALLBACK")
#: Heuristics propose some forty plans of the first form for nearly every problem, and the fastest
#: engine may know another form alone: so many are taken of each before it is the next one's turn.
_AT_A_TIME = 4
_OVER = object()
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
        waiting = [self._proposed(form) for form in written]
        while waiting and not self._done():
            waiting = [each for each in waiting if self._take_some(each)]
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

    def _take_some(self, proposed: Iterator[None]) -> bool:
        """Take a few more of what is proposed; whether some may be left."""
        turns = range(_AT_A_TIME)
        return not any(self._done() or next(proposed, _OVER) is _OVER for _ in turns)

    def _proposed(self, form: Form) -> Iterator[None]:
        """Take what the heuristics propose, a step for each plan."""
        for mode in _MODES:
            try:
                graph = self._graph(form)
                graph.create_execution_plans([getattr(self._front.heur_mode, mode)])
                count = graph.get_execution_plan_count()
            except self._library.errors as error:
                self._refuse(error)
                continue
            self._restrict(graph)
            for index in range(count):
                self._take(form, graph, index, f"heuristic {mode}")
                yield

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
        fault = fault_of(plan)
        if fault:
            self._refuse(fault)
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
