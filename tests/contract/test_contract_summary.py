"""[summary]: an experiment's own closing lines, checked when parsed, filled from rows alone."""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, List, Optional, Sequence, Tuple

import pytest
from contract_cases import document

from narrowgauge_contract.errors import BadValueError, ExperimentFileError
from narrowgauge_contract.outcome import Metric, Row, Status, Validity
from narrowgauge_contract.spec import parse_spec
from narrowgauge_contract.summary import Summary, summary_blocks, summary_lines

#: The closing lines of the benchmark that reported no gain from tensor cores, for the toy.
TABLE: Dict[str, Any] = {
    "parameter": "precision",
    "metric": "seconds",
    "order": ["fp16", "bf16", "fp32"],
    "names": {"fp16": "AMP (opt level O3)", "bf16": "AMP (opt level O2)", "fp32": "Float32"},
    "baseline": "fp32",
    "each": "{name}: {value:.2f} seconds",
    "heading": "Results summary ({width*facts.batches} images)",
    "line": "{name}: {value:.2f} seconds ({ratio:.2f} x full precision speed)",
}


def _summary(**changes: Any) -> Summary:
    table = {key: value for key, value in {**TABLE, **changes}.items() if value is not None}
    closing = parse_spec({**document(), "summary": table}).closing
    assert closing is not None
    return closing


def _row(
    precision: str,
    seconds: Optional[float],
    repeat: int = 0,
    reasons: Sequence[str] = (),
    width: int = 100,
) -> Row:
    metrics: Tuple[Metric, ...] = ()
    if seconds is not None:
        metrics = (Metric("seconds", "s", "monotonic", (seconds,)),)
    return Row(
        index=0,
        repeat=repeat,
        seed=repeat,
        parameters={"precision": precision, "width": width, "lr": 0.1},
        status=Status.COMPLETE,
        validity=Validity(not reasons, tuple(reasons)),
        facts={"batches": 30, "card": "H200"},
        metrics=metrics,
    )


def _published() -> List[Row]:
    return [_row("fp16", 9.72), _row("bf16", 9.67), _row("fp32", 9.70)]


def test_the_published_lines_come_out_as_published() -> None:
    assert summary_lines(_summary(), _published()) == (
        "AMP (opt level O3): 9.72 seconds",
        "AMP (opt level O2): 9.67 seconds",
        "Float32: 9.70 seconds",
        "Results summary (3000 images)",
        "AMP (opt level O3): 9.72 seconds (1.00 x full precision speed)",
        "AMP (opt level O2): 9.67 seconds (1.00 x full precision speed)",
        "Float32: 9.70 seconds (1.00 x full precision speed)",
    )


def test_without_a_table_there_is_none() -> None:
    assert parse_spec(document()).closing is None


def test_the_figure_is_the_median_over_the_valid_repeats() -> None:
    rows = [_row("fp32", 8.0), *(_row("fp16", s, i) for i, s in enumerate((2.0, 1.0, 4.0)))]
    rows.append(_row("fp16", 99.0, 3, ["throttled"]))

    (block,) = summary_blocks(_summary(), rows)

    first = block.lines[0]
    assert (first.ratio, first.repeats, first.baseline_repeats) == (4.0, 3, 1)


def test_of_a_rate_more_is_better() -> None:
    (block,) = summary_blocks(_summary(better="more"), [_row("fp16", 8.0), _row("fp32", 2.0)])

    assert block.lines[0].ratio == 4.0


def test_order_is_that_of_the_declaration_and_not_of_the_rows() -> None:
    lines = summary_lines(_summary(), list(reversed(_published())))

    assert [line.partition(":")[0] for line in lines[:3]] == [
        "AMP (opt level O3)", "AMP (opt level O2)", "Float32",
    ]  # fmt: skip


def test_what_was_not_run_is_left_out_and_what_was_invalid_says_why() -> None:
    rows = [_row("bf16", 1.0, reasons=["ran at fp32"]), _row("fp32", 2.0)]

    lines = summary_lines(_summary(), rows)

    assert "AMP (opt level O3)" not in "".join(lines)
    assert lines[0] == lines[3] == "AMP (opt level O2): no valid row (ran at fp32)"


def test_without_a_baseline_there_is_no_ratio_and_it_says_so() -> None:
    lines = summary_lines(_summary(), [_row("fp16", 1.5), _row("fp32", 3.0, reasons=["hot"])])

    assert lines[3] == "AMP (opt level O3): 1.50 seconds (no ratio: Float32: no valid row (hot))"
    assert lines[4] == "Float32: no valid row (hot)"


