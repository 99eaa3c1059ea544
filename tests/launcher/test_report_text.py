"""Texts that anybody can have written come out inert in every format."""

from __future__ import annotations

import csv
import io
import re
import unicodedata

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt
from report_cases import HOSTILE

from narrowgauge.report.text import clean, code_block, csv_cell, label, latex, markdown

TEXTS = st.text(st.characters(), max_size=60) | st.sampled_from(HOSTILE)
#: What TeX reads as more than the letter itself, where nothing escapes it.
TEX_ACTIVE = re.compile(r"(?<!\\)[#%&$^_~]")


def _acting(text: str) -> list[str]:
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]


@settings(max_examples=60)
@given(TEXTS)
def test_nothing_that_acts_stays_in_a_clean_text(text: str) -> None:
    assert _acting(clean(text)) == []
    assert [c for c in _acting(clean(text, lines=True)) if c != "\n"] == []
    clean(text).encode("utf-8")


def test_what_is_taken_out_leaves_a_trace() -> None:
    assert clean("\x1b[31mred\x07") == "\ufffd[31mred\ufffd"
    assert clean("a\u202eb") == "a\ufffdb"
    assert clean("two\r\nlines\tand a tab") == "two lines and a tab"
    assert clean("two\r\nlines", lines=True) == "two\nlines"


def test_long_texts_are_cut_and_say_so() -> None:
    assert clean("x" * 5000).endswith("x…")
    assert len(label("x" * 5000)) == 160
    assert label("short") == "short"


def test_what_people_write_stays_as_it_is() -> None:
    words = "Grüße, 9.7 s ± 10 % (×2, µs) – “quoted” 日本語 ☃"

    assert clean(words) == words


@settings(max_examples=60)
@given(TEXTS)
def test_markdown_renders_to_the_text_alone(text: str) -> None:
    page = f"| a | b |\n| --- | --- |\n| {markdown(text)} | end |\n"
    tokens = MarkdownIt("gfm-like", {"linkify": False}).parse(page)
    cells = [t for t in tokens if t.type == "inline"]

    assert len(cells) == 4, "the row keeps its two cells"
    kinds = {child.type for child in cells[2].children or []}
    assert kinds <= {"text", "text_special"}
    shown = "".join(child.content for child in cells[2].children or [])
    assert shown.split() == clean(text).split()


@settings(max_examples=60)
@given(TEXTS)
def test_markdown_begins_no_list_heading_or_rule(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(f"above\n\n{markdown(text)}\n")

    assert {t.type for t in tokens} <= {"paragraph_open", "inline", "paragraph_close"}


@pytest.mark.parametrize(
    ("text", "escaped"),
    [
        ("http://evil.example", "http\\://evil.example"),
        ("see www.evil.example", "see www\\.evil.example"),
        ("1. first", "1\\. first"),
        ("1.5 ± 10 %", "1.5 ± 10 %"),
        ("- item", "\\- item"),
        ("a@b.example", "a\\@b.example"),
    ],
)
def test_links_and_lists_are_escaped(text: str, escaped: str) -> None:
    assert markdown(text) == escaped


@settings(max_examples=40)
@given(st.text(st.sampled_from("`~\n a"), max_size=30) | TEXTS)
def test_a_code_block_is_not_closed_from_within(text: str) -> None:
    tokens = MarkdownIt("commonmark").parse(code_block(text) + "\n\nafter\n")

    assert [t.type for t in tokens][:1] == ["fence"]
    assert [t.content for t in tokens if t.type == "inline"] == ["after"]


@settings(max_examples=80)
@given(TEXTS)
def test_latex_has_no_command_but_our_own(text: str) -> None:
    found = latex(text)
    commands = set(re.findall(r"\\([a-zA-Z]+)", found))

    assert commands <= {
        "textbackslash", "textasciicircum", "textasciitilde", "textless", "textgreater", "textbar",
        "textquotedbl", "textasciigrave", "times", "cdot", "pm", "leq", "geq", "neq", "approx",
        "mu", "ldots", "rightarrow",
    }  # fmt: skip
    plain = re.sub(r"\$(?:\\[a-z]+|-)\$", "", found)
    assert TEX_ACTIVE.findall(plain) == []
    assert plain.replace(r"\{", "").replace(r"\}", "").count("{") == plain.replace(
        r"\{", ""
    ).replace(r"\}", "").count("}")


def test_latex_sets_what_it_can() -> None:
    assert latex("Grüße × 2 ± 1 %") == r"Grüße $\times$ 2 $\pm$ 1 \%"
    assert latex("--profile") == "-{}-{}profile"
    assert latex("日本") == "??"


@settings(max_examples=60)
@given(TEXTS)
@example("-1+1")
def test_no_cell_begins_a_formula(text: str) -> None:
    stream = io.StringIO()
    csv.writer(stream).writerow([csv_cell(text), "end"])
    (cells,) = csv.reader(io.StringIO(stream.getvalue()))

    assert cells[1] == "end"
    assert not cells[0].lstrip().startswith(("=", "+", "-", "@"))
