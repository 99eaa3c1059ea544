"""Which steps `reproduce` takes on this host, in which order, and what it leaves out. Pure."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.judge.bars import Unmeasured
from narrowgauge.judge.devices import names_device
from narrowgauge.judge.gather import Claimed
from narrowgauge.judge.rules import shape_of
from narrowgauge.reproduce.needs import Need, needs_of
from narrowgauge_contract.claims import Claim, MetricOperator, Verdict
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "PLAN_FORMAT",
    "Here",
    "LeftOut",
    "ReproducePlan",
    "Step",
    "can_be_run",
    "plan_runs",
    "unmeasured_of",
]

#: 1: first. 2: where it runs is in it.
PLAN_FORMAT = 2
_ANY = "any"


@dataclass(frozen=True)
class Here:
    """The host, as far as it decides which claims can be held against it. `names`: of its
    accelerators, its CPU and its board; `target`: that of the runs, `native` where there is none.
    """

    target: str
    names: tuple[str, ...]
    accelerator: bool


@dataclass(frozen=True)
class Step:
    """One run. `words`: its parameters, as `narrowgauge run -p` takes them."""

    experiment: str
    profile: str
    words: tuple[str, ...]
    claims: tuple[str, ...]
    minutes: float
    disk_gb: float

    @property
    def command(self) -> str:
        """The same run by hand."""
        parameters = "".join(f" -p {word}" for word in self.words)
        return f"narrowgauge run {self.experiment} --profile {self.profile}{parameters}"


@dataclass(frozen=True)
class LeftOut:
    """A claim that gets no run, and the verdict that it gets for that."""

    claim: str
    verdict: Verdict
    reason: str


@dataclass(frozen=True)
class ReproducePlan:
    """All that `reproduce` is going to do. `steps` are in the order of `order_seed`; `budget_s` is
    the most that it may take, None for no limit; `claims` are all that were asked for.

    `on`, `executor`, `data` and `lab_python` are those of `narrowgauge run`, so that what goes on
    after an interruption measures the same.
    """

    format: int
    claims: tuple[str, ...]
    steps: tuple[Step, ...]
    left_out: tuple[LeftOut, ...]
    order_seed: int
    seed: int
    cooldown_s: float
    budget_s: float | None
    on: str | None = None
    executor: str = "auto"
    data: str | None = None
    lab_python: str | None = None

    @property
    def seconds(self) -> float:
        """What it takes, by what the claims say that they cost, with the pauses between runs."""
        pauses = self.cooldown_s * max(len(self.steps) - 1, 0)
        return sum(step.minutes for step in self.steps) * 60.0 + pauses

    @property
    def disk_gb(self) -> float:
        return sum(step.disk_gb for step in self.steps)


def plan_runs(
    claims: Sequence[Claimed],
    here: Here,
    *,
    order_seed: int,
    seed: int,
    cooldown_s: float,
    budget_s: float | None = None,
) -> ReproducePlan:
    """The runs that claims need on this host; over a budget, the cheapest that fit into it."""
    left_out: list[LeftOut] = []
    wanted: list[Claimed] = []
    for each in claims:
        why = _why_not(each, here)
        if why is None:
            wanted.append(each)
        elif not each.claim.not_comparable:
            left_out.append(LeftOut(each.name, why.verdict, why.reason))
    specs = {each.spec.id: each.spec for each in wanted}
    needs = list(needs_of(wanted))
    if budget_s is not None:
        needs, over = _within(needs, budget_s, cooldown_s)
        kept = {name for need in needs for name in need.claims}
        reason = f"its runs do not fit into the budget of {budget_s / 60:g} min"
        left_out += [
            LeftOut(name, Verdict.SKIPPED, reason)
            for name in dict.fromkeys(n for need in over for n in need.claims)
            if name not in kept
        ]
    return ReproducePlan(
        format=PLAN_FORMAT,
        claims=tuple(each.name for each in claims),
        steps=tuple(_step(need, specs) for need in _blocked(needs, order_seed)),
        left_out=tuple(left_out),
        order_seed=order_seed,
        seed=seed,
        cooldown_s=cooldown_s,
        budget_s=budget_s,
    )


def can_be_run(each: Claimed, here: Here) -> bool:
    """Whether a run on this host could say anything of a claim."""
    return _why_not(each, here) is None


def unmeasured_of(plan: ReproducePlan) -> dict[str, Unmeasured]:
    """Why claims of a plan got no run, as the judge takes it."""
    return {each.claim: Unmeasured(each.verdict, each.reason) for each in plan.left_out}


def _step(need: Need, specs: Mapping[str, ExperimentSpec]) -> Step:
    words = need.words(specs[need.experiment])
    return Step(need.experiment, need.profile, words, need.claims, need.minutes, need.disk_gb)


def _why_not(each: Claimed, here: Here) -> Unmeasured | None:
    """Why no run on this host could say anything of a claim; None where one could."""
    claim, spec = each.claim, each.spec
    if claim.not_comparable:
        return Unmeasured(Verdict.NOT_APPLICABLE, claim.not_comparable)
    if claim.by_hand:
        return Unmeasured(Verdict.SKIPPED, f"no profile measures it; by hand: {claim.by_hand}")
    if spec.requires_accelerator and not here.accelerator:
        return Unmeasured(Verdict.SKIPPED, f"'{spec.id}' needs an accelerator; this host has none")
    if not _is_of(claim, here) and not _has_shape(claim):
        of = claim.device or " or ".join(claim.expected)
        reason = (
            f"the figure is of {of}, which this host is not, and an absolute figure has no shape"
        )
        return Unmeasured(Verdict.NOT_APPLICABLE, reason)
    return None


def _is_of(claim: Claim, here: Here) -> bool:
    return (_ANY in claim.expected or here.target in claim.expected) and (
        not claim.device or any(names_device(name, claim.device) for name in here.names)
    )


def _has_shape(claim: Claim) -> bool:
    if claim.operator is MetricOperator.ORDER:
        return True
    return shape_of(claim, next(iter(claim.expected.values()))) is not None


def _within(
    needs: Sequence[Need], budget_s: float, cooldown_s: float
) -> tuple[list[Need], list[Need]]:
    """The cheapest needs that fit together, and the others; both in their order.

    A claim that needs several runs is left out whole where one of them does not fit.
    """
    spent = 0.0
    chosen: set[int] = set()
    for i in sorted(range(len(needs)), key=lambda i: (needs[i].minutes, i)):
        cost = needs[i].minutes * 60.0 + (cooldown_s if chosen else 0.0)
        if spent + cost <= budget_s:
            spent += cost
            chosen.add(i)
    lost = {name for i, need in enumerate(needs) if i not in chosen for name in need.claims}
    kept = {i for i in chosen if any(name not in lost for name in needs[i].claims)}
    over = [need for i, need in enumerate(needs) if i not in kept]
    return [need for i, need in enumerate(needs) if i in kept], over


def _blocked(needs: Sequence[Need], seed: int) -> list[Need]:
    """Blocked random order: each block has one run of every experiment that has any left, shuffled,
    so that what drifts over the hours falls on no experiment alone."""
    chance = random.Random(seed)
    queues: dict[str, list[Need]] = {}
    for need in needs:
        queues.setdefault(need.experiment, []).append(need)
    for queue in queues.values():
        chance.shuffle(queue)
    order: list[Need] = []
    while any(queues.values()):
        block = [queue.pop() for queue in queues.values() if queue]
        chance.shuffle(block)
        order += block
    return order
