"""The measurements that a choice on a CPU stands on: every form made, checked, and timed."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Callable, Collection, Dict, List, Mapping, Optional, Union

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.engines.native import of_batch
from narrowgauge_lab.engines.own.cpu.choice import (
    Candidate,
    Choice,
    choose,
    disturbed,
    measure,
    ranked,
)
from narrowgauge_lab.engines.own.cpu.forms import FUSED, FloatForms, Form
from narrowgauge_lab.engines.own.cpu.int8 import Int8Forms
from narrowgauge_lab.engines.own.cpu.threads import thread_counts, with_threads
from narrowgauge_lab.torch_compat import inference_mode

__all__ = ["Forms", "chosen", "forms_of", "made"]

Forms = Union[FloatForms, Int8Forms]
#: Rounds of all forms with the caller's threads, then of the best ones with other numbers.
_FIRST_ROUNDS, _ROUNDS, _LEAST_ROUNDS = 5, 31, 9
_FINALISTS = 2
_TRIES = 2
#: Measuring needs some hundred calls; from here on a call gets fewer images.
_LONGEST_CALL_S = 0.6
#: A form that differs from eager by more, as a share of the logits' norm, is not taken.
_TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.1, torch.float16: 2e-2}


def forms_of(model: nn.Module, example: torch.Tensor, scales: Mapping[str, Any]) -> Forms:
    return Int8Forms(model, scales) if scales else FloatForms(model, example)


def made(forms: Forms, candidate: Candidate, example: torch.Tensor) -> Form:
    """Made with the threads that it will run with: oneDNN orders weights for that number."""

    def make(_: torch.Tensor) -> Form:
        with inference_mode():
            return forms.make(candidate.form)

    maker: Callable[[torch.Tensor], Form] = with_threads(make, candidate.threads)
    return maker(example)


def chosen(
    model: nn.Module, example: torch.Tensor, scales: Mapping[str, Any], threads: int, tune_s: float
) -> Choice:
    """Measure forms, then numbers of threads for the best of them; once more where the host was
    busy meanwhile, since what is chosen is kept."""
    for number in range(_TRIES):
        trial = _Trial(model, example, scales)
        baseline = Candidate(trial.forms.names[0], threads)
        trial.add(baseline)
        if tune_s <= 0:
            return _untuned(trial, baseline)
        choice = _measured(trial, baseline, tune_s)
        if not disturbed(choice.rounds, baseline):
            break
        if number:
            reason = f"{choice.reason}; the host was busy in each of {_TRIES} tries"
            choice = dataclasses.replace(choice, reason=reason)
    return choice


def _measured(trial: _Trial, baseline: Candidate, tune_s: float) -> Choice:
    threads = baseline.threads
    for name in trial.forms.names:
        trial.add(Candidate(name, threads))
    first = measure(trial.calls, baseline, _FIRST_ROUNDS, tune_s / 3)
    finalists = ranked(first, baseline)[:_FINALISTS]
    trial.keep({*finalists, baseline})
    counts = () if threads else thread_counts()
    for finalist in finalists:
        for count in counts:
            if count != torch.get_num_threads():
                trial.add(Candidate(finalist.form, count))
    final = measure(trial.calls, baseline, _ROUNDS, tune_s * 2 / 3, least_rounds=_LEAST_ROUNDS)
    taken, reason = choose(final, baseline)
    # The first rounds' figures of those that were not measured again.
    rounds = {**{each: seconds for each, seconds in first.items() if each not in final}, **final}
    return Choice(taken, f"{reason}; {trial.images}", rounds, trial.absent)


def _untuned(trial: _Trial, baseline: Candidate) -> Choice:
    """The fused form, if there is one that computes what the baseline does."""
    wanted = Candidate(FUSED, baseline.threads)
    if FUSED in trial.forms.names:
        trial.add(wanted)
    taken = wanted if wanted in trial.calls else baseline
    return Choice(taken, "not measured: tune_s=0", {}, trial.absent)


class _Trial:
    """Candidates made for being measured, each checked against the baseline's results first."""

    def __init__(self, model: nn.Module, example: torch.Tensor, scales: Mapping[str, Any]) -> None:
        self.forms = forms_of(model, example, scales)
        count = _affordable(self.forms, example)
        self._example = of_batch(example, count)
        self.images = f"measured on {count} of {example.shape[0]} images"
        if count != example.shape[0]:
            self.forms = forms_of(model, self._example, scales)
        self._expected: Optional[torch.Tensor] = None
        self.calls: Dict[Candidate, Callable[[], Any]] = {}
        self.absent: Dict[str, str] = {}

    def add(self, candidate: Candidate) -> None:
        """Make it ready; or note why it is absent. What fails for the baseline is an error."""
        if candidate in self.calls or candidate.form in self.absent:
            return
        try:
            call = self._call(candidate)
            result = call()
        # Operators that torch has not, networks that fx cannot trace, memory that runs out: this
        # form is not to be had, the baseline is.
        except (NotApplicableError, RuntimeError, MemoryError, TypeError) as error:
            if self._expected is None:
                raise
            self.absent[candidate.form] = (str(error).splitlines() or [repr(error)])[0]
            return
        if self._expected is None:
            self._expected = result.double().clone()
        difference = float((result.double() - self._expected).norm() / self._expected.norm())
        if difference <= _TOLERANCE[result.dtype]:
            self.calls[candidate] = call
        else:
            self.absent[candidate.form] = f"its results differ from eager's by {difference:.2g}"

    def keep(self, candidates: Collection[Candidate]) -> None:
        """Let go of the others' weights."""
        self.calls = {each: call for each, call in self.calls.items() if each in candidates}

    def _call(self, candidate: Candidate) -> Callable[[], torch.Tensor]:
        form = made(self.forms, candidate, self._example)
        threaded = with_threads(form.call, candidate.threads)

        def call() -> torch.Tensor:
            with inference_mode():
                return threaded(self._example)

        return call


def _affordable(forms: Forms, example: torch.Tensor) -> int:
    """How many of the example's images to measure with, so that a call is not too long."""
    call = forms.make(forms.names[0]).call
    few = of_batch(example, min(4, example.shape[0]))
    seconds: List[float] = []
    with inference_mode():
        for _ in range(2):
            began = time.perf_counter()
            call(few)
            seconds.append(time.perf_counter() - began)
    each = min(seconds) / few.shape[0]
    return max(1, min(int(example.shape[0]), int(_LONGEST_CALL_S / each)))
