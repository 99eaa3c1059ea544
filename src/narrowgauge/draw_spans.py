"""The picture of a row's trace: what ran when, on which lane, and how much of the time it idled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge import statistics
from narrowgauge.draw_style import heading
from narrowgauge.side_files import side_file
from narrowgauge.store import RunFolder
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record
from narrowgauge_contract.traces import TRACE_FILE, Trace, TraceEvent, read_trace

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["Lane", "gap_share", "has_traces", "lanes_of", "span_pictures"]

#: The most pictures of one run, the most nested levels of one lane, and names with a colour.
_MOST_PICTURES = 8
_DEEPEST = 3
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C00")
_OTHERS = "#9A9A9A"
#: Shares of the width: what is too narrow to be seen alone, and too narrow for a name.
_HAIR = 1 / 1500
_LEGIBLE = 0.03
_MOST_LABELS = 24
_LONGEST_NAME = 60
_GPU_KINDS = ("kernel", "copy")


@dataclass(frozen=True)
class Lane:
    """One lane: events that nest or follow each other, and the share of the time it was busy."""

    name: str
    kind: str
    events: tuple[TraceEvent, ...]
    busy: float


@dataclass(frozen=True)
class _Bar:
    """A stretch of one colour. `name` is empty where many short events are drawn as one."""

    start: float
    end: float
    dearest: str
    name: str


def lanes_of(trace: Trace) -> tuple[Lane, ...]:
    """The lanes of a trace, in their order."""
    found: dict[str, list[TraceEvent]] = {}
    for event in trace.events:
        found.setdefault(event.lane, []).append(event)
    return tuple(
        Lane(name, events[0].kind, tuple(events), _covered(events, trace.seconds))
        for name, events in found.items()
    )


def gap_share(trace: Trace) -> tuple[str, float]:
    """What idled, and for which share of the time: the GPU, where anything ran on one."""
    gpu = [event for event in trace.events if event.kind in _GPU_KINDS]
    if gpu:
        return "GPU", 1.0 - _covered(gpu, trace.seconds)
    ops = [event for event in trace.events if event.kind == "cpu-op"] or list(trace.events)
    return "CPU", 1.0 - _covered(ops, trace.seconds)


def has_traces(record: Record) -> bool:
    """Whether any row left a trace."""
    return _traced(record.rows) is not None


def span_pictures(record: Record, folder: RunFolder) -> Iterator[tuple[str, Figure]]:
    """A picture of the first row with a trace of each configuration, invalid ones too.

    Raises DamagedRecordError where a trace is not what was recorded.
    """
    configurations = statistics.configurations(record.rows)
    names = statistics.varying(configurations)
    traced = [(each, row) for each in configurations if (row := _traced(each.rows)) is not None]
    for each, row in traced[:_MOST_PICTURES]:
        path = side_file(row, TRACE_FILE, folder)
        assert path is not None
        name = "spans" if len(traced) == 1 else f"spans-row-{row.index}"
        words = [record.experiment, each.label(names), "what ran when"]
        if "profiled" in row.facts:
            words.append("timings include the profiler")
        yield name, _picture(read_trace(path), " · ".join(filter(None, words)))


def _traced(rows: Sequence[Row]) -> Row | None:
    has = (r for r in rows if any(s.path.endswith(f"/{TRACE_FILE}") for s in r.side_files))
    return next(has, None)


def _picture(trace: Trace, title: str) -> Figure:
    from matplotlib.figure import Figure

    lanes = lanes_of(trace)
    levels = [_levels(lane.events) for lane in lanes]
    heights = [max(len(each), 1) for each in levels]
    picture = Figure(figsize=(13, 1.9 + 0.34 * sum(heights) + 0.12 * len(heights)))
    heading(picture, title)
    panel = picture.subplots()
    colours = _colours_of(trace)
    top, ticks = 0.0, []
    for level, height in zip(levels, heights, strict=True):
        for depth, events in enumerate(level):
            _draw_level(panel, top + depth, events, trace.seconds, colours)
        ticks.append(top + height / 2)
        top += height + 0.35
    panel.set_yticks(ticks, [lane.name for lane in lanes])
    panel.set_ylim(top, -0.2)
    panel.set_xlim(0, trace.seconds * 1e3)
    panel.set_xlabel("ms")
    panel.grid(visible=False, axis="y")
    for lane, tick in zip(lanes, ticks, strict=True):
        panel.annotate(f"busy {lane.busy:.1%}", (1.005, tick), va="center", fontsize=8,
                       xycoords=("axes fraction", "data"))  # fmt: skip
    idle, share = gap_share(trace)
    note = f"{idle} idle {share:.1%} of {trace.seconds * 1e3:,.1f} ms"
    panel.set_title(note + (f"; {trace.cut}" if trace.cut else ""), fontsize=9, loc="left")
    _legend(picture, colours)
    return picture


def _draw_level(
    panel: Axes, top: float, events: Sequence[TraceEvent], width: float, colours: dict[str, str]
) -> None:
    bars = _bars(events, width)
    if not bars:
        return
    ranges = [(bar.start * 1e3, max(bar.end - bar.start, width * _HAIR) * 1e3) for bar in bars]
    faces = [colours.get(bar.dearest, _OTHERS) for bar in bars]
    panel.broken_barh(ranges, (top + 0.06, 0.88), facecolors=faces, linewidth=0)
    named = [bar for bar in bars if bar.name and bar.end - bar.start > _LEGIBLE * width]
    for bar in sorted(named, key=lambda bar: bar.start - bar.end)[:_MOST_LABELS]:
        room = int((bar.end - bar.start) / width * 200)
        panel.text(
            (bar.start + bar.end) / 2 * 1e3, top + 0.5, _short(bar.name, room), ha="center",
            va="center", fontsize=7, color="white", clip_on=True,
        )  # fmt: skip


def _levels(events: Sequence[TraceEvent]) -> list[list[TraceEvent]]:
    """The events of a lane by how deep they nest, the outermost first; deeper ones are left out."""
    levels: list[list[TraceEvent]] = []
    open_ends: list[float] = []
    for event in sorted(events, key=lambda event: (event.start, -event.seconds)):
        while open_ends and open_ends[-1] <= event.start + 1e-9:
            open_ends.pop()
        depth = len(open_ends)
        open_ends.append(event.end)
        if depth >= _DEEPEST:
            continue
        while len(levels) <= depth:
            levels.append([])
        levels[depth].append(event)
    return levels


def _bars(events: Sequence[TraceEvent], width: float) -> list[_Bar]:
    """One bar per event, and one for neighbours that would be hairs beside each other."""
    hair = width * _HAIR
    bars: list[_Bar] = []
    group: list[TraceEvent] = []
    for event in events:
        if event.start >= width:
            break
        close = group and event.start - group[-1].end < hair
        if group and not (close and event.seconds < hair and group[-1].seconds < hair):
            bars.append(_bar(group, width))
            group = []
        group.append(event)
    return [*bars, _bar(group, width)] if group else bars


def _bar(group: Sequence[TraceEvent], width: float) -> _Bar:
    spent: dict[str, float] = {}
    for event in group:
        spent[event.name] = spent.get(event.name, 0.0) + event.seconds
    dearest = max(spent, key=lambda name: spent[name])
    name = dearest if len(group) == 1 else ""
    return _Bar(max(group[0].start, 0.0), min(group[-1].end, width), dearest, name)


def _colours_of(trace: Trace) -> dict[str, str]:
    """A colour for the names that took most time, wherever they ran."""
    return dict(zip(_dearest(trace), itertools.cycle(_COLOURS), strict=False))


def _dearest(trace: Trace) -> list[str]:
    spent: dict[str, float] = {}
    for event in trace.events:
        spent[event.name] = spent.get(event.name, 0.0) + event.seconds
    return sorted(spent, key=lambda name: (-spent[name], name))[: len(_COLOURS)]


def _legend(picture: Figure, colours: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    entries = [
        Patch(color=colour, label=_short(name, _LONGEST_NAME)) for name, colour in colours.items()
    ]
    entries.append(Patch(color=_OTHERS, label="others"))
    picture.legend(handles=entries, loc="outside lower left", ncols=4, fontsize=7)


def _covered(events: Sequence[TraceEvent], seconds: float) -> float:
    """The share of the time from 0 to `seconds` in which at least one of the events went on."""
    busy, reached = 0.0, 0.0
    for event in sorted(events, key=lambda event: event.start):
        start, end = max(event.start, reached), min(event.end, seconds)
        if end > start:
            busy += end - start
            reached = end
    return busy / seconds if seconds > 0 else 0.0


def _short(name: str, room: int) -> str:
    """A kernel's name without its template and namespaces, in so many characters."""
    plain = name.removeprefix("void ").partition("<")[0].partition("(")[0] or name
    if plain != name or len(plain) > room:
        plain = plain.rpartition("::")[2] or plain
    room = min(room, _LONGEST_NAME)
    return plain if len(plain) <= room else plain[: max(room - 1, 1)] + "…"
