"""`narrowgauge reproduce`, `kick`, `explain`, `replay`: each calls the module that does it."""

from __future__ import annotations

import re
import secrets
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import (
    Data,
    ExecutorName,
    Json,
    LabPython,
    On,
    Project,
    Results,
    Seed,
    checkout_of,
    data_root,
    note,
    results_root,
    world_of,
)

if TYPE_CHECKING:
    from narrowgauge.judge.model import Judged
    from narrowgauge.launch import World
    from narrowgauge.progress import Reporter
    from narrowgauge.reproduce.carrying import Means
    from narrowgauge.reproduce.journal import Journal
    from narrowgauge.reproduce.planning import Here, ReproducePlan

__all__ = ["register"]

_Claims = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[CLAIM]...",
        help="EXPERIMENT/CLAIM, a claim's id, or an EXPERIMENT for all of its claims.",
    ),
]
_COOLDOWN_S = 10.0
_KICK_S = 30 * 60.0
#: As much of it is planned, by what claims cost on their own hardware; a laptop may be slower.
_KICK_PLANNED_S = 10 * 60.0
_LARGEST_SEED = 2**31


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command("reproduce")(reproduce)
    app.command("kick")(kick)
    app.command("explain")(explain)
    app.command("replay")(replay)


def reproduce(
    claim: _Claims = None,
    all_: Annotated[bool, typer.Option("--all", help="Every claim.")] = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="At most so long: 45s, 30m, 2h."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the newest one that was cut short.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan with its time and disk, run nothing.")
    ] = False,
    cooldown: Annotated[
        float, typer.Option("--cooldown", min=0.0, help="Seconds of pause between runs.")
    ] = _COOLDOWN_S,
    order_seed: Annotated[
        int | None, typer.Option("--order-seed", min=0, help="The order's; random by default.")
    ] = None,
    seed: Seed = 0,
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    data: Data = None,
    project: Project = None,
    lab_python: LabPython = None,
    as_json: Json = False,
) -> None:
    """Run what claims need and judge them: a verdict each."""
    from narrowgauge.errors import UsageError
    from narrowgauge.reproduce.journal import newest_journal

    world = world_of(project)
    root = results_root(results, world.checkout)
    chosen = order_seed if order_seed is not None else secrets.randbelow(_LARGEST_SEED)
    if resume:
        if claim or all_:
            raise UsageError("--resume takes the claims of what was cut short, and no others")
        journal = newest_journal(root)
        plan = journal.plan()
    else:
        if all_ == bool(claim):
            raise UsageError("name the claims to reproduce, or say --all")
        journal = None
        plan = _plan(
            world, claim or [], on=on, executor=executor, budget_s=seconds_of(budget),
            cooldown_s=cooldown, order_seed=chosen, seed=seed,
        )  # fmt: skip
    _tell(plan)
    if dry_run:
        return
    means = _means(
        world, root, data, on=on, executor=executor, lab_python=lab_python, as_json=as_json
    )
    _carry(plan, journal, means, as_json=as_json)


