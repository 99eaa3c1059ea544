"""The report as an artifact appendix in LaTeX, in the parts that ACM and cTuning ask for.

A file for `\\input` after the bibliography. It needs no package beyond LaTeX, so that it fits any
conference's class; lists instead of wide tables, so that it fits a column.
"""

from __future__ import annotations

from collections.abc import Iterable

from jinja2 import Environment, PackageLoader, StrictUndefined

from narrowgauge.report.content import MEANING, REPLAY, ClaimView, Report
from narrowgauge.report.text import latex
from narrowgauge.report.words import duration

__all__ = ["latex_report"]

#: More devices or images than these are counted, not listed.
_MOST = 12


def latex_report(report: Report) -> str:
    """The appendix. Every text of a claim or a record is set, never run."""
    environment = Environment(
        loader=PackageLoader("narrowgauge.report"),
        block_start_string="<%",
        block_end_string="%>",
        variable_start_string="<<",
        variable_end_string=">>",
        comment_start_string="<#",
        comment_end_string="#>",
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # Everything that the template prints is escaped, by TeX's rules instead of HTML's.
        finalize=_final,
    )
    return environment.get_template("appendix.tex.j2").render(
        report=report,
        commit=f"{report.commit[:12]}{report.commit.partition(' ')[2] and ', changed'}",
        meaning=MEANING,
        replay=REPLAY,
        devices=_distinct(card.device for _, card in report.runs),
        images=_distinct(dict(card.facts).get("image", "") for _, card in report.runs),
        torches=_distinct(dict(card.facts).get("torch", "") for _, card in report.runs),
        data_sets=_distinct(dict(card.facts).get("data sets", "") for _, card in report.runs),
        minutes=duration(60 * sum(_distinct_minutes(report.measured))),
        disk=max((each.judgement.claim.disk_gb for each in report.measured), default=0.0),
        unmeasured=_unmeasured(report.claims),
        took=duration(report.seconds or 0.0),
    )


def _final(value: object) -> object:
    """Escapes what a template prints; numbers are as they are."""
    return value if isinstance(value, (int, float)) else latex(value)


def _distinct(words: Iterable[str]) -> list[str]:
    found = [word for word in dict.fromkeys(words) if word]
    return [*found[:_MOST], *([f"and {len(found) - _MOST} more"] if len(found) > _MOST else [])]


def _distinct_minutes(claims: Iterable[ClaimView]) -> Iterable[float]:
    """What measuring takes: claims that rest on the same runs are measured together."""
    longest: dict[tuple[str, ...], float] = {}
    for each in claims:
        key = each.judgement.runs
        longest[key] = max(longest.get(key, 0.0), each.judgement.claim.minutes)
    return longest.values()


def _unmeasured(claims: Iterable[ClaimView]) -> list[tuple[str, str, int]]:
    counts: dict[tuple[str, str], int] = {}
    for each in claims:
        if not each.measured:
            key = (each.experiment, each.verdict.value)
            counts[key] = counts.get(key, 0) + 1
    return [(*key, count) for key, count in counts.items()]
