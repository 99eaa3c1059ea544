"""`narrowgauge report`, `serve`. Thin: each calls the package that does it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from narrowgauge.cli.options import Project, Results, checkout_of, note, results_root

if TYPE_CHECKING:
    from narrowgauge.checkout import Checkout
    from narrowgauge.judge.model import Judged
    from narrowgauge.report.content import Report
    from narrowgauge.store import Store

__all__ = ["register"]

#: Each format and the suffix of its file.
_FORMATS = {"html": "html", "markdown": "md", "latex": "tex", "csv": "csv", "json": "json"}
_STANDARD_OUTPUT = Path("-")


def register(app: typer.Typer) -> None:
    """Add these commands to the program."""
    app.command("report")(report)
    app.command("serve")(serve)


def report(
    form: Annotated[
        str, typer.Option("--format", metavar="|".join(_FORMATS), help="What to write.")
    ] = "html",
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to; - is standard output. Default:"
                     " report.html and so on in the results folder."),
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option("--into", metavar="PAGE", help="Fill the verdicts' block of this Markdown"
                     " page instead."),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="With --into: write nothing, fail where it differs.")
    ] = False,
    judged: Annotated[
        Path | None,
        typer.Option("--judged", metavar="FILE", help="What reproduce judged. Default: its newest,"
                     " where no record or claim is newer; else the stored records, judged now."),
    ] = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Judge the reference records of the checkout; labelled"
                           " no reproduction.")
    ] = False,
    results: Results = None,
    project: Project = None,
) -> None:  # fmt: skip
    """Verdicts on all claims: one HTML page, Markdown, a LaTeX appendix, CSV or JSON."""
    from narrowgauge.errors import UsageError
    from narrowgauge_contract.errors import UnknownNameError

    if form not in _FORMATS:
        raise UnknownNameError("format", form, tuple(_FORMATS))
    if judged is not None and replay:
        raise UsageError("--judged and --replay are two sources", next_step="name one of them")
    if check and into is None:
        raise UsageError("--check needs a page", next_step="--into ARTIFACT.md --check")
    found, view, store = _judge(judged, replay, results, project)
    if into is not None:
        from narrowgauge.report.markdown import markdown_block, update_block

        changed = update_block(into, markdown_block(view), check=check)
        note(f"{into} {'was brought up to date' if changed else 'is up to date'}")
        return
    _write(_text(form, view, found), out or store.root / f"report.{_FORMATS[form]}")
    note(view.summary)


def _judge(
    judged: Path | None, replay: bool, results: Path | None, project: Path | None
) -> tuple[Judged, Report, Store]:
    from narrowgauge.judge.gather import judge_references, judge_with_records, load_judged
    from narrowgauge.report.assembled import assemble
    from narrowgauge.reproduce.occasions import labelled, occasions_in
    from narrowgauge.store import Store

    checkout = checkout_of(project)
    store = Store(results_root(results, checkout))
    if judged is not None:
        found = load_judged(judged)
    elif replay:
        found = judge_references(checkout)
    else:
        latest = _latest(store, checkout)
        if latest is None:
            fresh, records = judge_with_records(checkout, store)
            found = labelled(fresh, occasions_in(store.root))
            view = assemble(found, store, checkout.experiments, records.by_experiment)
            return found, view, store
        found = latest
    return found, assemble(found, store, checkout.experiments), store


def _latest(store: Store, checkout: Checkout) -> Judged | None:
    """What reproduce judged last, where that is still so; says where it comes from."""
    from narrowgauge.judge.gather import load_judged
    from narrowgauge.reproduce.occasions import latest_judged
    from narrowgauge_contract.errors import DamagedRecordError

    path = latest_judged(store.root, checkout.experiments)
    if path is None:
        return None
    try:
        found = load_judged(path)
    except DamagedRecordError as error:
        note(f"the stored records are judged now: {error.what}")
        return None
    note(f"as judged by reproduce: {path}")
    return found


def _text(form: str, view: Report, judged: Judged) -> str:
    if form == "html":
        from narrowgauge.report.html import html_report

        return html_report(view)
    if form == "markdown":
        from narrowgauge.report.markdown import markdown_report

        return markdown_report(view)
    if form == "latex":
        from narrowgauge.report.latex import latex_report

        return latex_report(view)
    from narrowgauge.report.tabular import csv_report, json_report

    return csv_report(view) if form == "csv" else json_report(view, judged)


def _write(text: str, path: Path) -> None:
    from narrowgauge.errors import UsageError
    from narrowgauge_contract.codec import write_atomic

    if path == _STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text.encode("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot write {path}", why=error.strerror or str(error)) from error
    print(path)


def serve(
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="The port; 0 takes a free one.")
    ] = 8377,
    results: Results = None,
    project: Project = None,
) -> None:
    """A local page of the results, read-only, on 127.0.0.1: runs, comparisons, the report.

    Everybody who has an account on this machine can read it."""
    from narrowgauge.serve.server import serve_results
    from narrowgauge.store import Store

    checkout = checkout_of(project)
    serve_results(Store(results_root(results, checkout)), checkout, port, note)