@pytest.mark.parametrize(
    ("line", "each", "said"),
    [
        ("{name}: {value:.2f} seconds  ({ratio:.2f}x as fast)", None, "fp8: 1.25 seconds"),
        ("{name}: {value:.1f} s ({batches*ratio:.2f} x) on {width}", None, "fp8: 1.3 s on 100"),
        ("{name} is {ratio:.1f} times as fast", "{name} took {value:.3f}", "fp8 took 1.253"),
        ("{name} is {ratio:.1f} times as fast", "{name}: {ratio:.1f}", "fp8: 1.25322 s"),
        ("{name} is {ratio:.1f} times as fast", None, "fp8: 1.25322 s"),
    ],
)
def test_without_a_baseline_a_line_keeps_its_words(
    line: str, each: Optional[str], said: str
) -> None:
    line = line.replace("batches", "facts.batches")
    names = {"fp16": "fp8", "fp32": "Float32"}

    text = summary_lines(
        _summary(line=line, each=each, heading=None, names=names), [_row("fp16", 1.25322)]
    )

    assert text[-1] == f"{said} (no ratio: Float32: not run)"


def test_short_times_without_words_of_their_own_are_in_the_unit_that_fits() -> None:
    line = "{name} is {ratio:.1f} times as fast"
    text = summary_lines(_summary(line=line, each=None, heading=None), [_row("fp16", 2.97e-4)])

    assert ": 0.297 ms (no ratio: " in text[-1]


def test_the_heading_takes_a_fact_from_a_row_that_has_it() -> None:
    failed = dataclasses.replace(_row("fp16", None, reasons=["out of memory"]), facts={"card": "?"})
    rows = [failed, _row("bf16", 1.0, reasons=["hot"]), _row("fp32", 1.0, reasons=["hot"])]
    heading = "Results summary ({width*facts.batches} images)"

    assert heading.replace("{width*facts.batches}", "3000") in summary_lines(_summary(), rows)
    valid = dataclasses.replace(_row("fp32", 1.0), facts={"card": "A"})
    lines = summary_lines(_summary(heading="{facts.card}, {facts.batches}"), [*rows[:2], valid])
    assert "A, 30" in lines, "of a valid row before others"


def test_a_row_without_the_metric_says_so() -> None:
    (first, *_) = summary_lines(_summary(), [_row("fp16", None), _row("fp32", 1.0)])

    assert first == "AMP (opt level O3): no valid row (no metric 'seconds')"


def test_rows_that_were_never_to_have_the_metric_have_no_summary() -> None:
    assert summary_lines(_summary(), [_row("fp16", None), _row("fp32", None)]) == ()

    hot = _row("fp32", None, reasons=["hot"])
    assert "no valid row (hot)" in "\n".join(summary_lines(_summary(), [hot]))


def test_further_parameters_make_blocks_of_their_own() -> None:
    rows = [_row(p, s, width=w) for w in (1, 100) for p, s in (("fp16", 1.0), ("fp32", 2.0))]

    lines = summary_lines(_summary(each=None), rows)

    assert lines[0:2] == ("width=1", "Results summary (30 images)")
    assert lines[4:7] == ("", "width=100", "Results summary (3000 images)")
    assert summary_lines(_summary(each=None, where={"width": 1}), rows)[0] == (
        "Results summary (30 images)"
    )


def test_a_fact_that_a_row_lacks_is_a_question_mark() -> None:
    summary = _summary(heading="{facts.nothing} on {facts.card}, {facts.nothing*width:d}")

    assert summary_lines(summary, _published())[3] == "? on H200, ?*100"


def test_a_baseline_of_zero_gives_no_figure() -> None:
    (block,) = summary_blocks(_summary(), [_row("fp16", 0.0), _row("fp32", 2.0)])

    assert str(block.lines[0].ratio) == "nan"
    assert "nan x full" in block.lines[0].text


CELLS: Dict[str, Any] = {
    "each": None,
    "heading": None,
    "table": "| width | name | error | of | ms | × |",
    "line": "| {width} | {name} | {metrics.error:.1E} | {base.seconds*1000:.0f} | "
    "{value*1000:.0f} | {ratio:.2f} |",
}


def _with_error(row: Row, error: float) -> Row:
    return dataclasses.replace(row, metrics=(*row.metrics, Metric("error", "1", "x", (error,))))


def test_a_table_has_one_heading_and_the_baseline_beside_each_value() -> None:
    rows = [
        _with_error(_row("fp16", 1.0), 2e-3), _row("fp32", 2.0),
        _row("bf16", 4.0, width=200), _row("fp32", 8.0, width=200),
    ]  # fmt: skip

    assert summary_lines(_summary(**CELLS), rows) == (
        "| width | name | error | of | ms | × |",
        "| 100 | AMP (opt level O3) | 2.0E-03 | 2000 | 1000 | 2.00 |",
        "| 200 | AMP (opt level O2) | – | 8000 | 4000 | 2.00 |",
    )
    first, second = summary_blocks(_summary(**CELLS), rows)
    assert (first.lines[0].ratio, first.lines[0].repeats) == (2.0, 1)
    assert (first.label, second.label, second.heading) == ("", "", "")


