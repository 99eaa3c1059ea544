"""The codec: every document survives the trip, and nothing foreign gets in."""

from __future__ import annotations

import dataclasses
import errno
import json
import math
import os
import stat
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Dict, Optional, Tuple, Union

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.codec import (
    LATER,
    decode,
    dumps,
    encode,
    read_json,
    write_atomic,
    write_json_atomic,
)
from narrowgauge_contract.errors import DamagedRecordError, ExitCode
from narrowgauge_contract.outcome import Metric, Row, SideFile, Status, Validity


@dataclasses.dataclass(frozen=True)
class Inner:
    values: Tuple[float, ...]
    status: Status


@dataclasses.dataclass(frozen=True)
class Outer:
    name: str
    count: int
    share: float
    yes: bool
    inner: Tuple[Inner, ...]
    table: Dict[str, Inner]
    either: Union[int, str]
    maybe: Optional[int] = None


@dataclasses.dataclass(frozen=True)
class Grown:
    name: str
    early: Tuple[str, ...] = ()
    late: Tuple[str, ...] = dataclasses.field(default=(), metadata=LATER)


FLOATS = st.floats(allow_nan=False) | st.integers(-(2**60), 2**60).map(float)
INNER = st.builds(
    Inner,
    values=st.lists(FLOATS, max_size=4).map(tuple),
    status=st.sampled_from(list(Status)),
)
OUTER = st.builds(
    Outer,
    name=st.text(),
    count=st.integers(),
    share=FLOATS,
    yes=st.booleans(),
    inner=st.lists(INNER, max_size=3).map(tuple),
    table=st.dictionaries(st.text(), INNER, max_size=3),
    either=st.integers() | st.text(),
    maybe=st.none() | st.integers(),
)


def _document() -> Dict[str, Any]:
    inner = {"values": [1.0], "status": "complete"}
    return {
        "name": "n", "count": 1, "share": 0.5, "yes": True,
        "inner": [inner], "table": {"k": dict(inner)}, "either": 3,
    }  # fmt: skip


@given(OUTER)
def test_a_tree_of_dataclasses_survives_the_trip(value: Outer) -> None:
    assert decode(Outer, json.loads(dumps(value))) == value


@given(st.lists(st.floats(), min_size=1).map(tuple))
def test_every_float_survives_also_the_ones_json_lacks(values: Tuple[float, ...]) -> None:
    metric = Metric("loss", "nat", "monotonic", values)

    text = dumps(metric)

    json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    back = decode(Metric, json.loads(text)).values
    assert len(back) == len(values)
    for one, other in zip(back, values):
        assert math.isnan(one) if math.isnan(other) else one == other


def test_the_same_value_gives_the_same_bytes() -> None:
    one = Row(0, 0, 7, {"b": 1, "a": 2}, Status.COMPLETE, Validity(True))
    other = Row(0, 0, 7, {"a": 2, "b": 1}, Status.COMPLETE, Validity(True))

    assert dumps(one) == dumps(other)
    assert dumps(one).endswith("\n")


@pytest.mark.parametrize(
    ("field", "value", "place"),
    [
        ("count", 1.5, "document.count should be int"),
        ("count", True, "document.count should be int"),
        ("share", "0.5", "document.share should be float"),
        ("share", False, "document.share should be float"),
        ("yes", 1, "document.yes should be bool"),
        ("name", None, "document.name should be str"),
        ("inner", {}, "document.inner should be a list"),
        ("inner", [{"values": [], "status": "done"}], "document.inner[0].status should be one of"),
        ("inner", [{"values": ["x"], "status": "failed"}], "document.inner[0].values[0]"),
        ("table", [], "document.table should be a table"),
        ("table", {"k": 4}, "document.table.k should be a table"),
        ("either", [], "document.either should be int or str"),
        ("maybe", "1", "document.maybe should be int"),
    ],
)
def test_a_wrong_type_is_named_with_its_place(field: str, value: Any, place: str) -> None:
    with pytest.raises(DamagedRecordError) as caught:
        decode(Outer, {**_document(), field: value})

    assert place in str(caught.value)
    assert caught.value.exit_code is ExitCode.RECORD_DAMAGED


def test_a_number_too_large_for_a_float_is_damage_not_a_crash() -> None:
    with pytest.raises(DamagedRecordError, match="share"):
        decode(Outer, {**_document(), "share": 10**400})


