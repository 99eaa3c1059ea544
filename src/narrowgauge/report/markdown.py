"""The report as Markdown: whole, or the block that a page of the repository keeps between markers.

The block has nothing in it of when and by whom it was made, so it changes only with the verdicts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from narrowgauge.errors import UsageError
from narrowgauge.report.content import INTERVAL, MEANING, REPLAY, ClaimView, Report
from narrowgauge.report.text import code_block, markdown
from narrowgauge.report.words import duration
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import write_atomic

__all__ = ["fill_block", "markdown_block", "markdown_report", "table_line", "update_block"]

#: What of a page is the verdicts', by its name and by its markers.
VERDICTS = "verdicts"
BEGIN, END = f"<!-- {VERDICTS} -->", f"<!-- /{VERDICTS} -->"
_HEADS = ("verdict", "claim", "the paper", "here", INTERVAL, "processes", "measured on")
#: More runs or exclusions of one claim than these are counted, not listed.
_MOST = 12


def markdown_report(report: Report) -> str:
    """The whole report."""
    head = f"Judged {report.made} by Narrowgauge {report.version}"
    head += f" from {report.source}" if report.source else ""
    head += f", commit {report.commit}" if report.commit else ""
    parts = [f"# {markdown(report.title)}", f"{markdown(head)}.", _body(report)]
    if report.measured:
        parts.append("## Claims that were measured")
        parts += [_claim(each) for each in report.measured]
    if report.runs:
        parts += ["## Runs", "\n".join(_runs(report))]
    if report.missing:
        told = (f"- {markdown(run)}: {markdown(why)}" for run, why in report.missing)
        parts += ["## Runs without a record here", "\n".join(told)]
    if report.refused:
        told = (f"- {markdown(path)}: {markdown(why)}" for path, why in report.refused)
        parts += ["## Refused records", "\n".join(told)]
    return "\n\n".join(parts) + "\n"


def markdown_block(report: Report) -> str:
    """Counts, the table of what was measured, and what was not, and why: to be pasted."""
    return _body(report) + "\n"


def _body(report: Report) -> str:
    parts = [f"**{markdown(REPLAY)}**"] if report.replay else []
    lines = [["verdict", "claims", ""], ["---", "--:", "---"]]
    lines += [
        [verdict.value, str(count), MEANING[verdict]] for verdict, count in report.counts if count
    ]
    parts.append("\n".join(map(table_line, lines)))
    if report.measured:
        parts.append("\n".join(_table(report.measured)))
    unmeasured = [each for each in report.claims if not each.measured]
    otherwise = [each for each in unmeasured if _all_there(each)]
    rest = [each for each in unmeasured if not _all_there(each)]
    if otherwise:
        parts.append("\n".join(_otherwise(otherwise)))
    if rest:
        parts.append("\n".join(_unmeasured(rest)))
    return "\n\n".join(parts)


def table_line(cells: Iterable[str]) -> str:
    """One line of a table, of cells that are Markdown already."""
    return f"| {' | '.join(cells)} |"


def _table(claims: Iterable[ClaimView]) -> Iterator[str]:
    yield table_line(_HEADS)
    yield table_line(["---"] * len(_HEADS))
    for each in claims:
        cells = [each.verdict.value, markdown(f"{each.experiment}/{each.id}")]
        cells += [markdown(words) for words in (each.paper, each.here, each.spread)]
        cells += [str(each.repeats or ""), markdown(each.device)]
        yield table_line(cells)


def _all_there(each: ClaimView) -> bool:
    """Whether there are figures of all that a skipped claim compares."""
    return each.verdict is Verdict.SKIPPED and len(each.parts) == len(each.selections)


def _otherwise(claims: Iterable[ClaimView]) -> Iterator[str]:
    """Measured, and no verdict: by a lesser recipe, whose miss says nothing, or too seldom."""
    yield table_line(["measured, but not as claimed", "the paper", "what there is"])
    yield table_line(["---", "---", "---"])
    for each in claims:
        name = markdown(f"{each.experiment}/{each.id}")
        yield table_line([name, markdown(each.paper), markdown(each.reason)])


def _unmeasured(claims: Iterable[ClaimView]) -> Iterator[str]:
    """Not measured: by experiment and verdict, how many; each with its reason is in the report."""
    counts: dict[tuple[str, str], int] = {}
    for each in claims:
        key = (each.experiment, each.verdict.value)
        counts[key] = counts.get(key, 0) + 1
    yield table_line(["not measured", "verdict", "claims"])
    yield table_line(["---", "---", "--:"])
    for (experiment, verdict), count in counts.items():
        yield table_line([markdown(experiment), verdict, str(count)])


def _claim(each: ClaimView) -> str:
    lines = [f"### {markdown(f'{each.experiment}/{each.id}')}: {each.verdict.value}", ""]
    lines += [markdown(each.text), "", markdown(each.reason), ""]
    pairs = [
        ("the paper", f"{each.paper} ({each.source})"),
        ("here", each.here + (f", {each.coverage} {each.interval}" if each.interval else "")),
        ("environment", f"{each.device}, target {each.target}" if each.device else ""),
        ("what could be seen", each.sensitivity),
        ("two modes", each.bimodal),
        ("runs", _some([run.run_id for run in each.runs])),
        ("left out", _some(each.exclusions)),
        ("not put together", _some(each.disagreements)),
        ("what would change it", each.flip),
        ("costs", each.cost),
    ]
    lines += [f"- {name}: {markdown(value)}" for name, value in pairs if value]
    return "\n".join(lines) + ("\n\n" + code_block(each.command) if each.command else "")


def _some(words: Sequence[str]) -> str:
    more = f" and {len(words) - _MOST} more" if len(words) > _MOST else ""
    return "; ".join(words[:_MOST]) + more


def _runs(report: Report) -> Iterator[str]:
    heads = ("run", "experiment", "device", "target", "status", "valid rows", "time")
    yield table_line(heads)
    yield table_line(["---"] * len(heads))
    for _, card in report.runs:
        cells = [card.run_id, card.experiment, card.device, card.target, card.status]
        cells += [f"{card.valid_rows} of {card.rows}"]
        cells += [duration(card.seconds) if card.seconds is not None else ""]
        yield table_line([markdown(cell) for cell in cells])


def fill_block(page: str, block: str, where: str, name: str = VERDICTS) -> str:
    """The page with the block between its markers of that name. Raises UsageError where it has
    none."""
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    found = re.compile(f"{re.escape(begin)}\n.*?{re.escape(end)}", re.DOTALL)
    if len(found.findall(page)) != 1:
        raise UsageError(
            f"{where} should have one place for the {name}",
            why=f"the lines '{begin}' and '{end}', once each, say where",
            next_step=f"add them where the {name} should stand",
        )
    return found.sub(lambda _: f"{begin}\n{block}{end}", page)


def update_block(path: Path, block: str, *, check: bool, name: str = VERDICTS) -> bool:
    """Bring the block of a page up to date; whether it was not.

    With `check` nothing is written, and UsageError is raised where the page is out of date.
    """
    try:
        page = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}", why=str(error)) from error
    filled = fill_block(page, block, str(path), name)
    if filled == page:
        return False
    if check:
        raise UsageError(
            f"the {name} in {path} are not those of the records",
            next_step=f"narrowgauge report --replay --into {path}",
        )
    write_atomic(path, filled.encode("utf-8"))
    return True
