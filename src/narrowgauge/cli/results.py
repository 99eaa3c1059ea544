"""`narrowgauge results`, `show`, `compare`. Thin: each calls the module that does it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from narrowgauge.cli import complete
from narrowgauge.cli.options import Json, Project, Results, Run, checkout_of, note, results_root

if TYPE_CHECKING:
    from narrowgauge.index import Listed
    from narrowgauge.store import Entry, RunFolder, Store
    from narrowgauge_contract.record import Record

__all__ = ["register"]

_Only = Annotated[
    str | None,
    typer.Option(
        "--experiment",
        metavar="EXPERIMENT",
        help="Only runs of this experiment.",
        autocompletion=complete.experiments,
    ),
]


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    results = typer.Typer(invoke_without_command=True)
    results.callback(help="List runs, newest first; damaged ones too.")(list_results)
    results.command("draw")(draw)
    results.command("export")(export)
    results.command("tables")(tables)
    app.add_typer(results, name="results")
    app.command("show")(show)
    app.command("compare")(compare)


def list_results(
    context: typer.Context,
    experiment: _Only = None,
    status: Annotated[
        str | None,
        typer.Option("--status", help="complete, failed, interrupted, unfinished, open, damaged."),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most so many.")] = 20,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """List runs, newest first; damaged ones too."""
    if context.invoked_subcommand is not None:
        return
    from narrowgauge.index import Index
    from narrowgauge.store import STATUS_WORDS
    from narrowgauge_contract.errors import UnknownNameError

    if status is not None and status not in STATUS_WORDS:
        raise UnknownNameError("status", status, STATUS_WORDS)
    with Index(_store(results, project).root) as index:
        runs = index.runs(experiment=experiment, status=status, limit=limit)
        if as_json:
            _print_json([_listed(run, index.folder(run).path) for run in runs])
            return
        entries = [_entry(run, index.folder(run)) for run in runs]
    from narrowgauge.screen import Screen
    from narrowgauge.show import print_results

    print_results(entries, Screen(), filtered=bool(experiment or status))


def show(
    run: Run = "latest", results: Results = None, project: Project = None, as_json: Json = False
) -> None:
    """Show one run on one screen: how it ended, what it measured, where, and what to distrust."""
    from narrowgauge.noise import Floors

    store = _store(results, project)
    folder = store.find(run)
    if as_json:
        from narrowgauge.remarks import remarks_json
        from narrowgauge.view import load_view, to_json

        view = load_view(folder)
        _print_json({**to_json(view), **remarks_json(view, Floors.in_store(store))})
    else:
        from narrowgauge.screen import Screen
        from narrowgauge.show import show_run

        show_run(folder, Screen(), Floors.in_store(store))
    _raise_if_damaged(folder)


def compare(
    left: Run,
    right: Run,
    others: Annotated[
        list[str] | None, typer.Argument(metavar="[RUN]...", help="More runs, of other boards.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Draw all runs there: .png, .svg or .pdf."),
    ] = None,
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Compare runs of an experiment; of two it says what keeps them from one statistic."""
    from narrowgauge.compare import compare as compare_records
    from narrowgauge.compare import comparison_json, print_comparison
    from narrowgauge.noise import Floors

    store = _store(results, project)
    records = [store.find(run).record() for run in (left, right, *(others or ()))]
    if others or plot is not None:
        _compare_boards(records, plot, as_json)
        return
    found = compare_records(records[0], records[1], Floors.in_store(store))
    if as_json:
        _print_json(comparison_json(found))
        return
    from narrowgauge.screen import Screen

    print_comparison(found, Screen())


def _compare_boards(records: list[Record], plot: Path | None, as_json: bool) -> None:
    from narrowgauge.compare_boards import (
        draw_boards,
        print_boards,
        side_by_side,
        side_by_side_json,
    )

    found = side_by_side(records)
    if as_json:
        _print_json(side_by_side_json(found))
    else:
        from narrowgauge.screen import Screen

        print_boards(found, Screen())
    if plot is not None:
        note(str(draw_boards(found, plot)))