def test_an_unknown_field_names_the_nearest() -> None:
    with pytest.raises(DamagedRecordError, match="unknown field 'nmae'") as caught:
        decode(Outer, {**_document(), "nmae": "x"})

    assert "did you mean 'name'?" in str(caught.value)


@pytest.mark.parametrize("field", ["name", "inner", "table", "either"])
def test_a_missing_field_is_named(field: str) -> None:
    document = _document()
    del document[field]

    with pytest.raises(DamagedRecordError, match=f"lacks the field '{field}'"):
        decode(Outer, document)


def test_a_missing_field_with_a_default_is_filled() -> None:
    assert decode(Outer, _document()).maybe is None


def test_what_was_decoded_is_what_its_class_would_have_built() -> None:
    body = {"index": 0, "repeat": 0, "seed": 7, "parameters": {}, "status": "complete",
            "validity": {"valid": True}}  # fmt: skip
    one, other = decode(Row, body), decode(Row, body)

    assert one == Row(0, 0, 7, {}, Status.COMPLETE, Validity(True))
    assert vars(one) == vars(Row(0, 0, 7, {}, Status.COMPLETE, Validity(True)))
    assert one.facts is not other.facts
    with pytest.raises(dataclasses.FrozenInstanceError):
        one.seed = 8  # type: ignore[misc]


@dataclasses.dataclass(frozen=True)
class Even:
    count: int

    def __post_init__(self) -> None:
        if self.count % 2:
            raise ValueError(f"{self.count} is odd")


def test_a_class_that_checks_itself_is_asked() -> None:
    assert decode(Even, {"count": 2}) == Even(2)
    with pytest.raises(ValueError, match="3 is odd"):
        decode(Even, {"count": 3})


def test_a_long_wrong_value_is_cut() -> None:
    with pytest.raises(DamagedRecordError) as caught:
        decode(SideFile, {"path": ["x" * 500], "sha256": "", "bytes": 0})

    assert len(str(caught.value)) < 150


def test_what_has_no_place_in_a_document_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="Path"):
        encode({"path": Path("x")})


class TestFiles:
    def test_a_truncated_file_says_where_it_ends(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        path.write_text(dumps(SideFile("a", "b", 3))[:20])

        with pytest.raises(DamagedRecordError, match="truncated or not JSON") as caught:
            read_json(path)

        assert "20 characters" in caught.value.why
        assert str(path) in caught.value.what

    def test_a_binary_file_is_not_text(self, tmp_path: Path) -> None:
        path = tmp_path / "record.json"
        path.write_bytes(b"\xff\xfe\x00")

        with pytest.raises(DamagedRecordError, match="not text"):
            read_json(path)

    def test_a_write_that_fails_leaves_the_old_file_and_no_litter(self, tmp_path: Path) -> None:
        path = tmp_path / "job.json"
        write_json_atomic(path, {"a": 1})

        with pytest.raises(TypeError):
            write_json_atomic(path, {"a": object()})

        assert read_json(path) == {"a": 1}
        assert [p.name for p in tmp_path.iterdir()] == ["job.json"]

    def test_a_full_disk_leaves_the_old_file_and_no_litter(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.bin"
        write_atomic(path, b"old")

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_atomic(path, b"new")

        assert path.read_bytes() == b"old"
        assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]

    @pytest.mark.parametrize(("number", "fatal"), [(errno.EINVAL, False), (errno.EIO, True)])
    def test_a_folder_that_cannot_be_synced_is_no_failure_of_the_write(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, fatal: bool
    ) -> None:
        """Some network file systems have no fsync for folders; a broken disk is another matter."""
        real, synced = os.fsync, []

        def sync(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(number, os.strerror(number))
            synced.append(descriptor)
            real(descriptor)

        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(OSError, match="output error") if fatal else nullcontext():
            write_atomic(tmp_path / "a.bin", b"new")

        assert len(synced) == 1
        assert (tmp_path / "a.bin").read_bytes() == b"new"


def test_a_field_that_came_later_changes_no_document_that_was_there() -> None:
    before = {"name": "n", "early": []}

    assert encode(decode(Grown, before)) == before
    grown = Grown("n", late=("base",))
    assert encode(grown) == {**before, "late": ["base"]}
    assert decode(Grown, encode(grown)) == grown
