"""Texts that anybody wrote, shown in a terminal: what steers one is shown by its code."""

from __future__ import annotations

import io
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.panel import Panel
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from narrowgauge.screen import Screen
from narrowgauge.terminal import plain


def test_what_steers_is_shown_and_what_reads_stays() -> None:
    assert plain("a\x1b[2Jb") == "a\\x1b[2Jb"
    assert plain("a\nb\rc\td") == "a\\nb\\rc\\td"
    assert plain("a\u202eb\x9bc") == "a\\u202eb\\x9bc"
    assert plain("3.5 µs, 5 × 2 – 中文") == "3.5 µs, 5 × 2 – 中文"


@settings(max_examples=100)
@given(st.text(max_size=60))
def test_any_text_becomes_printable(text: str) -> None:
    assert plain(text).isprintable()
    assert plain(plain(text)) == plain(text)


HOSTILE = "a\x1b[2Jb\x1b]0;title\x07 [bold]c[/bold]\r\u202e"


def shown(*things: object, terminal: bool = False) -> str:
    stream = io.StringIO()
    screen = Screen(file=stream, width=200, force_terminal=terminal)
    for thing in things:
        screen.print(thing)
    return stream.getvalue()


def table(cell: object) -> Table:
    made = Table("name", "value")
    made.add_row("x", cell)  # type: ignore[arg-type]
    return made


@pytest.mark.parametrize("terminal", [False, True])
def test_nothing_that_is_printed_steers_the_screen(terminal: bool) -> None:
    """As a string, as a text, in a table's cell, in a panel and in its title."""
    every = [HOSTILE, Text(HOSTILE), table(HOSTILE), table(Text(HOSTILE))]
    every += [Panel(Text(HOSTILE), title=Text(HOSTILE))]
    for thing in every:
        text = re.sub(r"\x1b\[[0-9;]*m", "", shown(thing, terminal=terminal))  # rich's own colours
        assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", text), thing
        assert "a\\x1b[2Jb" in text
        assert "[bold]" in text, "markup in a string is text"


def test_columns_stay_in_line() -> None:
    lines = shown(table("\x1b" * 9)).splitlines()
    assert len({len(line) for line in lines}) == 1


def test_a_progress_bar_still_moves_the_cursor() -> None:
    stream = io.StringIO()
    with Progress(console=Screen(file=stream, force_terminal=True)) as bar:
        bar.update(bar.add_task("run", total=2.0), advance=1.0)
        bar.refresh()
    assert "\x1b[" in stream.getvalue()


def test_every_command_prints_on_a_screen() -> None:
    source = Path(__file__).parents[2] / "src" / "narrowgauge"
    made = [
        path.name for path in source.rglob("*.py") if re.search(r"\bConsole\(", path.read_text())
    ]
    assert made == []
