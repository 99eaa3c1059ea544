"""`narrowgauge run`, `plan`, `attach`, `shell`, `list`: each calls the module that does it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.cluster import (
    on_slurm,
    print_manifests,
    refuse_ignored,
    require_executor,
    submit_manifests,
    together,
)
from narrowgauge.cli.options import (
    BoardChoice,
    Data,
    Every,
    ExecutorName,
    Experiment,
    HostNames,
    Json,
    Kubernetes,
    Label,
    LabPython,
    Node,
    On,
    Parameters,
    ProfileName,
    Project,
    Results,
    Run,
    Seed,
    Slurm,
    Spread,
    checkout_of,
    data_root,
    note,
    note_error,
    reporter_of,
    results_root,
    world_of,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from narrowgauge.errors import NarrowgaugeError
    from narrowgauge.store import RunFolder, Store
    from narrowgauge_contract.record import Record

__all__ = ["register"]

_Wait = Annotated[bool, typer.Option("--wait", help="Wait while another run measures here.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command("run")(run)
    app.command("plan")(plan)
    app.command("attach")(attach)
    app.command("shell", context_settings={"ignore_unknown_options": True})(shell)
    app.command("list")(list_)


def run(
    experiment: Experiment,
    on: On = None,
    executor: ExecutorName = "auto",
    profile: ProfileName = "short",
    parameter: Parameters = None,
    seed: Seed = 0,
    results: Results = None,
    data: Data = None,
    project: Project = None,
    lab_python: LabPython = None,
    wait: _Wait = False,
    slurm: Slurm = None,
    kubernetes: Kubernetes = None,
    node: Node = None,
    host: HostNames = None,
    every: Every = False,
    label: Label = None,
    spread: Spread = False,
    as_json: Json = False,
) -> None:
    """Run an experiment, record it, show it."""
    from narrowgauge.launch import prepare, run_all
    from narrowgauge.plan import JobRequest
    from narrowgauge.store import Store

    boards = BoardChoice(tuple(host or ()), every, label, spread)
    on_boards = boards.asked(executor, on)
    require_executor(executor, {"slurm": slurm, "kubernetes": kubernetes})
    given = {"--node": node, "--results": results, "--data": data, "--lab-python": lab_python}
    refuse_ignored(
        "boards" if on_boards else executor, {**given, "--wait": wait, "--json": as_json}
    )
    world = together(world_of(project), node)
    request = JobRequest(experiment, profile, tuple(parameter or ()), seed)
    store = Store(results_root(results, world.checkout))
    if on_boards:
        from narrowgauge.cli.hosts import run_on_boards

        asked, done = run_on_boards(
            world, request, boards, store, data_root(data), wait=wait,
            reporter=reporter_of(as_json),
        )  # fmt: skip
        return _end(asked, done.runs, store, as_json, done.problems)
    if executor == "kubernetes":
        return submit_manifests(world, request, kubernetes, on)
    if executor == "slurm":
        asked, finished = on_slurm(
            world, request, slurm, store, data_root(data), reporter_of(as_json),
            on=on, lab_python=lab_python,
        )  # fmt: skip
        return _end(asked, finished, store, as_json)
    launch = prepare(world, request, store.root, on=on, executor=executor, lab_python=lab_python)
    finished = run_all(
        world, launch, store=store, data=data_root(data), wait=wait, reporter=reporter_of(as_json)
    )
    helping = world.meeting is not None and not world.meeting.records
    return None if helping else _end(len(launch.jobs), finished, store, as_json)


def plan(
    experiment: Experiment,
    on: On = None,
    executor: ExecutorName = "docker",
    profile: ProfileName = "short",
    parameter: Parameters = None,
    seed: Seed = 0,
    results: Results = None,
    data: Data = None,
    project: Project = None,
    kubernetes: Kubernetes = None,
    as_json: Json = False,
) -> None:
    """Print the exact `docker run` line and job.json of a run, or its Kubernetes manifests. Starts
    nothing, asks no engine."""
    from narrowgauge.plan import JobRequest
    from narrowgauge.preview import preview, preview_json, preview_text

    world = world_of(project)
    request = JobRequest(experiment, profile, tuple(parameter or ()), seed)
    require_executor(executor, {"kubernetes": kubernetes})
    refuse_ignored(executor, {"--results": results, "--data": data})
    if executor == "kubernetes":
        return print_manifests(world, request, kubernetes, on, as_json)
    root = results_root(results, world.checkout)
    previews = preview(world, request, on=on, executor=executor, results=root, data=data_root(data))
    return print(preview_json(previews) if as_json else preview_text(previews), end="")


def attach(
    run: Run,
    results: Results = None,
    project: Project = None,
    wait: _Wait = False,
    as_json: Json = False,
) -> None:
    """Watch and record a run whose launcher is gone."""
    from narrowgauge.launch import attach_to, forget_leftovers
    from narrowgauge.store import Store

    world = world_of(project)
    store = Store(results_root(results, world.checkout))
    folder = store.find(run)
    if folder.recorded:
        note(f"{folder.name} is already recorded")
        forget_leftovers(world, folder)
        _finish([(folder, folder.record())], store, as_json)
        return
    record = attach_to(world, folder, wait=wait, reporter=reporter_of(as_json))
    _finish([(folder, record)], store, as_json)


def shell(
    words: Annotated[
        list[str] | None, typer.Argument(metavar="[COMMAND]...", help="Run this instead; after --.")
    ] = None,
    on: On = None,
    executor: ExecutorName = "auto",
    data: Data = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """Open a shell where experiments run: in the target's container, or natively."""
    from narrowgauge.shell import open_shell

    open_shell(
        world_of(project),
        tuple(words or ()),
        on=on,
        executor=executor,
        data=data_root(data),
        lab_python=lab_python,
    )


