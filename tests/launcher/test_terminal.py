"""Texts that anybody wrote, shown in a terminal: what steers one is shown by its code."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

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
