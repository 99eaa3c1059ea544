"""The report as one HTML file that needs nothing else: no network, no script to be read.

Its content policy names the hashes of its one style sheet and its one script, and forbids all else;
so even what an escape missed could not run.
"""

from __future__ import annotations

import base64
import hashlib
import math
import re

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from narrowgauge.report.content import MEANING, REPLAY, ClaimView, Report
from narrowgauge.report.picture import claim_picture, picture_css
from narrowgauge.report.words import duration

__all__ = ["content_policy_of", "environment", "html_report", "page_css"]

#: More exclusions of one claim than these are counted, not listed.
_MOST_EXCLUSIONS = 12
_BETWEEN_THOUSANDS = re.compile(r"(?<=\d) (?=\d{3}(?!\d))")
_SHEET, _SCRIPT = "style.css", "table.js"


def environment(package: str = "narrowgauge.report") -> Environment:
    """jinja2 as every page here wants it: escaping always on, and no undefined names."""
    return Environment(
        loader=PackageLoader(package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )


def page_css() -> str:
    """The style sheet of every page, with the colours of the pictures."""
    return picture_css() + _source(_SHEET)


def content_policy_of() -> str:
    """The report's Content-Security-Policy: its style sheet and script by hash, nothing else."""
    return (
        "default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:;"
        f" style-src '{_hash(page_css())}'; script-src '{_hash(_source(_SCRIPT))}'"
    )


def html_report(report: Report) -> str:
    """The whole report. The same report gives the same text."""
    pictures = {each.anchor: Markup(claim_picture(each)) for each in report.claims}
    pages = environment()
    pages.filters["whole"] = _whole
    return pages.get_template("report.html.j2").render(
        report=report,
        css=Markup(page_css()),
        script=Markup(_source(_SCRIPT)),
        policy=content_policy_of(),
        ranked=sorted(report.claims, key=lambda each: each.rank),
        pictures=pictures,
        energy=[(anchor, card, one) for anchor, card in report.runs for one in card.energy],
        meaning=MEANING,
        replay=REPLAY,
        duration=duration,
        number=_number,
        most=_MOST_EXCLUSIONS,
    )  # fmt: skip


def _whole(text: str) -> str:
    """No line ends within a number: the space between its thousands does not break."""
    return _BETWEEN_THOUSANDS.sub("\N{NO-BREAK SPACE}", text)


def _number(view: ClaimView) -> str:
    """By what the column `here` is sorted; empty where there is no figure."""
    estimate = view.judgement.estimate
    if estimate is None or not math.isfinite(estimate.figure):
        return ""
    return repr(estimate.figure)


def _source(name: str) -> str:
    loader = environment().loader
    assert loader is not None
    return loader.get_source(environment(), name)[0]


def _hash(text: str) -> str:
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return f"sha256-{base64.b64encode(digest).decode('ascii')}"
