"""Fast JSON: what the standard library says of the same bytes, whatever they are."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from narrowgauge.json_text import members_of, parse_json

#: Numbers as JSON writes them, with more digits than a float holds.
NUMBERS = st.from_regex(r"\A-?(0|[1-9][0-9]{0,40})(\.[0-9]{1,40})?([eE][+-]?[0-9]{1,3})?\Z")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def _told(read: Any, raw: bytes) -> str:
    """The value, to the last bit and with its types, or the error."""
    try:
        return repr(read(raw))
    except (ValueError, RecursionError) as error:
        return type(error).__name__


@given(VALUES)
def test_any_document_reads_the_same(value: Any) -> None:
    raw = json.dumps(value).encode()

    assert _told(parse_json, raw) == _told(json.loads, raw)


@given(NUMBERS)
@example("18446744073709551616")
@example("-0")
@example("-0.0")
@example("1e400")
@example("2.2250738585072011e-308")
@example("9007199254740993.0")
@example("1" * 4301)
def test_every_number_reads_the_same_to_the_last_bit(text: str) -> None:
    raw = text.encode()

    assert _told(parse_json, raw) == _told(json.loads, raw)


@given(st.binary(max_size=40))
@example(b'{"a": 1, "a": 2}')
@example(b"NaN")
@example(b'"\\ud800"')
@example(b'"\xff"')
@example(b"\xef\xbb\xbf1")
@example('"\u00e9"'.encode("utf-16"))
@example(b"[1,]")
@example(b"1 2")
@example(b"")
@example(b"[" * 100_000)
def test_any_bytes_are_read_or_refused_the_same(raw: bytes) -> None:
    assert _told(parse_json, raw) == _told(json.loads, raw)


def test_members_are_the_texts_as_they_stand() -> None:
    found = members_of(b'{"rows": [ 1.50,\n 2 ],"a":{"b": "c"}}')

    assert found == {"rows": b"[ 1.50,\n 2 ]", "a": b'{"b": "c"}'}


@pytest.mark.parametrize("raw", [b"[1]", b"3", b"", b'{"a": NaN}', b'{"a": 1'])
def test_what_has_no_members_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        members_of(raw)