def list_(project: Project = None, as_json: Json = False) -> None:
    """Show the experiments with what they cost, and the targets."""
    from narrowgauge.catalog import load_experiments
    from narrowgauge.listing import listing_json, print_listing
    from narrowgauge.targets import load_targets

    checkout = checkout_of(project)
    specs = load_experiments(checkout.experiments)
    targets = load_targets(checkout.targets_file)
    if as_json:
        print(listing_json(specs, targets), end="")
    else:
        from narrowgauge.machine import probe_host

        print_listing(specs, targets, probe_host())


def _end(
    asked: int,
    finished: list[tuple[RunFolder, Record]],
    store: Store,
    as_json: bool,
    problems: Sequence[NarrowgaugeError] = (),
) -> None:
    """Show what was recorded; `problems` kept a board from more, and the first is raised where runs
    are missing."""
    from narrowgauge.errors import Interrupted, NarrowgaugeError

    try:
        _finish(finished, store, as_json)
    except NarrowgaugeError:
        for problem in problems:
            note_error(problem)
        raise
    if len(finished) >= asked:
        return  # another board has done its part; what kept it was said
    for problem in problems[1:]:
        note_error(problem)
    if problems:
        raise problems[0]
    raise Interrupted(f"{asked - len(finished)} of {asked} runs were not started")


def _finish(finished: list[tuple[RunFolder, Record]], store: Store, as_json: bool) -> None:
    """Show what was recorded; then raise the error of the first run that did not go well."""
    from narrowgauge.recording import problem_of

    problems = [problem_of(record, folder) for folder, record in finished]
    if as_json:
        from narrowgauge.listing import finished_json

        print(finished_json(finished), end="")
    else:
        for folder, _ in finished:
            _show(folder, store)
    for problem in problems:
        if problem is not None:
            raise problem


def _show(folder: RunFolder, store: Store) -> None:
    from narrowgauge.noise import Floors
    from narrowgauge.screen import Screen
    from narrowgauge.show import show_run

    show_run(folder, Screen(), Floors.in_store(store))
