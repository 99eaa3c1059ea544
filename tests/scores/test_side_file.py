"""`logits.npz`: what is written is read, and nothing else is."""

from __future__ import annotations

import dataclasses
import io
import json
import zipfile
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from score_cases import run, split

from narrowgauge_contract.errors import BadValueError, DamagedRecordError, ExitCode
from narrowgauge_scores import side_file
from narrowgauge_scores.side_file import LOGITS_FILE, RunLogits, Split, read_logits, write_logits

#: Every optional thing there is.
FULL = {
    "exit_names": ("first", "second, Füße", "last"),
    "latency": np.array([[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]),
    "device": "a CPU",
    "base_accuracy": 91.5,
    "base_macs": 28_250_000,
    "synthetic": True,
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and np.array_equal(one, other)
    if dataclasses.is_dataclass(one):
        names = [field.name for field in dataclasses.fields(one)]
        return all(_same(getattr(one, name), getattr(other, name)) for name in names)
    return bool(one == other)


@pytest.mark.parametrize("changes", [{}, {"val": None}, FULL])
def test_what_is_written_is_read(tmp_path: Path, changes: Any) -> None:
    before = run(**changes)
    write_logits(tmp_path / LOGITS_FILE, before)

    assert _same(before, read_logits(tmp_path / LOGITS_FILE))


def test_costs_per_image_and_half_precision_are_kept(tmp_path: Path) -> None:
    macs = np.cumsum(np.random.default_rng(0).random((3, 40)) + 1.0, axis=0)
    plain = split()
    test = Split(plain.logits.astype(np.float16), plain.labels, plain.samples, macs)
    write_logits(tmp_path / "a.npz", run(test=test))

    found = read_logits(tmp_path / "a.npz").test
    assert found.logits.dtype == np.float16
    assert np.array_equal(found.macs, macs)


def test_what_the_plain_network_got_right_is_kept(tmp_path: Path) -> None:
    right = (np.arange(40) % 3 == 0).astype(np.uint8)
    write_logits(tmp_path / "a.npz", run(test=_with(base_correct=right)))
    write_logits(tmp_path / "b.npz", run())

    assert _same(read_logits(tmp_path / "a.npz").test.base_correct, right)
    assert read_logits(tmp_path / "b.npz").test.base_correct is None


def test_the_same_run_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.npz", "b.npz"):
        write_logits(tmp_path / name, run(**FULL))

    assert (tmp_path / "a.npz").read_bytes() == (tmp_path / "b.npz").read_bytes()


def test_numpy_reads_the_file_without_us(tmp_path: Path) -> None:
    write_logits(tmp_path / "a.npz", run())
    with np.load(tmp_path / "a.npz", allow_pickle=False) as held:
        assert held["test_logits"].shape == (3, 40, 4)
        assert json.loads(held["meta"].tobytes().decode())["family"] == "toynet"


def _with(**changes: Any) -> Split:
    return dataclasses.replace(split(), **changes)


_NAN = np.full((3, 40, 4), np.nan, np.float32)
_BAD = {
    "NaN or infinity": {"test": _with(logits=_NAN)},
    "float16 or float32": {"test": _with(logits=np.zeros((3, 40, 4)))},
    "fewer than 2 classes": {"test": _with(logits=np.zeros((3, 40, 1), np.float32))},
    "no exit, no image": {"test": _with(logits=np.zeros((0, 40, 4), np.float32))},
    "test_labels should be int64": {"test": _with(labels=np.zeros(40, np.int32))},
    "test_samples should be int64": {"test": _with(samples=np.arange(39))},
    "labels go up to 4": {"test": _with(labels=np.full(40, 4))},
    "name an image twice": {"test": _with(samples=np.zeros(40, np.int64))},
    "test_macs should be": {"test": _with(macs=np.ones((3, 40))[::-1] * [[3], [2], [1]])},
    "test_base_correct should be uint8 [40] of": {
        "test": _with(base_correct=np.full(40, 2, np.uint8))
    },
    "test_base_correct should be uint8": {"test": _with(base_correct=np.ones(40))},
    "base_correct should be": {"test": _with(base_correct=np.ones(39, np.uint8))},
    "other exits or classes": {"val": split(classes=5)},
    "cumulative_macs should be": {"cumulative_macs": np.array([3, 2, 1])},
    "direct_macs should be": {"direct_macs": np.array([0, 2, 3])},
    "2 names for 3 exits": {"exit_names": ("a", "b")},
    "latency should be": {"latency": np.zeros((3, 5))},
    "base_accuracy is 101": {"base_accuracy": 101},
    "base_macs is": {"base_macs": -1},
    "family and data": {"family": ""},
    "direct_macs are above": {"direct_macs": np.array([2_000_000, 9_000_001, 28_000_000])},
    "10001 repeats": {"latency": np.ones((3, 10_001))},
    "exit_names are no tuple": {"exit_names": "abc"},
    "variant: 'a\\x1b[31m'": {"variant": "a\x1b[31m"},
    "family: '\\ud800'": {"family": "\ud800"},
    "device: 'a\\nb'": {"device": "a\nb"},
    "exit_names: '\\u202ea'": {"exit_names": ("\u202ea", "b", "c")},
    "data: 'xxxx": {"data": "x" * 1001},
}


@pytest.mark.parametrize("words", list(_BAD))
def test_what_is_no_answer_is_not_written(tmp_path: Path, words: str) -> None:
    with pytest.raises(BadValueError) as told:
        write_logits(tmp_path / "a.npz", run(**_BAD[words]))

    assert words in told.value.why
    assert told.value.next_step
    assert not (tmp_path / "a.npz").exists()


def test_a_missing_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(DamagedRecordError, match="missing") as told:
        read_logits(tmp_path / "none.npz")

    assert told.value.next_step


def _archive(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_foreign_files_are_told_as_such(tmp_path: Path) -> None:
    text = tmp_path / "text.npz"
    text.write_text("no archive", encoding="utf-8")
    foreign = json.dumps({"kind": "other", "format": 1}).encode()
    cases = [
        (text, "truncated or damaged"),
        (_archive(tmp_path / "plain.npz", logits=np.zeros(3)), "no file of an anytime"),
        (_archive(tmp_path / "other.npz", meta=np.frombuffer(foreign, np.uint8)), "no file of an"),
        (_archive(tmp_path / "list.npz", meta=np.frombuffer(b"[1]", np.uint8)), "no file of an"),
    ]
    for path, words in cases:
        with pytest.raises(DamagedRecordError, match=words) as told:
            read_logits(path)
        assert told.value.exit_code is ExitCode.RECORD_DAMAGED
        assert told.value.why
        assert told.value.next_step


def test_a_pickle_inside_is_never_loaded(tmp_path: Path) -> None:
    write_logits(tmp_path / "a.npz", run())
    stream = io.BytesIO()
    np.lib.format.write_array(stream, np.array([{"a": 1}], object), allow_pickle=True)
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("val_macs.npy", stream.getvalue())

    with pytest.raises(DamagedRecordError):
        read_logits(tmp_path / "a.npz")


def _rewritten(path: Path, **changes: Any) -> Path:
    """The file with some arrays and fields of its meta replaced; None removes one."""
    with np.load(path) as held:
        arrays = {name: held[name] for name in held.files}
    meta = json.loads(arrays["meta"].tobytes().decode())
    for name, value in changes.items():
        if isinstance(value, np.ndarray):
            arrays[name] = value
        elif name in arrays:
            del arrays[name]
        elif value is None:
            del meta[name]
        else:
            meta[name] = value
    arrays["meta"] = np.frombuffer(json.dumps(meta).encode(), np.uint8)
    np.savez(path, **arrays)
    return path


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": 2}, "format 2"),
        ({"format": True}, "format True"),
        ({"format": 1.0}, "format 1.0"),
        ({"seed": True}, "another type"),
        ({"exit_names": "abc"}, "no texts"),
        ({"base_accuracy": True}, "no number"),
        ({"base_macs": 1.5}, "no number"),
        ({"variant": "\x1b]0;title\x07"}, "can be printed"),
        ({"family": "\ud800"}, "can be printed"),
        ({"direct_macs": np.array([2_000_000, 9_000_001, 28_000_000])}, "above cumulative"),
        ({"extra": np.zeros(3)}, "no entry of such a file"),
        ({"family": 3}, "no text"),
        ({"seed": "a"}, "another type"),
        ({"exit_names": [1]}, "no texts"),
        ({"base_macs": "many"}, "no number"),
        ({"device": None}, "device"),
        ({"test_labels": None}, "test_labels"),
        ({"val_samples": None}, "val_samples"),
        ({"test_logits": np.full((3, 40, 4), np.inf, np.float32)}, "infinity"),
        ({"cumulative_macs": np.array([1, 2])}, "cumulative_macs"),
    ],
)
def test_a_changed_file_is_told(tmp_path: Path, changes: Any, words: str) -> None:
    write_logits(tmp_path / "a.npz", run())
    with pytest.raises(DamagedRecordError) as told:
        read_logits(_rewritten(tmp_path / "a.npz", **changes))

    assert words in str(told.value)


def _npy(header: bytes, body: bytes = b"") -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + body


_HEADERS = {
    "a vast shape": b"{'descr': '<i8', 'fortran_order': False, 'shape': (" + b"9, " * 999
    + b"), }\n",
    "an open bracket": b"{'descr': '<i8', 'fortran_order': False, 'shape': (3,), (\n",
    "an open text": b"{'descr': \'\'\'<i8, }\n",
    "too much indentation": b"  {'a': 1}\n {'b': 2}\n",
    "no type at all": b"{'descr': [], 'fortran_order': False, 'shape': (3,), }\n",
    "an empty type": b"{'descr': [()], 'fortran_order': False, 'shape': (3,), }\n",
    "objects": b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }\n",
    "another width": b"{'descr': '<f1', 'fortran_order': False, 'shape': (24,), }\n",
    "less than nothing": b"{'descr': '<i8', 'fortran_order': False, 'shape': (-3,), }\n",
    "more than there is": b"{'descr': '<i8', 'fortran_order': False, 'shape': (4,), }\n",
    "more than anybody has": b"{'descr': '<i8', 'fortran_order': False, 'shape': (9" + b"9" * 17
    + b", 99999), }\n",
    "deep brackets": b"(" * 5000 + b"\n",
    "nothing": b"",
}  # fmt: skip


