"""`narrowgauge sweep`: many runs of one experiment, by a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.cluster import refuse_ignored, require_executor
from narrowgauge.cli.options import (
    BoardChoice,
    Data,
    Every,
    ExecutorName,
    HostNames,
    Json,
    Label,
    LabPython,
    On,
    Project,
    Results,
    Slurm,
    data_root,
    note,
    note_error,
    reporter_of,
    results_root,
    world_of,
)

if TYPE_CHECKING:
    from narrowgauge.sweep.conduct import Progress, Starter
    from narrowgauge.sweep.file import SweepSpec

__all__ = ["register"]

_File = Annotated[Path, typer.Argument(metavar="FILE", help="What varies, and how: a TOML file.")]
_Plan = Annotated[bool, typer.Option("--plan", help="Show the points, and start nothing.")]
_Show = Annotated[bool, typer.Option("--show", help="Show what is done by now; start nothing.")]
_Wait = Annotated[bool, typer.Option("--wait", help="Wait while another run measures here.")]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("sweep")(sweep)


def sweep(
    file: _File,
    on: On = None,
    executor: ExecutorName = "auto",
    slurm: Slurm = None,
    results: Results = None,
    data: Data = None,
    project: Project = None,
    lab_python: LabPython = None,
    plan: _Plan = False,
    show: _Show = False,
    wait: _Wait = False,
    host: HostNames = None,
    every: Every = False,
    label: Label = None,
    as_json: Json = False,
) -> None:
    """Run a grid, random points, or a search; the same command goes on where it was stopped."""
    from narrowgauge.catalog import load_experiment
    from narrowgauge.launch_sweep import here, on_slurm
    from narrowgauge.store import Store
    from narrowgauge.sweep.conduct import Conductor
    from narrowgauge.sweep.file import check, read_sweep
    from narrowgauge.sweep.journal import Journal, sweep_folder
    from narrowgauge.sweep.points import example, points_of
    from narrowgauge.sweep.table import plan_json, plan_lines

    boards = BoardChoice(tuple(host or ()), every, label, spread=False)
    over_boards = boards.asked(executor, on)
    require_executor(executor, {"slurm": slurm})
    given = {"--wait": wait, "--lab-python": lab_python}
    refuse_ignored("boards" if over_boards else executor, given)
    world = world_of(project)
    read = read_sweep(file)
    spec = load_experiment(world.checkout.experiments, read.experiment)
    asked = check(read, spec)
    if plan:
        points = [] if read.method == "optuna" else points_of(asked)
        print(plan_json(points, asked) if as_json else "\n".join(plan_lines(points, asked)))
        return
    store = Store(results_root(results, world.checkout))
    journal = Journal(sweep_folder(store.root, read.name))
    if show:
        _print(journal, asked, spec, as_json)
        return
    start: Starter
    if over_boards:
        from narrowgauge.cli.hosts import chosen_boards
        from narrowgauge.launch_sweep import on_boards

        start = on_boards(
            world, example(asked), chosen_boards(boards), store, data_root(data),
            reporter_of(as_json), wait=wait, searches=read.method == "optuna", errors=sys.stderr,
        )  # fmt: skip
    elif executor == "slurm":
        from narrowgauge.slurm.asking import add_words

        start = on_slurm(
            world, add_words(read.slurm, slurm or ()), store, data_root(data),
            reporter_of(as_json), on=on, lab_python=lab_python,
        )  # fmt: skip
    else:
        start = here(
            world, example(asked), store, data_root(data), reporter_of(as_json),
            on=on, executor=executor, lab_python=lab_python, wait=wait,
        )  # fmt: skip
    progress = Conductor(asked, spec, store, journal, note).run(start)
    _print(journal, asked, spec, as_json)
    _end(progress)


def _end(progress: Progress) -> None:
    """Raise what kept points from being done, if any are left."""
    from narrowgauge.errors import Interrupted, RunFailed

    left = progress.points - progress.done
    if progress.stopped:
        raise Interrupted(
            f"{left} of {progress.points} points are left", next_step="the same command goes on"
        )
    if left and progress.problems:
        for problem in progress.problems[1:]:
            note_error(problem)
        raise progress.problems[0]
    if left:
        raise RunFailed(
            f"{left} of {progress.points} points failed",
            next_step="narrowgauge show RUN says why; the same command runs those again",
        )


def _print(journal, asked: SweepSpec, spec, as_json: bool) -> None:  # type: ignore[no-untyped-def]
    from narrowgauge.screen import Screen
    from narrowgauge.sweep.table import print_sweep, sweep_json

    entries = list(journal.entries().values())
    if as_json:
        print(sweep_json(entries, asked), end="")
    else:
        print_sweep(entries, asked, spec, Screen())
