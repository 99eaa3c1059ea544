"""`[summary]`: an experiment's own closing lines, in its own words, from rows alone.

    [summary]
    parameter = "mode"                      # a line per value of this parameter
    metric = "seconds"                      # the figure: the median over the valid repeats
    order = ["O3", "fp32"]                  # which values, in this order
    names = { O3 = "AMP (opt level O3)", fp32 = "Float32" }  # what they are called
    baseline = "fp32"                       # what {ratio} refers to
    better = "less"                         # of the metric; "more" for rates. Default: less
    where = { protocol = "clean" }          # only rows with these values. Default: all rows
    each = "{name}: {value:.2f} seconds"    # a line per value, before the heading
    heading = "Results summary ({batch*iterations} images)"
    line = "{name}: {value:.2f} seconds ({ratio:.2f} x full precision speed)"

    table = "| Model | Latency |"           # instead of a heading per block: one, above all lines

    [[summary.beside]]                      # of a table: a line that stands as it is, once, below
    where = { batch = 32 }                  # the last line of rows with these values
    line = "| published | 3.1 |"

`each`, `heading` and `line` may each be left out; `table` needs `line` and no others. In `each` and
`line`, `{name}` is what `names` says, `{value}` the figure, and `{ratio}` how many times as good as
the baseline it is: baseline / value where less is better, else value / baseline. There too,
`{metrics.NAME}` is the figure of another metric, and `{base.NAME}` that of the baseline.
Everywhere, the name of a parameter is its value, and `{facts.NAME}` a fact of the first row that
has it, valid ones before others. Numbers may be multiplied, `{value*iterations}`,
`{metrics.latency*1000}`, and take a format: `.2f`, `,`, `d`, …

Where rows differ in further parameters, each combination of these gets its own lines, headed by
what it is. A value without rows is left out; without a valid row its line says why instead. Without
a valid row of the baseline, a line keeps its words but those in parentheses around `{ratio}`, and
says why there is none. In a table the baseline's own line is left out where there are others, a
figure that is missing is a dash, and why there is no valid row stands behind the line.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Optional, Sequence, Tuple

from narrowgauge_contract.drawing import named_parameter, named_values, values_of, where_of
from narrowgauge_contract.errors import ExperimentFileError
from narrowgauge_contract.figures import figure, fitting, median
from narrowgauge_contract.templates import (
    MISSING,
    check_template,
    fill,
    mentions,
    terms_of,
    word,
)
from narrowgauge_contract.toml_checks import only, text_of

if TYPE_CHECKING:
    from narrowgauge_contract.outcome import Row
    from narrowgauge_contract.parameters import Parameter, Scalar

__all__ = ["Block", "Line", "Summary", "parse_summary", "summary_blocks", "summary_lines"]

_KEYS = (
    "parameter",
    "metric",
    "order",
    "names",
    "baseline",
    "better",
    "where",
    "each",
    "heading",
    "line",
    "table",
    "beside",
)
#: What a line has of its own, beside parameters and facts.
_OWN = ("name", "value", "ratio")
_RATIO_IN_PARENTHESES = re.compile(r"\s*\([^(){}]*\{(?:[^{}]*\*)?ratio[^{}]*\}[^()]*\)")


@dataclasses.dataclass(frozen=True)
class Aside:
    """A line of a table that stands as it is below the rows with the values of `where`."""

    where: Dict[str, Scalar]
    line: str


@dataclasses.dataclass(frozen=True)
class Summary:
    """The declaration, checked. `better_less`: whether less of the metric is better."""

    parameter: str
    metric: str
    order: Tuple[Scalar, ...]
    names: Dict[Scalar, str]
    baseline: Optional[Scalar]
    better_less: bool
    where: Dict[str, Scalar]
    each: str
    heading: str
    line: str
    table: str = ""
    beside: Tuple[Aside, ...] = ()

    def name_of(self, value: Optional[Scalar]) -> str:
        """What a value of the parameter is called."""
        return word(value) if value is None else self.names.get(value, word(value))


@dataclasses.dataclass(frozen=True)
class Line:
    """One line. `ratio` and the counts of valid rows behind it: None and 0 where there is none."""

    text: str
    ratio: Optional[float] = None
    repeats: int = 0
    baseline_repeats: int = 0


@dataclasses.dataclass(frozen=True)
class Block:
    """The lines of one combination of all other parameters; `label` says which."""

    label: str
    each: Tuple[Line, ...]
    heading: str
    lines: Tuple[Line, ...]


def parse_summary(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], where: str
) -> Summary:
    """Check a `[summary]` table. Raises ExperimentFileError, BadValueError."""
    only(body, _KEYS, where)
    parameter = named_parameter(body, parameters, where)
    metric = text_of(body, "metric", where)
    order = values_of(body, "order", parameter, where)
    if not order or len(set(order)) < len(order):
        raise ExperimentFileError(f"{where}: 'order' should be one or more different values")
    baseline = parameter.check(body["baseline"]) if "baseline" in body else None
    if baseline is not None and baseline not in order:
        raise ExperimentFileError(f"{where}: the baseline '{baseline}' is not in 'order'")
    better = body.get("better", "less")
    if better not in ("less", "more"):
        raise ExperimentFileError(f"{where}: better is 'less' or 'more'")
    templates = _templates(body, parameters, baseline is not None, where)
    return Summary(
        parameter=parameter.name,
        metric=metric,
        order=order,
        names=named_values(body, "names", parameter, where),
        baseline=baseline,
        better_less=better == "less",
        where=where_of(body, parameters, where),
        each=templates["each"],
        heading=templates["heading"],
        line=templates["line"],
        table=templates["table"],
        beside=_parse_beside(body, parameters, parameter.name, where),
    )


def _parse_beside(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], varying: str, where: str
) -> Tuple[Aside, ...]:
    tables = body.get("beside", [])
    if not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise ExperimentFileError(f"{where}: 'beside' should be a list of tables")
    if tables and not body.get("table"):
        raise ExperimentFileError(f"{where}: 'beside' goes with 'table'")
    place, asides = f"{where} beside", []
    for each in tables:
        only(each, ("where", "line"), place)
        aside = Aside(where_of(each, parameters, place), text_of(each, "line", place))
        if varying in aside.where:
            raise ExperimentFileError(f"{place}: the lines of a block differ in '{varying}'")
        asides.append(aside)
    return tuple(asides)


def _templates(
    body: Mapping[str, Any], parameters: Mapping[str, Parameter], compares: bool, where: str
) -> Dict[str, str]:
    templates = {key: body.get(key, "") for key in ("each", "heading", "line", "table")}
    if not templates["each"] and not templates["line"]:
        raise ExperimentFileError(f"{where} says neither 'each' nor 'line'")
    if templates["table"] and (templates["each"] or templates["heading"] or not templates["line"]):
        raise ExperimentFileError(f"{where}: 'table' goes with 'line', not 'each' or 'heading'")
    own = _OWN if compares else _OWN[:2]
    tables = ("facts", "metrics", "base") if compares else ("facts", "metrics")
    for key, template in templates.items():
        if key in ("each", "line"):
            check_template(template, own, tables, parameters, f"{where} {key}")
        elif key == "heading":
            check_template(template, (), ("facts",), parameters, f"{where} {key}")
        elif not isinstance(template, str):
            raise ExperimentFileError(f"{where} {key} should be a text")
    return templates


def summary_lines(summary: Summary, rows: Sequence[Row]) -> Tuple[str, ...]:
    """What to print, line by line, with an empty line between blocks."""
    lines: List[str] = []
    for block in summary_blocks(summary, rows):
        lines += [""] if lines and not summary.table else []
        lines += [block.label] if block.label else []
        lines += [line.text for line in block.each]
        lines += [block.heading] if block.heading else []
        lines += [line.text for line in block.lines]
    return tuple(lines)


def summary_blocks(summary: Summary, rows: Sequence[Row]) -> Tuple[Block, ...]:
    """The lines of each combination of the other parameters, in the order of the rows."""
    wanted = [
        row
        for row in rows
        if row.parameters.get(summary.parameter) in summary.order
        and all(row.parameters.get(name) == value for name, value in summary.where.items())
    ]
    groups: Dict[Tuple[Tuple[str, str], ...], List[Row]] = {}
    for row in wanted:
        others = sorted(
            (name, repr(value))
            for name, value in row.parameters.items()
            if name != summary.parameter
        )
        groups.setdefault(tuple(others), []).append(row)
    different = [
        name for name in (wanted[0].parameters if wanted else ())
        if name != summary.parameter
        and len({repr(row.parameters.get(name)) for row in wanted}) > 1
    ]  # fmt: skip
    kept = [group for group in groups.values() if not _left_out(group, summary.metric)]
    if summary.table:
        return tuple(
            _table_block(
                summary, group, summary.table if number == 0 else "", _asides(summary, kept, number)
            )
            for number, group in enumerate(kept)
        )
    return tuple(_block(summary, group, different) for group in kept)


def _left_out(rows: Sequence[Row], metric: str) -> bool:
    """Whether these rows were never meant to have the metric: some are valid, and none has it."""
    valid = [row for row in rows if row.validity.valid]
    return bool(valid) and not _measured(valid, metric)


def _table_block(
    summary: Summary, rows: Sequence[Row], heading: str, asides: Sequence[Line]
) -> Block:
    lines = _lines_of(summary, rows)
    others = [each for each in lines if each.value != summary.baseline]
    cells = tuple(each.cells(summary.line) for each in others or lines)
    return Block("", (), heading, (*cells, *asides))


def _asides(summary: Summary, groups: Sequence[Sequence[Row]], number: int) -> List[Line]:
    """The lines that stand below the group of that number: the last one with their values."""
    found = []
    for aside in summary.beside:
        matching = [
            place
            for place, rows in enumerate(groups)
            if all(rows[0].parameters.get(name) == value for name, value in aside.where.items())
        ]
        if matching and matching[-1] == number:
            found.append(Line(aside.line))
    return found


def _lines_of(summary: Summary, rows: Sequence[Row]) -> List[_Lines]:
    by_value: Dict[Scalar, List[Row]] = {value: [] for value in summary.order}
    for row in rows:
        by_value[row.parameters[summary.parameter]].append(row)
    return [_Lines(summary, by_value, value) for value, found in by_value.items() if found]


def _block(summary: Summary, rows: Sequence[Row], different: Sequence[str]) -> Block:
    lines = _lines_of(summary, rows)
    heading = ""
    if summary.heading:
        heading = fill(summary.heading, _with_all_facts(rows), {})
    label = ", ".join(f"{name}={word(rows[0].parameters[name])}" for name in different)
    return Block(
        label,
        tuple(each.line(summary.each) for each in lines) if summary.each else (),
        heading,
        tuple(each.line(summary.line) for each in lines) if summary.line else (),
    )


def _with_all_facts(rows: Sequence[Row]) -> Row:
    """The first valid row, or the first, with what others know and it does not: one that failed
    may have ended before its facts."""
    by_worth = sorted(rows, key=lambda row: not row.validity.valid)
    facts: Dict[str, Any] = {}
    for row in reversed(by_worth):
        facts.update(row.facts)
    return dataclasses.replace(by_worth[0], facts=facts)


class _Lines:
    """The lines of one value of the parameter."""

    def __init__(
        self, summary: Summary, rows: Mapping[Scalar, Sequence[Row]], value: Scalar
    ) -> None:
        self.summary, self.value = summary, value
        self.name = summary.name_of(value)
        self.all_rows = rows[value]
        self.rows = _measured(rows[value], summary.metric)
        base = rows[summary.baseline] if summary.baseline is not None else ()
        self.base_rows = _measured(base, summary.metric)
        self.why = _why_missing(rows[value], summary.metric)
        self.base_why = _why_missing(base, summary.metric)

    def line(self, template: str) -> Line:
        if not self.rows:
            return Line(f"{self.name}: {self.why}")
        own = self._own(template)
        value = own["value"]
        if not mentions(template, "ratio"):
            return Line(fill(template, self.rows[0], own))
        if not self.base_rows:
            base = self.summary.name_of(self.summary.baseline)
            plain = fill(self._without_ratio(template), self.rows[0], own)
            return Line(f"{plain} (no ratio: {base}: {self.base_why})")
        ratio = self._ratio(value, _figure(self.base_rows, self.summary.metric))
        text = fill(template, self.rows[0], {**own, "ratio": ratio})
        return Line(text, ratio, len(self.rows), len(self.base_rows))

    def cells(self, template: str) -> Line:
        """The line of a table: with dashes for what is missing, and why behind it."""
        own = self._own(template)
        ratio: Optional[float] = None
        if self.rows and self.base_rows:
            ratio = self._ratio(own["value"], _figure(self.base_rows, self.summary.metric))
        own["ratio"] = MISSING if ratio is None else ratio
        row = _with_all_facts(self.all_rows)
        text = fill(template, row, own) + ("" if self.rows else f" {self.why}")
        return Line(text, ratio, len(self.rows), len(self.base_rows) if self.rows else 0)

    def _own(self, template: str) -> Dict[str, Any]:
        """What the line has of its own, and every metric that it names."""
        own: Dict[str, Any] = {"name": self.name, "value": MISSING}
        if self.rows:
            own["value"] = _figure(self.rows, self.summary.metric)
        for term in terms_of(template):
            table, _, metric = term.partition(".")
            if table in ("metrics", "base") and metric:
                measured = _measured(self.rows if table == "metrics" else self.base_rows, metric)
                own[term] = _figure(measured, metric) if measured else MISSING
        return own

    def _without_ratio(self, template: str) -> str:
        """The line in its own words as far as they do without the ratio."""
        for words in (_RATIO_IN_PARENTHESES.sub("", template), self.summary.each):
            if words and not mentions(words, "ratio"):
                return words
        metric = self.rows[0].metric(self.summary.metric)
        unit = metric.unit if metric is not None and metric.unit != "1" else ""
        factor, unit = fitting(_figure(self.rows, self.summary.metric), unit)
        return f"{{name}}: {{value*{factor:.0f}:.6g}} {unit}".rstrip()

    def _ratio(self, value: float, base: float) -> float:
        above, below = (base, value) if self.summary.better_less else (value, base)
        return above / below if below else math.nan


def _why_missing(rows: Sequence[Row], metric: str) -> str:
    """Why rows give no figure, where they give none."""
    if not rows:
        return "not run"
    reasons = dict.fromkeys(reason for row in rows for reason in row.validity.reasons)
    why = "; ".join(reasons) or f"no metric '{metric}'"
    return f"no valid row ({why})"


def _measured(rows: Sequence[Row], metric: str) -> List[Row]:
    found = [(row, row.metric(metric)) for row in rows if row.validity.valid]
    return [row for row, samples in found if samples is not None and samples.values]


def _figure(rows: Sequence[Row], name: str) -> float:
    samples = [row.metric(name) for row in rows]
    return median([figure(metric).value for metric in samples if metric is not None])
