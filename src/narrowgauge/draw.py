"""Pictures of a run, drawn from its record and side files alone, and always the same.

Which pictures, the experiment says (`[[draw]]` in experiment.toml); how, is decided here once.
Only what stands beside a ratio comes from elsewhere: the noise floor, from the newest run of that.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from narrowgauge import statistics
from narrowgauge.draw_anytime import anytime_pictures
from narrowgauge.draw_bars import bars_size, paint_bars
from narrowgauge.draw_confusion import added, matrix_size, paint_matrix, read_matrix
from narrowgauge.draw_curves import curves_size, paint_curves
from narrowgauge.draw_heat import heat_size, paint_heat, read_heat
from narrowgauge.draw_labels import file_word
from narrowgauge.draw_ladder import ladder_size, paint_ladder
from narrowgauge.draw_maps import maps_size, paint_maps, read_maps
from narrowgauge.draw_spans import has_traces, span_pictures
from narrowgauge.draw_stacked import paint_stacks, stacks_size
from narrowgauge.draw_style import heading, write_pictures
from narrowgauge.ladder import climbs_of, ladder_csv, ladder_markdown
from narrowgauge.noise import Floors
from narrowgauge.statistics import Configuration
from narrowgauge.store import RunFolder
from narrowgauge.tables import write_tables
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["draw_run", "draw_what_is_whole"]

#: One matrix per configuration; more than these are no picture any more.
_MOST_MATRICES = 8
#: More than these go into several pictures.
_MOST_BARS = 24


def draw_run(folder: RunFolder, floors: Floors) -> list[Path]:
    """Draw every picture and table of a recorded run into its `derived`; the files made.

    Raises DamagedRecordError where the record or a side file is damaged: after everything else is
    drawn, and with nothing drawn from what is damaged.
    """
    made, problems = draw_what_is_whole(folder, floors)
    for problem in problems.values():
        raise problem
    return made


def draw_what_is_whole(
    folder: RunFolder, floors: Floors
) -> tuple[list[Path], dict[str, DamagedRecordError]]:
    """As `draw_run`, and by the names of drawings what keeps them from being drawn. Raises
    DamagedRecordError where the record itself is damaged."""
    record = folder.record()
    folder.derived.mkdir(exist_ok=True)
    made = write_tables(record, folder.derived, floors)
    problems: dict[str, DamagedRecordError] = {}
    # Nothing says that names differ.
    pictures = [("spans", span_pictures(record, folder))] if has_traces(record) else []
    if record.valid_rows():
        drawings = parse_spec(record.spec, where=f"the record of {record.run_id}").drawings
        made += [path for each in drawings for path in _write_ladder(each, record, folder, floors)]
        pictures += [(each.name, _paint(each, record, folder, floors)) for each in drawings]
    for name, each in pictures:
        try:
            made += write_pictures(each, folder.derived)
        except DamagedRecordError as problem:
            problems.setdefault(name, problem)
    return made, problems


_Pictures = Iterator[tuple[str, "Figure"]]


def _paint(drawing: Drawing, record: Record, folder: RunFolder, floors: Floors) -> _Pictures:
    painters: dict[str, Callable[[], _Pictures]] = {
        "curve": lambda: _curves(drawing, record),
        "bar": lambda: _bars(drawing, record),
        "confusion": lambda: _confusions(drawing, record, folder),
        "heat": lambda: _heats(drawing, record, folder),
        "maps": lambda: _maps(drawing, record, folder),
        "anytime": lambda: _anytimes(drawing, record, folder),
        "ladder": lambda: _ladders(drawing, record, floors),
        "stacked": lambda: _stacks(drawing, record),
    }
    return painters[drawing.kind]()


def _figure(width: float, height: float, title: str, record: Record) -> Figure:
    from matplotlib.figure import Figure

    picture = Figure(figsize=(width, height))
    note = " · made-up data" if record.synthetic else ""
    if any("stand-in" in str(row.facts.get("accelerator", "")) for row in record.rows):
        note += " · the CPU stands in for an accelerator"
    heading(picture, title + note)
    return picture


def _curves(drawing: Drawing, record: Record) -> _Pictures:
    valid = [each for each in statistics.configurations(record.rows) if each.valid]
    found = [each for each in valid if drawing.shows(each.parameters)]
    rows = [row for each in found for row in each.valid]
    metrics = [name for name in drawing.metrics if any(row.metric(name) for row in rows)]
    if metrics:
        # One curve has no legend, which would say which of the record's it is.
        alone = found[0].label(statistics.varying(valid)) if len(found) == 1 else ""
        title = " · ".join(filter(None, (drawing.title, alone)))
        picture = _figure(*curves_size(metrics), title, record)
        paint_curves(picture, drawing, record, found, metrics)
        yield drawing.name, picture


def _bars(drawing: Drawing, record: Record) -> Iterator[tuple[str, Figure]]:
    """A bar per configuration: the median over the repeats, its interval, every repeat a dot.

    Of more bars than one can look at, those that differ in what varies fastest go together, into a
    picture for each combination of the rest.
    """
    found = [each for each in statistics.configurations(record.rows) if each.valid]
    metrics = [name for name in drawing.metrics if any(each.figures(name) for each in found)]
    if not metrics:
        return
    for label, group, names in _pages(found):
        name, title = _called(drawing, label)
        words = [each.label(names) or record.experiment for each in group]
        picture = _figure(*bars_size(words, metrics), title, record)
        paint_bars(picture, drawing, record, group, metrics, words)
        yield name, picture


def _stacks(drawing: Drawing, record: Record) -> Iterator[tuple[str, Figure]]:
    """Bars of parts, one per configuration, and beside them what others published."""
    if drawing.stack is None:
        return
    valid = [each for each in statistics.configurations(record.rows) if each.valid]
    found = [each for each in valid if any(each.figures(name) for name in drawing.metrics)]
    for label, group, names in _pages(found):
        name, title = _called(drawing, label)
        picture = _figure(*stacks_size(drawing, group), title, record)
        paint_stacks(picture, drawing, group, [each.label(names) for each in group])
        yield name, picture


def _called(drawing: Drawing, label: str) -> tuple[str, str]:
    """The name and the title of one of several pictures."""
    if not label:
        return drawing.name, drawing.title
    return f"{drawing.name}-{file_word(label)}", f"{drawing.title} · {label}"


def _pages(
    found: Sequence[Configuration],
) -> Iterator[tuple[str, Sequence[Configuration], list[str]]]:
    """What goes into one picture, with what all of it has in common and what it differs in."""
    names = list(statistics.varying(found))
    if len(found) <= _MOST_BARS:
        if found:
            yield "", found, names
        return
    fastest = _fastest(found, names)
    rest = [name for name in names if name != fastest]
    groups: dict[str, list[Configuration]] = {}
    for each in found:
        groups.setdefault(each.label(rest), []).append(each)
    for label, group in groups.items():
        yield label, group, [fastest]


def _fastest(found: Sequence[Configuration], names: Sequence[str]) -> str:
    """The parameter that changes most often from one configuration to the next."""
    return max(
        names,
        key=lambda name: sum(
            a.parameters.get(name) != b.parameters.get(name) for a, b in itertools.pairwise(found)
        ),
    )


def _ladders(drawing: Drawing, record: Record, floors: Floors) -> Iterator[tuple[str, Figure]]:
    """A waterfall per combination of the parameters that the ladder is not over."""
    for climb in climbs_of(drawing.ladder, record, floors) if drawing.ladder else ():
        name, title = _called(drawing, climb.label)
        picture = _figure(*ladder_size(climb), title, record)
        paint_ladder(picture, climb)
        yield name, picture


def _write_ladder(
    drawing: Drawing, record: Record, folder: RunFolder, floors: Floors
) -> list[Path]:
    climbs = climbs_of(drawing.ladder, record, floors) if drawing.ladder else ()
    if not climbs:
        return []
    made = [folder.derived / f"{drawing.name}.{suffix}" for suffix in ("csv", "md")]
    made[0].write_text(ladder_csv(climbs), encoding="utf-8")
    made[1].write_text(ladder_markdown(drawing.title, climbs), encoding="utf-8")
    return made


def _confusions(
    drawing: Drawing, record: Record, folder: RunFolder
) -> Iterator[tuple[str, Figure]]:
    """A matrix per configuration: the counts of all its valid repeats together."""
    found = [each for each in statistics.configurations(record.rows) if each.valid]
    names = statistics.varying(found)
    for each in found[:_MOST_MATRICES]:
        matrices = [read_matrix(row, drawing.side_file, folder) for row in each.valid]
        present = [matrix for matrix in matrices if matrix is not None]
        if not present:
            continue
        name, title = _called(drawing, each.label(names))
        if len(present) > 1:
            title += f" · {len(present)} repeats"
        matrix = added(present)
        picture = _figure(*matrix_size(matrix), title, record)
        paint_matrix(picture, matrix, drawing)
        yield name, picture


def _heats(drawing: Drawing, record: Record, folder: RunFolder) -> _Pictures:
    for name, title, heat in _of_side_files(drawing, record, folder, read_heat):
        picture = _figure(*heat_size(heat), title, record)
        paint_heat(picture, heat, drawing)
        yield name, picture


def _maps(drawing: Drawing, record: Record, folder: RunFolder) -> _Pictures:
    for name, title, maps in _of_side_files(drawing, record, folder, read_maps):
        picture = _figure(*maps_size(maps), title, record)
        paint_maps(picture, maps)
        yield name, picture


_Content = TypeVar("_Content")


def _of_side_files(
    drawing: Drawing,
    record: Record,
    folder: RunFolder,
    read: Callable[[Row, str, RunFolder], _Content | None],
) -> Iterator[tuple[str, str, _Content]]:
    """A picture's name, title and content per configuration, of its first valid repeat that has the
    side file."""
    found = [each for each in statistics.configurations(record.rows) if each.valid]
    names = statistics.varying(found)
    for each in found[:_MOST_MATRICES]:
        contents = (read(row, drawing.side_file, folder) for row in each.valid)
        content = next((one for one in contents if one is not None), None)
        if content is not None:
            yield *_called(drawing, each.label(names)), content


def _anytimes(drawing: Drawing, record: Record, folder: RunFolder) -> Iterator[tuple[str, Figure]]:
    for label, size, paint in anytime_pictures(record, folder):
        name, title = _called(drawing, label)
        picture = _figure(*size, title, record)
        paint(picture)
        yield name, picture
