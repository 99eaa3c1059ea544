"""What is said below a run's figures: the experiment's own closing lines, what its comparisons can
see, and which medians stand for two modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from narrowgauge import statistics
from narrowgauge.ladder import climbs_of, closing_words, ladder_json, ratio_words
from narrowgauge.noise import (
    EXPERIMENT,
    MEANING,
    UNKNOWN,
    Detectable,
    Floors,
    floor_of,
    percent,
    trials_of,
)
from narrowgauge.statistics import Modes
from narrowgauge.units import scale_of
from narrowgauge.view import RunView, unit_of
from narrowgauge_contract.codec import encode
from narrowgauge_contract.figures import is_time
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record
from narrowgauge_contract.summary import Line, Summary, summary_blocks

__all__ = ["remarks", "remarks_json", "two_modes"]

_SIDES = ("latency_second", "latency_first")
#: Within which both sides of A against A are to be equivalent, as its claim has it.
_MARGIN = 0.01
#: More rows with two modes than these say the same thing again.
_MOST_ROWS = 6


def remarks(view: RunView, floors: Floors) -> Iterator[str]:
    """Line by line; an empty line between the parts."""
    parts = [list(_closing(view, floors)), list(_ladders(view, floors)), list(_noise(view.record))]
    for part in filter(None, parts):
        yield ""
        yield from part


def remarks_json(view: RunView, floors: Floors) -> dict[str, Any]:
    """The same for scripts."""
    record, spec = view.record, view.spec
    if record is None:
        return {}
    closing = spec.closing if spec is not None else None
    ladders = [each.ladder for each in (spec.drawings if spec else ()) if each.ladder is not None]
    floor = floor_of(record) if record.experiment == EXPERIMENT else None
    return {
        "closing": [
            {
                "label": block.label,
                "heading": block.heading,
                "lines": [
                    {**encode(line), "detectable": encode(_beside(line, record, closing, floors))}
                    for line in (*block.each, *block.lines)
                ],
            }
            for block in (summary_blocks(closing, record.rows) if closing else ())
        ],
        "ladders": [
            each
            for ladder in ladders
            for each in ladder_json(climbs_of(ladder, record, floors))
        ],
        "trials": encode(trials_of(record) if record.experiment == EXPERIMENT else ()),
        "noise_floor": encode(floor) if floor is not None else None,
        "two_modes": [
            {"row": row.index, "metric": name, **encode(modes)}
            for row, name, modes in _modes(view)
        ],
    }  # fmt: skip


def _closing(view: RunView, floors: Floors) -> Iterator[str]:
    """The lines of `[summary]`; a ratio that this comparison could not tell from 1 is marked."""
    record, spec = view.record, view.spec
    closing = spec.closing if spec is not None else None
    if record is None or closing is None:
        return
    seen: list[Detectable] = []
    for block in summary_blocks(closing, record.rows):
        yield from filter(None, [block.label])
        yield from (line.text for line in block.each)
        yield from filter(None, [block.heading])
        for line in block.lines:
            detectable = _beside(line, record, closing, floors)
            seen += [detectable] if detectable is not None else []
            within = detectable is not None and bool(detectable.within) and line.ratio != 1.0
            yield line.text + ("  [within the noise floor]" if within else "")
    known = {(d.least, d.run_id): d for d in seen if d.least is not None}
    for detectable in known.values():
        yield f"{MEANING}: {detectable.text.partition(',')[0]} ({_source(detectable)})"
    if any(detectable.reason == UNKNOWN for detectable in seen):
        yield UNKNOWN


def _source(detectable: Detectable) -> str:
    return f"{detectable.workload}, {detectable.run_id}"


def _beside(
    line: Line, record: Record, closing: Summary | None, floors: Floors
) -> Detectable | None:
    if closing is None or line.ratio is None:
        return None
    unit = unit_of(record, closing.metric)
    counts = (line.baseline_repeats, line.repeats)
    return floors.beside(line.ratio, unit, counts, [record])


def _ladders(view: RunView, floors: Floors) -> Iterator[str]:
    """Each rung with its ratio; the picture and the tables are among the derived files."""
    if view.record is None or view.spec is None:
        return
    for drawing in view.spec.drawings:
        climbs = climbs_of(drawing.ladder, view.record, floors) if drawing.ladder else ()
        for climb in climbs:
            yield " · ".join(filter(None, (drawing.title, climb.label)))
            for rung in climb.rungs:
                beside = f"  detectable {rung.detectable.text}" if rung.detectable else ""
                beside = beside if rung.detectable and rung.detectable.text else ""
                words = f"×{ratio_words(rung.speedup)} {rung.verdict}{beside}"
                yield f"  {rung.name}: {rung.missing or (words if rung.speedup else 'first')}"
            whole = climb.detectable.text
            beside = f"  detectable {whole}" if whole else ""
            yield f"  end to end: ×{ratio_words(climb.end_to_end)}{beside}"
            yield from closing_words(climb)


def _noise(record: Record | None) -> Iterator[str]:
    """Of a run of noise-floor: how often it was wrong, and what it says others can see."""
    if record is None or record.experiment != EXPERIMENT:
        return
    for trials in trials_of(record):
        if trials.planted:
            words = f"planted {trials.planted:g} % found in {trials.slower} of {trials.total}"
            yield f"{trials.label}: {words} ({percent(trials.slower_rate)})"
        else:
            words = f"false alarms in {trials.alarms} of {trials.total} comparisons"
            words += f" ({percent(trials.alarm_rate)})"
            yield f"{trials.label or 'A against A'}: {words}"
    yield from _sides(record)
    floor = floor_of(record)
    if floor is None:
        yield "too few processes to say what a comparison can see: --profile short has enough"
        return
    for label, figures in floor.workloads:
        count = len(figures)
        effect = statistics.least_detectable_effect(figures, count, count)
        least = percent(effect.least) if effect.least is not None else f"unknown: {effect.reason}"
        yield f"{label}: detectable {least} between {count} and {count} processes"
    yield MEANING


def _sides(record: Record) -> Iterator[str]:
    """Whether A takes as long as A: per workload over all samples, and over all workloads."""
    equal = [row for row in record.rows if not row.parameters.get("planted")]
    found = statistics.configurations(equal)
    names = statistics.varying(found)
    figures = []
    for each in found:
        rows = [row for row in each.valid if all(map(row.metric, _SIDES))]
        seconds, firsts = ([m.values for r in rows if (m := r.metric(n))] for n in _SIDES)
        ratio = statistics.hierarchical_log_ratio_interval(seconds, firsts, paired=True)
        middles = each.figures(_SIDES[0]), each.figures(_SIDES[1])
        same = statistics.equivalent(*middles, _MARGIN, paired=True).equivalent
        figures.append(middles)
        verdict = {True: "", False: " not", None: " not known to be"}[same]
        label = each.label(names) or "A against A"
        words = f"second side / first {ratio_words(ratio)}"
        yield f"{label}: {words},{verdict} equivalent within {percent(_MARGIN)}"
    mean = statistics.geometric_mean_interval(figures, paired=True)
    if mean.interval is not None:
        yield f"second side / first over all workloads {ratio_words(mean)}"


def two_modes(view: RunView) -> Iterator[str]:
    """A warning per row whose headline figure is the median of two modes."""
    found = list(_modes(view))
    record = view.record
    for row, name, modes in found[:_MOST_ROWS]:
        unit = unit_of(record, name) if record is not None else ""
        scale = scale_of(modes.high, unit)
        low, high = scale.number(modes.low), scale.text(modes.high)
        upper = round(100 * modes.share)
        yield (
            f"{name} of row {row.index} has two modes: {100 - upper} % near {low}, {upper} % near"
            f" {high} (dip test, {_chance(modes.p)}); one median does not stand for both"
        )
    if len(found) > _MOST_ROWS:
        yield f"and {len(found) - _MOST_ROWS} more figures have two modes"


def _chance(p: float) -> str:
    """The table of the dip ends at 0.001."""
    return "p < 0.001" if p < 0.0011 else f"p = {p:.2g}"


def _modes(view: RunView) -> Iterator[tuple[Row, str, Modes]]:
    for row in view.record.valid_rows() if view.record is not None else ():
        for name in view.headline:
            metric = row.metric(name)
            modes = None
            # The ticks of a clock are told from modes; the comb that their ratios make is not.
            if metric is not None and not metric.index and is_time(metric.unit):
                modes = statistics.modes_of(metric.values)
            if modes is not None:
                yield row, name, modes