def export(
    run: Run,
    reference: Annotated[
        bool,
        typer.Option("--reference", help="Into experiments/<id>/reference, at most 200 samples."),
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Copy the whole record here.")
    ] = None,
    picture: Annotated[
        list[str] | None,
        typer.Option("--picture", metavar="NAME", help="With --reference: keep this one too."),
    ] = None,
    results: Results = None,
    project: Project = None,
) -> None:
    """Copy a record out: whole to a file, or reduced into the repository."""
    from narrowgauge.errors import UsageError
    from narrowgauge.reference import export as export_reference

    if reference == (out is not None):
        raise UsageError("export wants one of --reference and --out FILE")
    if picture and not reference:
        raise UsageError("--picture goes with --reference: other pictures are in `derived`")
    checkout = checkout_of(project)
    store = _store(results, project)
    folder = store.find(run)
    record = folder.record()
    if out is None:
        drawn: list[Path] = []
        if picture:
            from narrowgauge.noise import Floors
            from narrowgauge.reference_pictures import find_pictures

            drawn = find_pictures(folder, picture, Floors.in_store(store))
        print(export_reference(record, checkout.experiments))
        if drawn:
            from narrowgauge.reference_pictures import keep_pictures

            for line in keep_pictures(drawn, record, checkout.experiments):
                note(line)
        return
    from narrowgauge_contract.record import write_record

    try:
        write_record(out, record)
    except OSError as error:
        raise UsageError(f"cannot write {out}", why=str(error)) from error
    print(out)


def draw(run: Run = "latest", results: Results = None, project: Project = None) -> None:
    """Draw a run's pictures and tables again, from its record."""
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    store = _store(results, project)
    for path in draw_run(store.find(run), Floors.in_store(store)):
        print(path)


def tables(
    experiment: Annotated[
        str | None,
        typer.Argument(
            help="Which experiment; all by default.", autocompletion=complete.experiments
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing; fail where a table is out of date.")
    ] = False,
    project: Project = None,
) -> None:
    """Bring the tables in the experiments' READMEs up to date with their reference records."""
    from narrowgauge.catalog import experiment_names
    from narrowgauge.reference import update_page
    from narrowgauge_contract.errors import UnknownNameError

    folder = checkout_of(project).experiments
    names = experiment_names(folder)
    if experiment is not None and experiment not in names:
        raise UnknownNameError("experiment", experiment, names)
    for name in (experiment,) if experiment is not None else names:
        if (folder / name / "README.md").is_file():
            update_page(folder / name, check=check, say=note)


def _store(results: Path | None, project: Path | None) -> Store:
    from narrowgauge.store import Store

    if results is not None:
        return Store(results.absolute())  # needs no checkout
    return Store(results_root(None, checkout_of(project)))


def _entry(run: Listed, folder: RunFolder) -> Entry:
    """A listed run as the table shows it, refused where the index refuses it."""
    from narrowgauge.errors import DamagedRecordError
    from narrowgauge.store import Entry, RunState, read_entry

    entry = read_entry(folder)
    if run.problem and entry.problem is None:
        return Entry(folder, RunState.DAMAGED, problem=DamagedRecordError(run.problem))
    return entry


def _listed(run: Listed, folder: Path) -> dict[str, Any]:
    return {
        "run_id": run.run_id,
        "experiment": run.experiment,
        "status": run.status,
        "folder": str(folder),
        "profile": run.profile,
        "target": run.target,
        "device": run.device,
        "started_utc": run.started_utc,
        "seconds": run.seconds,
        "rows": run.rows,
        "valid_rows": run.valid_rows,
        "headline": run.headline,
        "problem": run.problem or None,
    }


def _raise_if_damaged(folder: RunFolder) -> None:
    from narrowgauge.store import RunState, read_entry

    entry = read_entry(folder)
    if entry.state is RunState.DAMAGED and entry.problem is not None:
        raise entry.problem


def _print_json(body: object) -> None:
    print(json.dumps(body, indent=2, sort_keys=True))
