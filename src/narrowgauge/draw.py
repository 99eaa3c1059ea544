"""Pictures of a run, drawn from its record and side files alone, and always the same.

Which pictures, the experiment says (`[[draw]]` in experiment.toml); how, is decided here once.
Only what stands beside a ratio comes from elsewhere: the noise floor, from the newest run of that.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from narrowgauge import statistics
from narrowgauge.draw_anytime import anytime_pictures
from narrowgauge.draw_heat import heat_size, paint_heat, read_heat
from narrowgauge.draw_ladder import ladder_size, paint_ladder
from narrowgauge.draw_maps import maps_size, paint_maps, read_maps
from narrowgauge.draw_spans import has_traces, span_pictures
from narrowgauge.draw_stacked import paint_stacks, stacks_size
from narrowgauge.draw_style import COLOURS, write_pictures
from narrowgauge.ladder import climbs_of, ladder_csv, ladder_markdown
from narrowgauge.noise import Floors
from narrowgauge.side_files import side_file
from narrowgauge.statistics import Configuration
from narrowgauge.store import RunFolder
from narrowgauge.tables import write_tables
from narrowgauge.units import number
from narrowgauge_contract.drawing import Drawing
from narrowgauge_contract.errors import DamagedRecordError
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record
from narrowgauge_contract.spec import parse_spec

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_run"]

#: One matrix per configuration; more than these are no picture any more.
_MOST_MATRICES = 8
#: More than these go into several pictures.
_MOST_BARS = 24


def draw_run(folder: RunFolder, floors: Floors) -> list[Path]:
    """Draw every picture and table of a recorded run into its `derived`; the files made.

    Raises DamagedRecordError where the record or a side file is damaged: after everything else is
    drawn, and with nothing drawn from what is damaged.
    """
    record = folder.record()
    folder.derived.mkdir(exist_ok=True)
    made = write_tables(record, folder.derived, floors)
    problems: list[DamagedRecordError] = []
    pictures = [span_pictures(record, folder)] if has_traces(record) else []
    if record.valid_rows():
        drawings = parse_spec(record.spec, where=f"the record of {record.run_id}").drawings
        made += [path for each in drawings for path in _write_ladder(each, record, folder, floors)]
        pictures += [_paint(drawing, record, folder, floors) for drawing in drawings]
    for each in pictures:
        try:
            made += write_pictures(each, folder.derived)
        except DamagedRecordError as problem:
            problems.append(problem)
    if problems:
        raise problems[0]
    return made


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
    picture.suptitle(title + note, fontsize=12, fontweight="bold", x=0.02, ha="left")
    return picture


def _curves(drawing: Drawing, record: Record) -> Iterator[tuple[str, Figure]]:
    """A panel per metric, a colour per configuration, a thin line per repeat, a thick median."""
    from matplotlib.ticker import MaxNLocator

    valid = [each for each in statistics.configurations(record.rows) if each.valid]
    found = [each for each in valid if drawing.shows(each.parameters)]
    rows = [row for each in found for row in each.valid]
    metrics = [name for name in drawing.metrics if any(row.metric(name) for row in rows)]
    if not metrics:
        return
    picture = _figure(1.5 + 4.2 * len(metrics), 4.2, drawing.title, record)
    panels = picture.subplots(1, len(metrics), squeeze=False)[0]
    names = statistics.varying(found)
    for panel, metric in zip(panels, metrics, strict=True):
        for each, colour in zip(found, itertools.cycle(COLOURS)):
            _curve(panel, each, metric, colour, each.label(names))
        unit = _unit(record, metric)
        panel.set_ylabel(drawing.y or _axis(metric, unit))
        if len(metrics) > 1:
            panel.set_title(_axis(metric, ""), fontsize=10, loc="left")
        panel.set_xlabel(drawing.x or _index(record, metric))
        panel.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        if all(len(line.get_xdata()) < 2 for line in panel.get_lines()):
            panel.set_xlim(0.5, 1.5)
    if names:
        picture.legend(*panels[0].get_legend_handles_labels(), loc="outside right center")
    yield drawing.name, picture


def _curve(panel: Axes, found: Configuration, metric: str, colour: str, label: str) -> None:
    series = [m.values for row in found.valid if (m := row.metric(metric)) is not None and m.values]
    if not series:
        return
    alone = len(series) == 1
    for values in series:
        panel.plot(range(1, len(values) + 1), values, color=colour, linewidth=0.8, alpha=0.45,
                   marker="o" if alone and len(values) < 3 else "", markersize=3)  # fmt: skip
    longest = max(len(values) for values in series)
    middle = [
        (statistics.summarize([v[i] for v in series if i < len(v)]) or _NOTHING).median
        for i in range(longest)
    ]
    marker = "o" if longest <= 12 else ""
    panel.plot(range(1, longest + 1), middle, color=colour, linewidth=2, label=label,
               marker=marker, markersize=4)  # fmt: skip


_NOTHING = statistics.Summary(0, math.nan, math.nan, math.nan, math.nan, math.nan, None)


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
        yield name, _bar_picture(drawing, record, group, metrics, names, title)


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
    return f"{drawing.name}-{_file_word(label)}", f"{drawing.title} · {label}"


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


def _bar_picture(
    drawing: Drawing,
    record: Record,
    found: Sequence[Configuration],
    metrics: Sequence[str],
    names: Sequence[str],
    title: str,
) -> Figure:
    labels = [each.label(names).replace(", ", "\n") or record.experiment for each in found]
    lines = max(label.count("\n") + 1 for label in labels)
    height = 1.4 + max(0.5, 0.1 + 0.18 * lines) * len(found)
    picture = _figure(2.4 + 4.4 * len(metrics), max(height, 2.4), title, record)
    panels = picture.subplots(1, len(metrics), squeeze=False, sharey=True)[0]
    for panel, metric in zip(panels, metrics, strict=True):
        unit = _unit(record, metric)
        for place, each in enumerate(found):
            _bar(panel, place, each.figures(metric), COLOURS[place % len(COLOURS)], unit)
        panel.set_yticks(range(len(found)), labels)
        panel.set_ylim(len(found) - 0.4, -0.6)
        panel.set_xlabel(drawing.y or _axis(metric, unit))
        if len(metrics) > 1:
            panel.set_title(_axis(metric, ""), fontsize=10, loc="left")
        panel.grid(visible=False, axis="y")
        panel.margins(x=0.15)
    return picture


def _bar(panel: Axes, place: int, figures: Sequence[float], colour: str, unit: str) -> None:
    summary = statistics.summarize(figures)
    if summary is None or not math.isfinite(summary.median):
        panel.text(0, place, " no figure", va="center")
        return
    panel.barh(place, summary.median, height=0.6, color=colour, alpha=0.75)
    panel.plot(figures, [place] * len(figures), "o", color="black", markersize=3, alpha=0.7)
    interval = summary.interval
    if interval is not None:
        panel.plot([interval.low, interval.high], [place, place], color="black", linewidth=1.2)
        for edge in (interval.low, interval.high):
            panel.plot([edge, edge], [place - 0.14, place + 0.14], color="black", linewidth=1.2)
    panel.annotate(number(summary.median, unit), (max(summary.high, 0.0), place), xytext=(6, 0),
                   textcoords="offset points", va="center")  # fmt: skip


def _ladders(drawing: Drawing, record: Record, floors: Floors) -> Iterator[tuple[str, Figure]]:
    """A waterfall per combination of the parameters that the ladder is not over."""
    for climb in climbs_of(drawing.ladder, record, floors) if drawing.ladder else ():
        name = f"{drawing.name}-{_file_word(climb.label)}" if climb.label else drawing.name
        title = " · ".join(filter(None, (drawing.title, climb.label)))
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
        matrices = [_matrix(row, drawing.side_file, folder) for row in each.valid]
        present = [matrix for matrix in matrices if matrix is not None]
        if not present:
            continue
        labels = present[0]["labels"]
        size = range(len(labels))
        counts = [[sum(m["counts"][i][j] for m in present) for j in size] for i in size]
        label = each.label(names)
        name = f"{drawing.name}-{_file_word(label)}" if label else drawing.name
        repeats = f"{len(present)} repeats" if len(present) > 1 else ""
        title = " · ".join(filter(None, (drawing.title, label, repeats)))
        yield name, _heat_map(title, labels, counts, drawing, record)


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


def _matrix(row: Row, name: str, folder: RunFolder) -> dict[str, Any] | None:
    """A confusion matrix, checked; None where the row has none."""
    path = side_file(row, name, folder)
    if path is None:
        return None
    try:
        matrix: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        size = len(matrix["labels"])
        square = [len(line) for line in matrix["counts"]] == [size] * size
    except (ValueError, KeyError, TypeError):
        square = False
    if not square:
        raise DamagedRecordError(f"the side file {path} holds no square matrix")
    return matrix


def _heat_map(
    title: str, labels: list[str], counts: list[list[int]], drawing: Drawing, record: Record
) -> Figure:
    """Colour by the share of the true class, so that classes of unlike size compare."""
    size = len(labels)
    picture = _figure(2.2 + 0.55 * size, 1.8 + 0.5 * size, title, record)
    panel = picture.subplots()
    shares = [[count / max(sum(line), 1) for count in line] for line in counts]
    # A root makes the rare mistakes visible beside a diagonal near 1.
    image = panel.imshow([[math.sqrt(s) for s in line] for line in shares], cmap="Blues",
                         vmin=0.0, vmax=1.0)  # fmt: skip
    for i, line in enumerate(counts):
        for j, count in enumerate(line):
            if count:
                dark = shares[i][j] > 0.35
                panel.text(j, i, str(count), ha="center", va="center", fontsize=8,
                           color="white" if dark else "#202020")  # fmt: skip
    panel.set_xticks(range(size), labels, rotation=0 if max(map(len, labels)) < 4 else 45,
                     ha="center" if max(map(len, labels)) < 4 else "right")  # fmt: skip
    panel.set_yticks(range(size), labels)
    panel.set_xlabel(drawing.x or "predicted")
    panel.set_ylabel(drawing.y or "true")
    panel.grid(visible=False)
    panel.spines[:].set_visible(False)
    bar = picture.colorbar(image, ax=panel, shrink=0.8, label="share of the true class")
    ticks = (0.0, 0.01, 0.1, 0.25, 0.5, 1.0)
    bar.set_ticks([math.sqrt(t) for t in ticks], labels=[f"{t:g}" for t in ticks])
    return picture


def _unit(record: Record, metric: str) -> str:
    found = next((m for row in record.valid_rows() if (m := row.metric(metric))), None)
    return found.unit if found else ""


def _index(record: Record, metric: str) -> str:
    found = next((m for row in record.valid_rows() if (m := row.metric(metric))), None)
    return (found.index if found else "") or "sample"


def _axis(metric: str, unit: str) -> str:
    words = metric.replace("_", " ")
    return f"{words} ({unit})" if unit and unit != "1" else words


def _file_word(label: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", label.replace("=", "-")).strip("-")
