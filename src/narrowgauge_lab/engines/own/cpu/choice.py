"""Which form of a network, with how many threads, is fastest on this processor: by measuring them
in turns, against the network as torch runs it anyway.

A processor is shared and its clock drifts, so only times of one round are compared. Whoever is to
replace the baseline must be faster beyond the noise: the interval of the median of its ratios to
the baseline, round by round, has to end below 1, and its fastest call has to be the faster one too.
Otherwise the baseline stays, and nothing is lost. The second condition is for a host that is busy
meanwhile: calls of several threads wait there for seconds, and one thread looks fast beside them.
"""

from __future__ import annotations

import dataclasses
import json
import math
import statistics
import time
from typing import Any, Callable, Dict, List, Mapping, Sequence, Tuple

from narrowgauge_contract.order_statistics import median_bounds

__all__ = ["Candidate", "Choice", "Rounds", "choose", "disturbed", "measure", "ranked"]

Call = Callable[[], Any]
Now = Callable[[], float]

#: From so many rounds on a candidate this much slower than the best is not measured any more.
_LEAST_ROUNDS = 4
_HOPELESS = 1.25
#: A sample lasts so long at least; shorter calls are repeated within it.
_SAMPLE_S = 2e-3
#: Where the baseline itself took so many times its fastest call, something else was running.
_DISTURBED = 3.0
_MOST_CALLS = 64


@dataclasses.dataclass(frozen=True, order=True)
class Candidate:
    """A form by name, and the OpenMP threads it runs with; 0: those that its caller has."""

    form: str
    threads: int = 0

    def __str__(self) -> str:
        plural = "" if self.threads == 1 else "s"
        return self.form + (f" with {self.threads} thread{plural}" if self.threads else "")


#: Seconds per call, one number a round; whoever left early has fewer.
Rounds = Dict[Candidate, List[float]]


@dataclasses.dataclass(frozen=True)
class Choice:
    """The candidate taken, why, and what was measured. `absent`: forms that could not be tried."""

    taken: Candidate
    reason: str
    rounds: Mapping[Candidate, Sequence[float]] = dataclasses.field(default_factory=dict)
    absent: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def to_dict(self) -> Dict[str, Any]:
        """As JSON has it; `seconds` are raw, in the order of the rounds."""
        return {
            "form": self.taken.form,
            "threads": self.taken.threads,
            "reason": self.reason,
            "measured": [
                {"form": each.form, "threads": each.threads, "seconds": list(seconds)}
                for each, seconds in self.rounds.items()
            ],
            "absent": dict(self.absent),
        }

    @classmethod
    def from_dict(cls, found: Mapping[str, Any]) -> Choice:
        """Raises KeyError and TypeError for what `to_dict` did not write."""
        rounds = {
            Candidate(each["form"], each["threads"]): tuple(each["seconds"])
            for each in found["measured"]
        }
        taken = Candidate(found["form"], found["threads"])
        return cls(taken, found["reason"], rounds, dict(found["absent"]))

    def to_bytes(self) -> bytes:
        return json.dumps(self.to_dict(), sort_keys=True).encode()


def measure(
    calls: Mapping[Candidate, Call],
    baseline: Candidate,
    rounds: int,
    budget_s: float,
    now: Now = time.perf_counter,
    least_rounds: int = _LEAST_ROUNDS,
) -> Rounds:
    """Time all candidates in each round, forwards and backwards in turn.

    Ends after `rounds`, or when `budget_s` is spent, but not before `least_rounds`. The hopeless
    leave earlier; `baseline`, one of `calls`, stays.
    """
    began = now()
    repeats = {each: _repeats(call, now) for each, call in calls.items()}
    taken: Rounds = {each: [] for each in calls}
    running = list(calls)
    for number in range(rounds):
        if number >= least_rounds and now() - began >= budget_s:
            break
        for each in running if number % 2 == 0 else reversed(running):
            taken[each].append(_sample(calls[each], repeats[each], now))
        if number + 1 >= _LEAST_ROUNDS:
            running = _hopeful(taken, running, baseline)
            if running == [baseline]:
                break
    return taken


def _repeats(call: Call, now: Now) -> int:
    """Warm up, and say how many calls make a sample."""
    call()
    return min(_MOST_CALLS, max(1, math.ceil(_SAMPLE_S / max(_sample(call, 1, now), 1e-9))))


def _sample(call: Call, repeats: int, now: Now) -> float:
    began = now()
    for _ in range(repeats):
        call()
    return (now() - began) / repeats


def _hopeful(taken: Rounds, running: List[Candidate], baseline: Candidate) -> List[Candidate]:
    ratios = {each: statistics.median(_ratios(taken, each, baseline)) for each in running}
    limit = min(ratios.values()) * _HOPELESS
    return [each for each in running if each == baseline or ratios[each] <= limit]


def _ratios(taken: Rounds, each: Candidate, baseline: Candidate) -> List[float]:
    return [own / other for own, other in zip(taken[each], taken[baseline])]


def disturbed(taken: Rounds, baseline: Candidate) -> bool:
    """Whether what was measured says more of the host's other work than of the candidates."""
    return max(taken[baseline]) > _DISTURBED * min(taken[baseline])


def ranked(taken: Rounds, baseline: Candidate) -> List[Candidate]:
    """Those measured to the end (as often as the baseline), fastest first."""
    rounds = len(taken[baseline])
    there = [each for each in taken if len(taken[each]) == rounds]
    return sorted(there, key=lambda each: statistics.median(_ratios(taken, each, baseline)))


def choose(taken: Rounds, baseline: Candidate) -> Tuple[Candidate, str]:
    """The fastest, if it is certainly faster than the baseline, else the baseline; and why."""
    best = ranked(taken, baseline)[0]
    if best == baseline:
        return baseline, f"nothing was faster than {baseline}"
    ratios = _ratios(taken, best, baseline)
    middle, bounds = statistics.median(ratios), median_bounds(ratios)
    numbers = f"{best} takes {middle:.3f} of the time of {baseline} in {len(ratios)} rounds"
    if bounds is None or bounds[1] >= 1.0:
        return baseline, f"{numbers}, which may be noise: {baseline} stays"
    if min(taken[best]) >= min(taken[baseline]):
        return baseline, f"{numbers}, but not in the fastest: the host was busy, {baseline} stays"
    return best, f"{numbers} ({bounds[0]:.3f} to {bounds[1]:.3f})"
