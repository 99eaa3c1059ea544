"""`narrowgauge anytime-score`. Thin: calls the modules that do it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli import complete
from narrowgauge.cli.options import Json, Project, Results, checkout_of, note, results_root

if TYPE_CHECKING:
    from narrowgauge.anytime.scoring import Scoring

__all__ = ["register"]


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command("anytime-score")(anytime_score)


def anytime_score(
    runs: Annotated[
        list[str],
        typer.Argument(
            metavar="RUN...",
            help="Runs of networks with several exits, by id, its beginning or end, or `latest`.",
            autocompletion=complete.runs,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Write JSON, CSV and the pictures there."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(
            "--into", metavar="PAGE", help="Write the table into this page, between its markers."
        ),
    ] = None,
    base: Annotated[
        str,
        typer.Option(
            "--base",
            metavar="FAMILY",
            help="What each family costs within a point of this one, a plain network: its label or "
            "a part of it.",
        ),
    ] = "",
    results: Results = None,
    project: Project = None,
    as_json: Json = False,
) -> None:
    """Score networks that answer more than once: areas, intervals, pairs and pictures."""
    from narrowgauge.anytime.gather import gather
    from narrowgauge.anytime.scoring import score
    from narrowgauge.anytime.showing import print_scoring, scoring_json
    from narrowgauge.store import Store

    # What `--results` names needs no checkout.
    root = results.absolute() if results is not None else results_root(None, checkout_of(project))
    store = Store(root)
    found = score(gather([store.find(run) for run in runs]), base)
    if as_json:
        print(json.dumps(scoring_json(found), indent=2, sort_keys=True))
    else:
        from narrowgauge.screen import Screen
        from narrowgauge.view import widen

        console = Screen()
        widen(console)
        print_scoring(found, console)
    if out is not None:
        _write(found, out)
    if into is not None:
        from narrowgauge.anytime.page import update_page

        note(f"{into} {'was brought up to date' if update_page(into, found) else 'is up to date'}")


def _write(found: Scoring, out: Path) -> None:
    from narrowgauge.anytime.picture import draw_scoring
    from narrowgauge.anytime.showing import scoring_csv, scoring_json
    from narrowgauge.errors import results_unwritable

    text = json.dumps(scoring_json(found), indent=2, sort_keys=True) + "\n"
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, body in (("anytime.json", text), ("anytime.csv", scoring_csv(found))):
            (out / name).write_text(body, encoding="utf-8")
            note(str(out / name))
    except OSError as error:
        raise results_unwritable(out, f"{error.strerror}: {error.filename}") from error
    for path in draw_scoring(found, out):
        note(str(path))
