"""Runs of the store as pages show them. A name from a request is looked up, never made a path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from narrowgauge import statistics
from narrowgauge.index import Index, Listed
from narrowgauge.report.cards import RunCard, card_of
from narrowgauge.report.text import clean
from narrowgauge.report.words import duration, when
from narrowgauge.store import RunFolder, RunState, Store, read_entry, status_word
from narrowgauge.units import scale_of
from narrowgauge.view import RunView, load_view, metric_names, unit_of

__all__ = [
    "Line",
    "RunPage",
    "Table",
    "find_picture",
    "find_run",
    "list_runs",
    "load_page",
    "pictures_of",
]

#: What a folder of a run may be called. What else lies in the store has no page.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_PICTURE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=-]{0,199}\.png")
#: As many pictures, and configurations, as a page should hold.
_MOST_PICTURES = 40
_MOST_CONFIGURATIONS = 200


@dataclass(frozen=True)
class Line:
    """A run in the list. `linked`: whether its folder has a name that a page can have."""

    name: str
    linked: bool
    experiment: str
    status: str
    began: str
    took: str
    rows: str
    problem: str


@dataclass(frozen=True)
class Table:
    """Configurations of a run and their figures, as texts."""

    metrics: tuple[str, ...]
    lines: tuple[tuple[str, str, tuple[str, ...]], ...]
    left_out: int


@dataclass(frozen=True)
class RunPage:
    """A run as far as it is known. `card` and `table` are None where nothing could be read."""

    name: str
    status: str
    open: bool
    card: RunCard | None
    table: Table | None
    problem: str
    how_to_record: str
    pictures: tuple[str, ...]


def list_runs(
    store: Store, experiment: str, status: str, start: int, count: int
) -> tuple[tuple[Line, ...], bool]:
    """A page of the list, newest first, and whether there are more."""
    with Index(store.root) as index:
        found = index.runs(
            experiment=experiment or None, status=status or None, limit=start + count + 1
        )[start:]
    return tuple(map(_line, found[:count])), len(found) > count


def _line(run: Listed) -> Line:
    return Line(
        name=clean(run.run_id),
        linked=_NAME.fullmatch(run.run_id) is not None,
        experiment=clean(run.experiment),
        status=run.status,
        began=when(run.started_utc),
        took=duration(run.seconds) if run.seconds is not None else "",
        rows=f"{run.valid_rows} of {run.rows}" if run.rows is not None else "",
        problem=clean(run.problem.partition("\n")[0]),
    )


def find_run(store: Store, name: str) -> RunFolder | None:
    """The run whose folder is called exactly so; None where there is none, it is no name, or it is
    a link out of the results."""
    if _NAME.fullmatch(name) is None:
        return None
    root = store.root.resolve()
    for place in (store.root, *_folders(store.root)):
        folder = RunFolder(place / name)
        if not (folder.job_path.is_file() or folder.recorded):
            continue
        return folder if root in folder.path.resolve().parents else None
    return None


def _folders(root: Path) -> Iterator[Path]:
    try:
        yield from (path for path in sorted(root.iterdir()) if path.is_dir())
    except OSError:
        return


def pictures_of(folder: RunFolder) -> tuple[str, ...]:
    """The names of the pictures that were drawn from a run."""
    try:
        names = sorted(path.name for path in folder.derived.iterdir() if path.is_file())
    except OSError:
        return ()
    return tuple(name for name in names if _PICTURE.fullmatch(name))[:_MOST_PICTURES]


def find_picture(folder: RunFolder, name: str) -> Path | None:
    """A picture of a run, by a name out of `pictures_of`; nothing that lies elsewhere."""
    if name not in pictures_of(folder):
        return None
    path = (folder.derived / name).resolve()
    return path if path.parent == folder.derived.resolve() else None


def load_page(folder: RunFolder) -> RunPage:
    """What a run's page shows; never raises for a damaged run."""
    view = load_view(folder)
    going = view.state is RunState.OPEN
    return RunPage(
        name=clean(folder.name),
        status=status_word(read_entry(folder)),
        open=going,
        card=card_of(view.record, view.state) if view.record is not None else None,
        table=_table(view),
        problem=clean(view.problem, lines=True) if view.problem else "",
        how_to_record=clean(folder.how_to_record) if going else "",
        pictures=pictures_of(folder),
    )


def _table(view: RunView) -> Table | None:
    record = view.record
    found = view.configurations
    # Of a run that goes on the first row may be in the making: no figures yet, and no fault of it.
    if record is None or (view.state is RunState.OPEN and not any(each.valid for each in found)):
        return None
    metrics = view.headline or metric_names(record)[:3]
    names = statistics.varying(found)
    return Table(
        metrics=tuple(clean(name) for name in metrics),
        lines=tuple(
            (
                clean(each.label(names) or record.experiment),
                f"{len(each.valid)} of {len(each.rows)}",
                tuple(_figure(each.figures(name), unit_of(record, name)) for name in metrics),
            )
            for each in found[:_MOST_CONFIGURATIONS]
        ),
        left_out=max(0, len(found) - _MOST_CONFIGURATIONS),
    )


def _figure(figures: tuple[float, ...], unit: str) -> str:
    summary = statistics.summarize(figures)
    if summary is None:
        return ""
    scale = scale_of(summary.median, unit)
    if summary.n > 1:
        spread = f" ({scale.number(summary.low)} to {scale.number(summary.high)})"
    else:
        spread = ""
    return clean(scale.text(summary.median)) + spread
