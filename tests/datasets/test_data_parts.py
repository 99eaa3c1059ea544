"""Joining the parts of a packed set on a bare host: any order, a few at a time, nothing half."""

from __future__ import annotations

import hashlib
import json
import lzma
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest
from data_cases import asking
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.codec import encode
from narrowgauge_data.cli import main
from narrowgauge_data.parts import (
    MAGIC,
    Block,
    DamagedPartError,
    Joined,
    PackedFile,
    PartHeader,
    from_planes,
    join,
    to_planes,
)

CONTENT = {"a.u8": bytes(range(256)) * 3, "b.u8": b"labels"}


def _parts(
    folder: Path, pack: str = "p" * 16, names: Optional[Dict[str, str]] = None
) -> List[Path]:
    """Three parts: two halves of a.u8, one through colour planes, and b.u8."""
    half = 384
    pieces = [("a.u8", 0, half, 0), ("a.u8", half, half, 8), ("b.u8", 0, 6, 0)]
    files = {
        name: PackedFile(len(raw), hashlib.sha256(raw).hexdigest()) for name, raw in CONTENT.items()
    }
    paths = []
    for number, (name, offset, size, plane) in enumerate(pieces, start=1):
        raw = CONTENT[name][offset : offset + size]
        packed = lzma.compress(to_planes(raw, plane) if plane else raw)
        digest = hashlib.sha256(packed).hexdigest()
        stored = (names or {}).get(name, name)
        block = Block(stored, offset, size, len(packed), digest, plane)
        header = PartHeader("tiny", pack, number, 3, files, (block,))
        path = folder / f"tiny.{number}-of-3.ngpack"
        path.write_bytes(MAGIC + json.dumps(encode(header)).encode() + b"\n" + packed)
        paths.append(path)
    return paths


def _assert_whole(data: Path) -> None:
    found = {p.name: p.read_bytes() for p in (data / "tiny").iterdir()}
    assert found.pop("verified.json")
    assert found == CONTENT
    assert sorted(p.name for p in data.iterdir()) == [".tiny.lock", "tiny"]


def _join(parts: List[Path], data: Path) -> Joined:
    [result] = join(parts, data, asking())
    return result


@given(st.integers(1, 6), st.integers(1, 9), st.data())
def test_colour_planes_come_back(images: int, plane: int, data: st.DataObject) -> None:
    raw = data.draw(st.binary(min_size=images * 3 * plane, max_size=images * 3 * plane))

    assert from_planes(to_planes(raw, plane), plane) == raw


def test_red_and_blue_are_differences_from_green() -> None:
    assert to_planes(bytes([10, 7, 5]), 1) == bytes([7, 3, 254])


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_parts_may_come_in_any_order(tmp_path: Path, order: Tuple[int, ...]) -> None:
    parts = _parts(tmp_path)
    data = tmp_path / "data"

    result = _join([parts[i] for i in order], data)

    assert (result.folder, result.missing) == (data / "tiny", ())
    _assert_whole(data)


