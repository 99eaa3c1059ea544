"""An attribution ladder: which step of a way from slow to fast brought how much, from a record.

A rung's ratio is that to the rung before it, so the product of all is last to first rung, but for
noise: each is the median ratio of the repeats' pairs, and not the ratio of two medians. The ratio
end to end comes from rows of its own; how much of its logarithm the rungs explain is then a check
of the whole: what was measured twice came out the same, or did not.
"""

from __future__ import annotations

import csv
import dataclasses
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge import statistics
from narrowgauge.noise import MEANING, UNKNOWN, Detectable, Floors, percent
from narrowgauge.statistics import Configuration, Interval, LogRatio, word
from narrowgauge.units import format_value
from narrowgauge_contract.codec import encode
from narrowgauge_contract.drawing import Ladder
from narrowgauge_contract.figures import is_rate
from narrowgauge_contract.outcome import Row
from narrowgauge_contract.record import Record

__all__ = ["Climb", "Rung", "climbs_of", "ladder_csv", "ladder_json", "ladder_markdown"]


@dataclass(frozen=True)
class Rung:
    """One step. `speedup` is how many times as fast as the rung before, None for the first.

    `repeats`: valid rows; without any there is no `figure`, and `missing` says why. The next rung
    then refers to the one before.
    """

    value: str
    name: str
    figure: float | None
    repeats: int
    speedup: LogRatio | None
    detectable: Detectable | None
    missing: str = ""

    @property
    def verdict(self) -> str:
        """`null` where the interval holds 1; empty where there is nothing to judge."""
        if self.speedup is None:
            return ""
        holds = self.speedup.holds_one
        if holds is None:
            return "no interval"
        if holds:
            return "null"
        return "faster" if (self.speedup.value or 0.0) > 0 else "slower"


@dataclass(frozen=True)
class Climb:
    """One ladder of one combination of the other parameters; `label` says which.

    `explained` is the share of `end_to_end`'s logarithm that the rungs' product has; None where
    `unexplained` says why.
    """

    label: str
    metric: str
    unit: str
    rungs: tuple[Rung, ...]
    end_to_end: LogRatio
    ends: tuple[str, str]
    detectable: Detectable
    explained: float | None
    unexplained: str = ""

    @property
    def product(self) -> float | None:
        """The sum of the rungs' logarithms; None where no rung has one."""
        steps = [rung.speedup for rung in self.rungs if rung.speedup is not None]
        known = [step.value for step in steps if step.value is not None]
        return sum(known) if known and len(known) == len(steps) else None


def climbs_of(ladder: Ladder, record: Record, floors: Floors) -> tuple[Climb, ...]:
    """The ladders of a record, one per combination of all other parameters."""
    wanted = {*ladder.order, *ladder.ends}
    rows = [row for row in record.rows if row.parameters.get(ladder.parameter) in wanted]
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        others = sorted((n, repr(v)) for n, v in row.parameters.items() if n != ladder.parameter)
        groups.setdefault(tuple(others), []).append(row)
    names = [
        n for n in statistics.varying(statistics.configurations(rows)) if n != ladder.parameter
    ]
    climbs = (_climb(ladder, record, group, names, floors) for group in groups.values())
    return tuple(climb for climb in climbs if any(rung.figure is not None for rung in climb.rungs))


def _climb(
    ladder: Ladder, record: Record, rows: Sequence[Row], names: Sequence[str], floors: Floors
) -> Climb:
    found = {each.parameters[ladder.parameter]: each for each in statistics.configurations(rows)}
    metrics = (m for row in rows if (m := row.metric(ladder.metric)) is not None)
    unit = next((metric.unit for metric in metrics), "")
    judge = _Judge(ladder.metric, unit, record, floors)
    rungs: list[Rung] = []
    before: Configuration | None = None
    for value in ladder.order:
        here = found.get(value)
        figures = here.figures(ladder.metric) if here is not None else ()
        middle = statistics.summarize(figures)
        speedup = detectable = None
        if here is not None and middle is not None:
            if before is not None:
                speedup, detectable = judge.step(before, here)
            before = here
        rungs.append(
            Rung(
                word(value),
                ladder.names.get(value, word(value)),
                middle.median if middle is not None else None,
                len(figures),
                speedup,
                detectable,
                "" if figures else _why_missing(here, ladder.metric),
            )
        )
    nobody = Configuration({}, ())
    slow, fast = (found.get(value, nobody) for value in ladder.ends)
    end_to_end, detectable = judge.step(slow, fast)
    label = ", ".join(f"{name}={word(rows[0].parameters[name])}" for name in names)
    ends = (word(ladder.ends[0]), word(ladder.ends[1]))
    bare = Climb(label, ladder.metric, unit, tuple(rungs), end_to_end, ends, detectable, None)
    return _with_share(bare)


def _with_share(climb: Climb) -> Climb:
    """How much of the end-to-end logarithm the rungs explain, where that can be said."""
    product, whole = climb.product, climb.end_to_end
    reason = ""
    if whole.value is None:
        reason = f"no ratio end to end: {whole.reason}"
    elif product is None:
        reason = "no rung has a ratio"
    elif climb.rungs[0].missing or climb.rungs[-1].missing:
        reason = "the first or the last rung was not measured"
    elif whole.holds_one or whole.value == 0.0:
        reason = "the ratio end to end may be 1, and shares of nothing mean nothing"
    if reason:
        return dataclasses.replace(climb, unexplained=reason)
    return dataclasses.replace(climb, explained=(product or 0.0) / (whole.value or 1.0))