def _repacked(path: Path, content: bytes, method: int = zipfile.ZIP_STORED) -> Path:
    """The file with other bytes for the entry of the costs."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, old in entries.items():
            archive.writestr(name, content if name == "cumulative_macs.npy" else old)
    return path


@pytest.mark.parametrize("kind", list(_HEADERS))
def test_a_crafted_header_in_a_valid_archive_is_refused(tmp_path: Path, kind: str) -> None:
    write_logits(tmp_path / "a.npz", run())
    content = _npy(_HEADERS[kind], np.array([2, 9, 30]).tobytes())
    with pytest.raises(DamagedRecordError, match="truncated or damaged") as told:
        read_logits(_repacked(tmp_path / "a.npz", content))

    assert "entry" in told.value.why or "cumulative" in told.value.why
    assert told.value.next_step


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(header=st.text(alphabet="{}()[]'\"\\\n ,:-<i8descrshapfonF_", max_size=60))
def test_any_header_is_read_or_refused(tmp_path: Path, good: bytes, header: str) -> None:
    path = tmp_path / "header.npz"
    path.write_bytes(good)
    _read_or_refused(_repacked(path, _npy(header.encode())))


def test_a_header_that_numpy_turned_round_is_read(tmp_path: Path) -> None:
    before = run()
    write_logits(tmp_path / "a.npz", before)
    turned = np.asfortranarray(before.test.logits)

    found = read_logits(_rewritten(tmp_path / "a.npz", test_logits=turned))
    assert _same(found.test, before.test)


@pytest.mark.parametrize("method", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_other_compressions_are_refused_unopened(tmp_path: Path, method: int) -> None:
    write_logits(tmp_path / "a.npz", run())
    with pytest.raises(DamagedRecordError) as told:
        read_logits(_repacked(tmp_path / "a.npz", b"", method))

    assert f"packed by method {method}" in told.value.why


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    write_logits(tmp_path / "a.npz", run())
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive, pytest.warns(
        UserWarning, match="Dup"
    ):
        archive.writestr("meta.npy", b"")
    with pytest.raises(DamagedRecordError, match="damaged") as told:
        read_logits(tmp_path / "a.npz")

    assert "one name" in told.value.why


def test_what_would_fill_the_memory_is_refused_unopened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_logits(tmp_path / "a.npz", run())
    monkeypatch.setattr(side_file, "_MOST_BYTES", 1000)
    with pytest.raises(DamagedRecordError) as told:
        read_logits(tmp_path / "a.npz")
    with pytest.raises(BadValueError) as refused:
        write_logits(tmp_path / "b.npz", run())

    assert "1000 are the most" in told.value.why
    assert "1000 are the most" in refused.value.why


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "a.npz"
    write_logits(path, run(**FULL))
    return path.read_bytes()


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_an_error_of_ours_or_changes_nothing(
    tmp_path: Path, good: bytes, data: st.DataObject
) -> None:
    """Cut, flipped or overwritten anywhere: never another exception, never half an answer."""
    kind = data.draw(st.sampled_from(["cut", "flip", "overwrite"]))
    place = data.draw(st.integers(0, len(good) - 1))
    body = bytearray(good)
    if kind == "cut":
        body = body[:place]
    elif kind == "flip":
        body[place] ^= 1 << data.draw(st.integers(0, 7))
    else:
        junk = data.draw(st.binary(min_size=1, max_size=30))
        body[place : place + len(junk)] = junk
    path = tmp_path / "damaged.npz"
    path.write_bytes(bytes(body))
    found = _read_or_refused(path)

    # What zip does not check (dates, a comment) holds no answer.
    assert found is None or _same(found.test, run(**FULL).test)


def _read_or_refused(path: Path) -> Optional[RunLogits]:
    """None where it is refused, in our way; any other exception fails the test."""
    try:
        return read_logits(path)
    except DamagedRecordError as error:
        if not error.why or not error.next_step:
            raise
        return None


_JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    name=st.sampled_from(["family", "seed", "exit_names", "base_macs", "base_accuracy", "format"]),
    value=_JUNK.filter(lambda each: each is not None),
)
def test_any_meta_is_read_or_refused(tmp_path: Path, good: bytes, name: str, value: Any) -> None:
    path = tmp_path / "meta.npz"
    path.write_bytes(good)
    _read_or_refused(_rewritten(path, **{name: value}))
