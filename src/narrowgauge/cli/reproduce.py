"""`narrowgauge reproduce`, `kick`, `explain`, `replay`: each calls the module that does it."""

from __future__ import annotations

import re
import secrets
import sys
from collections.abc import Callable
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
#: As much of it is kept for the end of the last run, judging, and the report.
_KICK_CLOSING_S = 90.0
_LARGEST_SEED = 2**31
#: What may be said beside `--resume`: where it is, and for how long it may go on.
_WITH_RESUME = ("claim", "resume", "budget", "dry_run", "results", "project", "as_json")


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command("reproduce")(reproduce)
    app.command("kick")(kick)
    app.command("explain")(explain)
    app.command("replay")(replay)


def reproduce(
    context: typer.Context,
    claim: _Claims = None,
    all_: Annotated[bool, typer.Option("--all", help="Every claim.")] = False,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="TIME", help="At most so long: 45s, 30m, 2h."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Go on with the newest one that was cut short, or with the one of that name.",
        ),
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

    world = world_of(project)
    root = results_root(results, world.checkout)
    chosen = order_seed if order_seed is not None else secrets.randbelow(_LARGEST_SEED)
    limit_s = None
    if resume:
        journal = _resumed(context, claim or [], root)
        plan, limit_s = journal.plan(), seconds_of(budget)
    else:
        if all_ == bool(claim):
            raise UsageError("name the claims to reproduce, or say --all")
        journal = None
        plan = _plan(
            world, claim or [], on=on, executor=executor, budget_s=seconds_of(budget),
            cooldown_s=cooldown, order_seed=chosen, seed=seed,
        )  # fmt: skip
        plan = _placed(plan, on=on, executor=executor, data=data, lab_python=lab_python)
    _tell(plan)
    if dry_run:
        return
    means = _means(world, root, plan, as_json=as_json)
    _carry(plan, journal, means, as_json=as_json, limit_s=limit_s)


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
    plan = _placed(plan, on=on, executor=executor, data=data, lab_python=lab_python)
    _tell(plan)
    means = _means(world, root, plan, as_json=False)

    def close(judged: Judged) -> None:
        print(write_report(judged, world.checkout, root))

    left = _KICK_S - _KICK_CLOSING_S - (time.monotonic() - begun)
    try:
        _carry(plan, None, means, as_json=False, limit_s=left, close=close)
    finally:
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
    from narrowgauge.reproduce.occasions import labelled, occasions_in
    from narrowgauge.reproduce.show import REPLAY_LABEL, explain_lines
    from narrowgauge.store import Store
    from narrowgauge_contract.codec import dumps

    checkout = checkout_of(project)
    store = Store(results_root(results, checkout))
    judged = (
        judge_references(checkout, [claim])
        if references
        else labelled(judge_stored(checkout, store, [claim]), occasions_in(store.root))
    )
    if as_json:
        print(dumps(judged), end="")
        return
    if judged.occasion.replay:
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


def _resumed(context: typer.Context, words: list[str], root: Path) -> Journal:
    """What `--resume` goes on with: all else was said when it began. Raises UsageError."""
    from narrowgauge.errors import UsageError
    from narrowgauge.reproduce.journal import unfinished_journal

    if len(words) > 1:
        raise UsageError("--resume takes one name, of what was cut short, and no claims")
    for parameter in context.command.params:
        name = parameter.name or ""
        source = context.get_parameter_source(name)
        given = source is not None and source.name == "COMMANDLINE"
        if given and name not in _WITH_RESUME:
            raise UsageError(
                f"{parameter.opts[0]} does not go with --resume",
                why="what is gone on with is measured as it was begun",
                next_step="leave it out, or begin anew without --resume",
            )
    return unfinished_journal(root, words[0] if words else None)


def _placed(
    plan: ReproducePlan,
    *,
    on: str | None,
    executor: str,
    data: Path | None,
    lab_python: Path | None,
) -> ReproducePlan:
    """The plan with where it runs, so that what goes on with it later runs there too."""
    import dataclasses

    return dataclasses.replace(
        plan,
        on=on,
        executor=executor,
        data=None if data is None else str(data.absolute()),
        lab_python=None if lab_python is None else str(lab_python.absolute()),
    )


def _means(world: World, root: Path, plan: ReproducePlan, *, as_json: bool) -> Means:
    from narrowgauge.reproduce.carrying import Means
    from narrowgauge.store import Store

    return Means(
        world=world,
        store=Store(root),
        data=data_root(None if plan.data is None else Path(plan.data)),
        reporter=_reporter(as_json),
        on=plan.on,
        executor=plan.executor,
        lab_python=None if plan.lab_python is None else Path(plan.lab_python),
    )


def _carry(
    plan: ReproducePlan,
    journal: Journal | None,
    means: Means,
    *,
    as_json: bool,
    limit_s: float | None = None,
    close: Callable[[Judged], None] | None = None,
) -> None:
    """Run a plan, judge it, keep and print that, and `close` with it. Raises Interrupted at the end
    of all that where somebody stopped it."""
    from narrowgauge.errors import Interrupted
    from narrowgauge.reproduce.carrying import carry_out, check_disk
    from narrowgauge.reproduce.conclude import claims_of, conclude, keep
    from narrowgauge.reproduce.journal import new_journal
    from narrowgauge_contract.codec import dumps

    chosen = claims_of(plan, means.world.checkout)
    check_disk(plan, means.store.root)
    journal = journal or new_journal(means.store.root, plan)
    carried = carry_out(plan, journal, means, limit_s=limit_s)
    judged = conclude(plan, chosen, carried, means.world.checkout, means.store)
    path = keep(judged, means.store.root, journal.name)
    if carried.finished:
        journal.finish(path)
    if as_json:
        print(dumps(judged), end="")
    else:
        _print(judged, every=False)
    note(f"judged: {path}")
    if close is not None:
        close(judged)
    if carried.stopped:
        raise Interrupted(
            "stopped before every run was done",
            next_step=f"narrowgauge reproduce --resume {journal.name}",
        )


def _print(judged: Judged, *, every: bool) -> None:
    from narrowgauge.reproduce.show import print_verdicts
    from narrowgauge.screen import Screen

    print_verdicts(judged, Screen(), all_=every)


def _reporter(as_json: bool) -> Reporter:
    from narrowgauge.progress import LineReporter, LiveReporter, SilentReporter

    if as_json:
        return SilentReporter(sys.stderr)
    return LiveReporter(sys.stderr) if sys.stderr.isatty() else LineReporter(sys.stderr)