@dataclass(frozen=True)
class _Judge:
    metric: str
    unit: str
    record: Record
    floors: Floors

    def step(self, slow: Configuration, fast: Configuration) -> tuple[LogRatio, Detectable]:
        """How many times as fast `fast` is: of rates the ratio, of times its inverse."""
        above, below = (fast, slow) if is_rate(self.unit) else (slow, fast)
        found = statistics.ratio_of(above, below, self.metric)
        counts = len(above.figures(self.metric)), len(below.figures(self.metric))
        return found, self.floors.beside(found.ratio, self.unit, counts, [self.record])


def _why_missing(found: Configuration | None, metric: str) -> str:
    if found is None:
        return "not run"
    reasons = dict.fromkeys(reason for row in found.rows for reason in row.validity.reasons)
    return "; ".join(reasons) or f"no metric '{metric}'"


_HEAD = (
    "label", "rung", "name", "figure", "unit", "repeats", "speedup", "low95", "high95",
    "detectable", "within_detectable", "verdict", "note",
)  # fmt: skip


def ladder_csv(climbs: Sequence[Climb]) -> str:
    """A line per rung, and one for the ends of each ladder."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(_HEAD)
    for climb in climbs:
        for rung in climb.rungs:
            figure = "" if rung.figure is None else rung.figure
            note = rung.missing or (rung.speedup.reason if rung.speedup else "")
            writer.writerow([
                climb.label, rung.value, rung.name, figure, climb.unit, rung.repeats,
                *_numbers(rung.speedup, rung.detectable), rung.verdict, note,
            ])  # fmt: skip
        share = "" if climb.explained is None else f"{climb.explained:.6f}"
        writer.writerow([
            climb.label, "/".join(climb.ends), "end to end", "", "", "",
            *_numbers(climb.end_to_end, climb.detectable), f"explained {share}" if share else "",
            climb.unexplained,
        ])  # fmt: skip
    return stream.getvalue()


def _numbers(found: LogRatio | None, detectable: Detectable | None) -> list[float | str]:
    interval = found.ratio_interval if found is not None else None
    ratio = found.ratio if found is not None and found.value is not None else ""
    bounds: list[float | str] = [interval.low, interval.high] if interval else ["", ""]
    if detectable is None or detectable.least is None:
        return [ratio, *bounds, "", ""]
    return [ratio, *bounds, detectable.least, "yes" if detectable.within else "no"]


def ladder_markdown(title: str, climbs: Sequence[Climb]) -> str:
    """The ladders as tables for people."""
    return f"# {title}\n\n" + "\n".join(_climb_markdown(climb) for climb in climbs)


def _climb_markdown(climb: Climb) -> str:
    lines = [f"## {climb.label}", ""] if climb.label else []
    lines += [
        f"| rung | {climb.metric} | times as fast as the rung before (95 %) | detectable | |",
        "| --- | --- | --- | --- | --- |",
    ]
    for rung in climb.rungs:
        figure = format_value(rung.figure, climb.unit) if rung.figure is not None else "–"
        verdict = rung.missing or rung.verdict
        lines.append(
            f"| {rung.name} | {figure} | {ratio_words(rung.speedup)} | "
            f"{rung.detectable.text if rung.detectable else ''} | {verdict} |"
        )
    lines.append(
        f"| **end to end, measured independently** | | {ratio_words(climb.end_to_end)} | "
        f"{climb.detectable.text} | |"
    )
    lines += ["", *(f"{line}  " for line in closing_words(climb)), ""]
    return "\n".join(lines)


def ratio_words(found: LogRatio | None) -> str:
    """`1.93 (1.90 to 1.96)`, or the ratio alone with why it has no interval."""
    if found is None:
        return ""
    if found.value is None:
        return f"– ({found.reason})"
    interval = found.ratio_interval
    if interval is None:
        return f"{found.ratio:.4g} ({found.reason})"
    return f"{found.ratio:.4g} ({_bounds(interval)})"


def _bounds(interval: Interval) -> str:
    return f"{interval.low:.4g} to {interval.high:.4g}"


def closing_words(climb: Climb) -> Iterable[str]:
    """What the rungs explain, which are null, and against which noise they stand."""
    if climb.explained is not None:
        yield f"The rungs explain {100 * climb.explained:.1f} % of the end-to-end log ratio."
    else:
        yield f"Not known how much the rungs explain: {climb.unexplained}."
    null = [rung.name for rung in climb.rungs if rung.verdict == "null"]
    if null:
        yield f"Null, since their interval holds 1: {', '.join(null)}."
    least = climb.detectable
    if least.least is not None:
        yield f"{MEANING}; {percent(least.least)} end to end ({least.workload}, {least.run_id})."
    else:
        yield least.reason if least.reason == UNKNOWN else f"No least effect: {least.reason}."


def ladder_json(climbs: Sequence[Climb]) -> list[dict[str, object]]:
    """The ladders for scripts."""
    return [
        {
            **encode(climb),
            "rungs": [{**encode(rung), "verdict": rung.verdict} for rung in climb.rungs],
        }
        for climb in climbs
    ]