def kick(
    on: On = None,
    executor: ExecutorName = "auto",
    results: Results = None,
    data: Data = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """A first try in under 30 minutes, without a GPU or a download of data, timed by itself."""
    import time

    from narrowgauge.progress import duration
    from narrowgauge.reproduce.kicking import kick_claims, write_report
    from narrowgauge.reproduce.planning import plan_runs

    begun = time.monotonic()
    world = world_of(project)
    root = results_root(results, world.checkout)
    here = _here(world, on, executor)
    plan = plan_runs(
        kick_claims(world.checkout.experiments, here),
        here,
        order_seed=secrets.randbelow(_LARGEST_SEED),
        seed=0,
        cooldown_s=1.0,
        budget_s=_KICK_PLANNED_S,
    )
    _tell(plan)
    means = _means(
        world, root, data, on=on, executor=executor, lab_python=lab_python, as_json=False
    )
    left = _KICK_S - (time.monotonic() - begun)
    judged = _carry(plan, None, means, as_json=False, limit_s=left)
    print(write_report(judged, world.checkout, root))
    took = time.monotonic() - begun
    note(f"kick took {duration(took)} of {duration(_KICK_S)}")


def explain(
    claim: Annotated[
        str, typer.Argument(metavar="CLAIM", help="EXPERIMENT/CLAIM, or a claim's id.")
    ],
    references: Annotated[
        bool, typer.Option("--references", help="By the checkout's reference records instead.")
    ] = False,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """What was claimed, how it is tested, what was found, what would change the verdict."""
    from narrowgauge.judge.gather import judge_references, judge_stored
    from narrowgauge.reproduce.show import REPLAY_LABEL, explain_lines
    from narrowgauge.store import Store
    from narrowgauge_contract.codec import dumps

    checkout = checkout_of(project)
    store = Store(results_root(results, checkout))
    judged = (
        judge_references(checkout, [claim])
        if references
        else judge_stored(checkout, store, [claim])
    )
    if as_json:
        print(dumps(judged), end="")
        return
    if references:
        print(REPLAY_LABEL)
    for judgement in judged.judgements:
        print("\n".join(explain_lines(judgement)))
    for refused in judged.refused:
        note(f"refused: {refused.path}: {refused.why}")


def replay(
    claim: _Claims = None,
    references: Annotated[
        bool, typer.Option("--references", help="Judge the checkout's reference records instead.")
    ] = False,
    every: Annotated[
        bool, typer.Option("--every", help="List the claims that nothing was measured for, too.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Keep what was judged, as JSON.")
    ] = None,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Judge stored records again. Measures nothing, so it is no reproduction, and says so."""
    from narrowgauge.errors import UsageError
    from narrowgauge.judge.gather import judge_references, judge_stored
    from narrowgauge.store import Store
    from narrowgauge_contract.codec import dumps, write_json_atomic

    checkout = checkout_of(project)
    store = Store(results_root(results, checkout))
    words = claim or []
    judged = (
        judge_references(checkout, words)
        if references
        else judge_stored(checkout, store, words, replay=True)
    )
    if out is not None:
        try:
            write_json_atomic(out, judged)
        except OSError as error:
            raise UsageError(f"cannot write {out}", why=error.strerror or str(error)) from error
    if as_json:
        print(dumps(judged), end="")
        return
    _print(judged, every=every or bool(claim))


def seconds_of(text: str | None) -> float | None:
    """`45s`, `30m`, `2h` in seconds; None for None. Raises BadValueError."""
    from narrowgauge_contract.errors import BadValueError

    if text is None:
        return None
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*(s|m|min|h)\s*", text, re.ASCII)
    if match is None or not float(match[1]) > 0:
        raise BadValueError(f"'{text}' is no time", next_step="for example: --budget 30m, 45s, 2h")
    return float(match[1]) * {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}[match[2]]


def _plan(
    world: World,
    words: list[str],
    *,
    on: str | None,
    executor: str,
    budget_s: float | None,
    cooldown_s: float,
    order_seed: int,
    seed: int,
) -> ReproducePlan:
    from narrowgauge.judge.gather import all_claims, choose_claims
    from narrowgauge.reproduce.planning import plan_runs

    claims = choose_claims(all_claims(world.checkout.experiments), words)
    return plan_runs(
        claims,
        _here(world, on, executor),
        order_seed=order_seed,
        seed=seed,
        cooldown_s=cooldown_s,
        budget_s=budget_s,
    )


def _here(world: World, on: str | None, executor: str) -> Here:
    from narrowgauge.reproduce.here import here_of

    return here_of(world, on=on, executor=executor)


def _tell(plan: ReproducePlan) -> None:
    from narrowgauge.reproduce.show import plan_lines

    for line in plan_lines(plan):
        note(line)


def _means(
    world: World,
    root: Path,
    data: Path | None,
    *,
    on: str | None,
    executor: str,
    lab_python: Path | None,
    as_json: bool,
) -> Means:
    from narrowgauge.reproduce.carrying import Means
    from narrowgauge.store import Store

    return Means(
        world=world,
        store=Store(root),
        data=data_root(data),
        reporter=_reporter(as_json),
        on=on,
        executor=executor,
        lab_python=lab_python,
    )


def _carry(
    plan: ReproducePlan,
    journal: Journal | None,
    means: Means,
    *,
    as_json: bool,
    limit_s: float | None = None,
) -> Judged:
    """Run a plan, judge it, keep and print that. Raises Interrupted where somebody stopped it."""
    from narrowgauge.errors import Interrupted
    from narrowgauge.reproduce.carrying import carry_out, check_disk
    from narrowgauge.reproduce.conclude import conclude, keep
    from narrowgauge.reproduce.journal import new_journal
    from narrowgauge_contract.codec import dumps

    check_disk(plan, means.store.root)
    journal = journal or new_journal(means.store.root, plan)
    carried = carry_out(plan, journal, means, limit_s=limit_s)
    judged = conclude(plan, carried, means.world.checkout, means.store)
    path = keep(judged, means.store.root, journal.name)
    if as_json:
        print(dumps(judged), end="")
    else:
        _print(judged, every=False)
    note(f"judged: {path}")
    if carried.stopped:
        raise Interrupted(
            "stopped before every run was done", next_step="narrowgauge reproduce --resume"
        )
    return judged


def _print(judged: Judged, *, every: bool) -> None:
    from rich.console import Console

    from narrowgauge.reproduce.show import print_verdicts

    print_verdicts(judged, Console(), all_=every)


def _reporter(as_json: bool) -> Reporter:
    from narrowgauge.progress import LineReporter, LiveReporter, SilentReporter

    if as_json:
        return SilentReporter(sys.stderr)
    return LiveReporter(sys.stderr) if sys.stderr.isatty() else LineReporter(sys.stderr)
