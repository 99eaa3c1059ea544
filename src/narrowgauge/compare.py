"""`narrowgauge compare RUN RUN`: the same configurations in two runs, side by side.

Two runs are always compared; their samples are pooled into one statistic only where everything in
`contract.agreement.MUST_AGREE` agrees, and otherwise the facts that differ are named.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge import statistics
from narrowgauge.errors import UsageError
from narrowgauge.noise import MEANING, UNKNOWN, Detectable, Floors
from narrowgauge.statistics import Configuration, Interval, Summary, stated
from narrowgauge.units import scale_of
from narrowgauge.view import metric_names, unit_of, widen
from narrowgauge_contract.agreement import disagreements
from narrowgauge_contract.codec import encode
from narrowgauge_contract.record import Record

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Comparison", "Pair", "compare", "comparison_json", "print_comparison"]


@dataclass(frozen=True)
class Pair:
    """One metric of one configuration in both runs. `ratio` is right / left, of the medians.

    `ratio_interval` is None where `no_interval` says why; `pooled` where pooling is not allowed.
    """

    label: str
    metric: str
    unit: str
    left: Summary
    right: Summary
    ratio: float
    ratio_interval: Interval | None
    no_interval: str
    detectable: Detectable
    pooled: Summary | None


@dataclass(frozen=True)
class Comparison:
    """`differences` says why nothing is pooled; `only_left` and `only_right` have no partner."""

    left: str
    right: str
    differences: tuple[str, ...]
    pairs: tuple[Pair, ...]
    only_left: tuple[str, ...]
    only_right: tuple[str, ...]
    dropped: int


def compare(left: Record, right: Record, floors: Floors) -> Comparison:
    """Pair the configurations of two records by their parameters.

    Raises UsageError where the records are of different experiments: then nothing is the same.
    """
    if left.experiment != right.experiment:
        raise UsageError(
            f"{left.run_id} and {right.run_id} cannot be compared",
            why=f"one is of {left.experiment}, the other of {right.experiment}",
        )
    ignored = _run_level_differences(left, right)
    lefts, rights = (_by_key(record, ignored) for record in (left, right))
    differences = tuple(_named_apart(left, right))
    every = [*lefts.values(), *rights.values()]
    names = tuple(name for name in statistics.varying(every) if name not in ignored)
    pairs = [
        pair
        for key in lefts
        if key in rights
        for pair in _pairs(
            lefts[key], rights[key], (left, right), floors, names, pool=not differences
        )
    ]
    return Comparison(
        left=left.run_id,
        right=right.run_id,
        differences=differences,
        pairs=tuple(pairs),
        only_left=tuple(lefts[key].label(names) for key in lefts if key not in rights),
        only_right=tuple(rights[key].label(names) for key in rights if key not in lefts),
        dropped=sum(len(r.rows) - len(r.valid_rows()) for r in (left, right)),
    )


def _named_apart(left: Record, right: Record) -> Iterator[str]:
    """The disagreements, with the parameters one by one: all of them at once say nothing."""
    for line in disagreements(left, right):
        if not line.startswith("parameters:"):
            yield line
            continue
        for name in sorted(left.parameters.keys() | right.parameters.keys()):
            one, other = (r.parameters.get(name, "none") for r in (left, right))
            if one != other:
                yield f"parameter {name}: {stated(one)} / {stated(other)}"


def _run_level_differences(left: Record, right: Record) -> tuple[str, ...]:
    """Parameters that have one value in each run, and not the same: what is being compared."""
    names = set(left.parameters) & set(right.parameters)
    return tuple(
        name
        for name in sorted(names)
        if not isinstance(left.parameters[name], list)
        and not isinstance(right.parameters[name], list)
        and left.parameters[name] != right.parameters[name]
    )


def _by_key(record: Record, ignored: Sequence[str]) -> dict[tuple[str, ...], Configuration]:
    return {
        tuple(f"{n}={v!r}" for n, v in sorted(each.parameters.items()) if n not in ignored): each
        for each in statistics.configurations(record.rows)
    }


def _pairs(
    left: Configuration,
    right: Configuration,
    records: tuple[Record, Record],
    floors: Floors,
    names: tuple[str, ...],
    *,
    pool: bool,
) -> list[Pair]:
    pairs = []
    for metric in metric_names(records[0]):
        unit = unit_of(records[0], metric)
        one, other = left.figures(metric), right.figures(metric)
        first, second = statistics.summarize(one), statistics.summarize(other)
        if first is None or second is None or unit_of(records[1], metric) != unit:
            continue
        ratio = second.median / first.median if first.median else math.nan
        # Not paired: repeat 3 of one run and of another share their number, and nothing else.
        found = statistics.log_ratio_interval(other, one)
        pairs.append(
            Pair(
                label=left.label(names),
                metric=metric,
                unit=unit,
                left=first,
                right=second,
                ratio=ratio,
                ratio_interval=found.ratio_interval,
                no_interval=found.reason,
                detectable=floors.beside(ratio, unit, (second.n, first.n), records),
                pooled=statistics.summarize((*one, *other)) if pool else None,
            )
        )
    return pairs


def comparison_json(found: Comparison) -> Any:
    """The comparison for scripts."""
    return encode(found)


def print_comparison(found: Comparison, console: Console) -> None:
    """Print both runs side by side, with the ratio of right to left."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    widen(console)
    console.print(Text.assemble(("left   ", "bold"), found.left))
    console.print(Text.assemble(("right  ", "bold"), found.right))
    for difference in found.differences:
        console.print(Text(f"≠ {difference}", style="yellow"))
    if found.differences:
        console.print(Text("not pooled, since these differ (left / right)", style="yellow"))
    if found.dropped:
        console.print(Text(f"{found.dropped} INVALID rows are left out", style="red"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    pooled = any(pair.pooled for pair in found.pairs)
    columns = ["metric", "left", "right", "right / left", "detectable"]
    widest = max((len(pair.metric) for pair in found.pairs), default=0)
    for name in (*columns, *(["pooled"] if pooled else [])):
        table.add_column(name, overflow="fold", min_width=widest if name == "metric" else None)
    for label, pairs in itertools.groupby(found.pairs, key=lambda pair: pair.label):
        if label:
            table.add_row(Text(label, style="bold"))
        for pair in pairs:
            cells = [_cell(pair.left, pair.unit), _cell(pair.right, pair.unit), _ratio(pair)]
            cells += [pair.detectable.text.replace(", ", "\n") or "–"]
            cells += [_cell(pair.pooled, pair.unit)] if pair.pooled else []
            table.add_row(pair.metric, *cells)
        table.add_section()
    console.print(table if found.pairs else Text("no configuration is in both runs", style="red"))
    for line in _noise_lines(found.pairs):
        console.print(Text(line))
    for side, labels in (("left", found.only_left), ("right", found.only_right)):
        for label in labels:
            console.print(Text(f"only {side}: {label or 'all rows'}", style="yellow"))


def _noise_lines(pairs: Sequence[Pair]) -> Iterator[str]:
    """What `detectable` means and where it comes from, or why it is not known."""
    known = {p.detectable.run_id: p.detectable for p in pairs if p.detectable.least is not None}
    for run_id, detectable in known.items():
        yield f"{MEANING}; {detectable.workload}, {run_id}"
    if any(pair.detectable.reason == UNKNOWN for pair in pairs):
        yield UNKNOWN
    for reason in dict.fromkeys(pair.no_interval for pair in pairs if pair.no_interval):
        yield f"no interval: {reason}"


def _cell(summary: Summary, unit: str) -> str:
    """The median, and under it how far the repeats lie apart."""
    scale = scale_of(summary.median, unit)
    figure = scale.text(summary.median)
    if summary.n == 1:
        return figure
    return f"{figure}\n{scale.number(summary.low)}–{scale.number(summary.high)}, n={summary.n}"


def _ratio(pair: Pair) -> str:
    interval = pair.ratio_interval
    if interval is None:
        return f"{pair.ratio:.4g}"
    return f"{pair.ratio:.4g}\n{interval.low:.4g}–{interval.high:.4g} (95 %)"