def test_parts_may_come_one_at_a_time_and_twice(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    data = tmp_path / "data"

    assert _join([parts[1]], data).missing == (1, 3)
    assert _join([parts[1], parts[0]], data).missing == (3,)
    assert not (data / "tiny").exists()
    assert _join([parts[2]], data).missing == ()
    _assert_whole(data)


def test_a_damaged_part_changes_nothing_and_can_come_again(tmp_path: Path) -> None:
    parts = _parts(tmp_path)
    data = tmp_path / "data"
    whole = parts[1].read_bytes()
    _join([parts[0]], data)
    parts[1].write_bytes(whole[:-3] + b"xyz")

    with pytest.raises(DamagedPartError, match="damaged or truncated"):
        _join([parts[1]], data)

    parts[1].write_bytes(whole)
    assert _join([parts[1], parts[2]], data).missing == ()
    _assert_whole(data)


@pytest.mark.parametrize("keep", [0, 10, len(MAGIC), len(MAGIC) + 30, -1])
def test_a_truncated_part_is_damage(tmp_path: Path, keep: int) -> None:
    part = _parts(tmp_path)[0]
    part.write_bytes(part.read_bytes()[:keep])

    with pytest.raises(DamagedPartError):
        _join([part], tmp_path / "data")


def test_parts_of_two_packings_never_mix(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    (tmp_path / "y").mkdir()
    one, other = _parts(tmp_path / "x", "p" * 16), _parts(tmp_path / "y", "q" * 16)
    data = tmp_path / "data"

    _join(one[:2], data)

    assert _join([other[2]], data).missing == (1, 2)
    assert not (data / "tiny").exists()


@pytest.mark.parametrize("name", ["../evil.u8", "/tmp/evil.u8", ".hidden", "other.u8"])
def test_a_part_cannot_write_outside_its_folder(tmp_path: Path, name: str) -> None:
    part = _parts(tmp_path, names={"a.u8": name})[0]

    with pytest.raises(DamagedPartError):
        _join([part], tmp_path / "data")

    assert not (tmp_path / "evil.u8").exists()
    assert not (tmp_path / "data").exists()


def test_a_set_of_another_content_than_declared_is_refused(tmp_path: Path) -> None:
    part = _parts(tmp_path)[0]
    part.write_bytes(part.read_bytes().replace(b'"tiny"', b'"mnist"'))

    with pytest.raises(DamagedPartError, match="another mnist than this program declares"):
        _join([part], tmp_path / "data")


@pytest.mark.parametrize("pack", ["../../evil", "", "a/b"])
def test_a_packing_cannot_name_a_folder_elsewhere(tmp_path: Path, pack: str) -> None:
    part = _parts(tmp_path, pack)[0]

    with pytest.raises(DamagedPartError, match="outside its folder"):
        _join([part], tmp_path / "data")


class TestSetThatIsWhole:
    def test_no_part_is_taken_again(self, tmp_path: Path) -> None:
        """It was staged again, and the set swapped for an equal one under a run's feet."""
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts, data)
        before = (data / "tiny").stat()

        again = _join([parts[1]], data)

        assert (again.folder, again.before) == (data / "tiny", True)
        assert "already; nothing to do" in again.sentence
        assert (data / "tiny").stat() == before
        _assert_whole(data)

    def test_parts_that_were_waiting_are_removed(self, tmp_path: Path) -> None:
        """Part 1 was taken, and then the set came another way."""
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts[:1], data)
        for name, content in CONTENT.items():
            (data / "tiny").mkdir(exist_ok=True)
            (data / "tiny" / name).write_bytes(content)

        assert _join([parts[1]], data).before
        _assert_whole(data)

    def test_one_that_is_corrupt_is_made_again(self, tmp_path: Path) -> None:
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts, data)
        (data / "tiny" / "b.u8").write_bytes(b"other!")

        assert _join(parts[:2], data).missing == (3,)
        assert not _join(parts[2:], data).before
        _assert_whole(data)


def test_the_command_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parts = [str(part) for part in _parts(tmp_path)]
    data = ["--data", str(tmp_path / "data")]

    assert main(["join", parts[0], *data], {}) == 0
    assert capsys.readouterr().out == "tiny: taken; still missing part 2, 3\n"
    assert main(["join", *parts[1:], *data], {}) == 0
    assert "complete and verified" in capsys.readouterr().out
    assert main(["join", parts[2], *data], {}) == 0
    assert "already; nothing to do" in capsys.readouterr().out
    (tmp_path / "foreign").write_text("x")
    assert main(["join", str(tmp_path / "foreign"), *data], {}) == 21
    assert "not a part of a packed data set" in capsys.readouterr().err
    assert main(["join", str(tmp_path / "none"), *data], {}) == 20
    assert f"cannot read {tmp_path / 'none'}" in capsys.readouterr().err