def test_a_table_says_behind_a_line_why_it_has_no_figures() -> None:
    skipped = _row("fp16", None, reasons=["skipped: no such engine"])
    table = _summary(**CELLS)

    assert summary_lines(table, [skipped, _row("fp32", 2.0)])[1:] == (
        "| 100 | AMP (opt level O3) | – | 2000 | – | – | no valid row (skipped: no such engine)",
    )
    assert summary_lines(table, [_row("fp16", 1.0)])[1:] == (
        "| 100 | AMP (opt level O3) | – | – | 1000 | – |",
    )
    assert summary_lines(table, [_row("fp32", 2.0)])[1:] == (
        "| 100 | Float32 | – | 2000 | 2000 | 1.00 |",
    ), "a baseline that is alone is a line of its own"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"table": "x"}, "'table' goes with 'line'"),
        ({"table": 7, "each": None, "heading": None}, "table should be a text"),
        ({"line": "{base.}"}, "is nothing that it knows"),
        ({"line": "{2*3}", "baseline": "fp32", "each": "{metrics.__class__}"}, "nothing that it"),
        ({"heading": "{metrics.error}"}, "is nothing that it knows"),
        ({"baseline": None, "line": "{base.error}"}, "is nothing that it knows"),
        ({"parameter": "widht"}, "no parameter 'widht'"),
        ({"parameter": "flip"}, "makes runs, not rows"),
        ({"parameter": None}, "lacks the text 'parameter'"),
        ({"metric": ""}, "lacks the text 'metric'"),
        ({"order": None}, "'order' should be a list of values"),
        ({"order": []}, "one or more different values"),
        ({"order": ["fp16", "fp16"]}, "one or more different values"),
        ({"baseline": "bf16", "order": ["fp16"]}, "the baseline 'bf16' is not in 'order'"),
        ({"names": ["a"]}, "'names' should be a table from values to names"),
        ({"names": {"fp16": 7}}, "'names' should be a table from values to names"),
        ({"better": "most"}, "better is 'less' or 'more'"),
        ({"headin": "x"}, "unknown key 'headin'"),
        ({"where": "fp16"}, "'where' should be a table"),
        ({"where": {"wdith": 1}}, "unknown key 'wdith'"),
        ({"each": None, "line": None}, "neither 'each' nor 'line'"),
        ({"line": 7}, "line should be a text"),
        ({"line": "{name"}, "line: expected '}'"),
        ({"line": "{nmae}"}, "'{nmae}' is nothing that it knows"),
        ({"line": "{name.__class__}"}, "is nothing that it knows"),
        ({"line": "{facts.__class__}"}, "is nothing that it knows"),
        ({"line": "{0}"}, "is nothing that it knows"),
        ({"line": "{}"}, "is nothing that it knows"),
        ({"line": "{value!r}"}, "has a format that is not like .2f"),
        ({"line": "{value:>{width}}"}, "has a format that is not like .2f"),
        ({"heading": "{width:.2}"}, "has a format that is not like .2f"),
        ({"heading": "{width:,.2}"}, "has a format that is not like .2f"),
        ({"heading": "{value}"}, "'{value}' is nothing that it knows"),
        ({"baseline": None}, "'{ratio}' is nothing that it knows"),
    ],
)
def test_what_is_wrong_is_refused_before_a_run(changes: Dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentFileError, match=message.replace("{", r"\{").replace(".", r"\.")):
        _summary(**changes)


@pytest.mark.parametrize(
    "changes", [{"order": ["fp8"]}, {"names": {"fp8": "x"}}, {"where": {"width": 0}}]
)
def test_values_that_the_parameter_does_not_take_are_refused(changes: Dict[str, Any]) -> None:
    with pytest.raises(BadValueError):
        _summary(**changes)


@pytest.mark.parametrize("number", [3, 0, -7, 2.5, 1e300, float("inf"), float("nan")])
@pytest.mark.parametrize(
    "form",
    ["", ",", "d", ",d", *(f"{c}.{n}{t}" for c in ("", ",") for n in (0, 3) for t in "efg%")],
)
def test_no_format_that_is_accepted_fails_when_a_run_is_over(form: str, number: float) -> None:
    summary = _summary(line="{facts.number:" + form + "}")
    rows = [
        dataclasses.replace(row, facts={"number": number, "batches": 1}) for row in _published()
    ]

    assert summary_lines(summary, rows)[-1] not in ("", "?")


@pytest.mark.parametrize("form", [".2", ",.2", ".0", ",.12"])
def test_a_precision_without_a_letter_is_refused_since_whole_numbers_have_none(form: str) -> None:
    with pytest.raises(ValueError, match="Precision not allowed"):
        format(3, form)
    with pytest.raises(ExperimentFileError, match="has a format"):
        _summary(line="{width:" + form + "}")
