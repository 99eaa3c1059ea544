"""Joining the parts of a packed set on a bare host: any order, a few at a time, nothing half."""

from __future__ import annotations

import hashlib
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Dict, List, Optional, Tuple

import pytest
from data_cases import asking
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge_contract.codec import encode
from narrowgauge_contract.errors import DataUnavailableError
from narrowgauge_data import local
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

#: Where the package under test lies.
SOURCE = Path(local.__file__).parents[1]
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


def _one_part(tmp_path: Path, content: bytes = b"labels", **changes: object) -> Path:
    """A part of a set of one file; `changes` go to its block, and to its header."""
    digest = hashlib.sha256(content).hexdigest()
    packed = lzma.compress(content)
    block = {
        "file": "b.u8", "offset": 0, "bytes": len(content), "packed": len(packed),
        "sha256": hashlib.sha256(packed).hexdigest(), "plane": 0,
    }  # fmt: skip
    header = {
        "name": "tiny", "pack": "p" * 16, "part": 1, "parts": 1,
        "files": {"b.u8": {"bytes": len(content), "sha256": digest}},
    }  # fmt: skip
    blocks = [{**block, **{name: changes[name] for name in changes if name in block}}]
    document = {**header, "blocks": blocks}
    document.update({name: changes[name] for name in changes if name not in block})
    path = tmp_path / "tiny.ngpack"
    path.write_bytes(MAGIC + json.dumps(document).encode() + b"\n" + packed)
    return path


@pytest.mark.parametrize("name", ["taken.json", "verified.json"])
def test_a_file_cannot_have_a_name_of_our_own(tmp_path: Path, name: str) -> None:
    digest = hashlib.sha256(b"labels").hexdigest()
    part = _one_part(tmp_path, file=name, files={name: {"bytes": 6, "sha256": digest}})

    with pytest.raises(DamagedPartError, match="a name of our own"):
        _join([part], tmp_path / "data")

    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"offset": -1}, "does not fit into its file"),
        ({"offset": 1}, "does not fit into its file"),
        ({"bytes": 0}, "does not fit into its file"),
        ({"bytes": 7}, "does not fit into its file"),
        ({"packed": -1}, "does not fit into its file"),
        ({"packed": 1 << 60}, "damaged or truncated"),
        ({"plane": -1}, "does not fit into its file"),
        ({"part": 0}, "part 0 of 1"),
        ({"part": 2}, "part 2 of 1"),
        ({"part": 1, "parts": 10**9}, "part 1 of 1000000000"),
        ({"files": {}}, "declares no file"),
        ({"blocks": []}, "holds nothing of it"),
    ],
)
def test_odd_numbers_are_damage(tmp_path: Path, changes: Dict[str, object], said: str) -> None:
    with pytest.raises(DamagedPartError, match=said):
        _join([_one_part(tmp_path, **changes)], tmp_path / "data")

    assert not (tmp_path / "data" / "tiny").exists()


def test_a_header_that_nests_without_end_is_damage(tmp_path: Path) -> None:
    (tmp_path / "x.ngpack").write_bytes(MAGIC + b"[" * 200_000 + b"\n")

    with pytest.raises(DamagedPartError, match=r"the header of .* is damaged"):
        _join([tmp_path / "x.ngpack"], tmp_path / "data")


def test_a_block_is_unpacked_no_further_than_it_says(tmp_path: Path) -> None:
    """200 MB of zeros are 30 kB packed."""
    part = _one_part(tmp_path, bytes(200_000_000), bytes=10)
    code = (
        "import resource, sys\n"
        "resource.setrlimit(resource.RLIMIT_AS, (150 << 20, 150 << 20))\n"
        "from narrowgauge_data.cli import main\n"
        "sys.exit(main(sys.argv[1:], {}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "join", str(part), "--data", str(tmp_path / "data")],
        env={"PYTHONPATH": str(SOURCE)}, capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert done.returncode == 21, done.stderr
    assert "does not unpack to the size that it declares" in done.stderr


class TestFailedFinish:
    def test_parts_of_good_files_stay(self, tmp_path: Path) -> None:
        """A file that was gathered was damaged on the disk."""
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts[:1] + parts[2:], data)
        [gathered] = data.glob(".tiny.*.unpacking")
        (gathered / "a.u8").write_bytes(b"x" * 384)

        with pytest.raises(DamagedPartError, match=r"a\.u8 is not what was packed") as caught:
            _join(parts[1:2], data)

        assert caught.value.next_step.endswith("the others stay: 1, 2")
        assert _join(parts[:1], data).missing == (2,)
        assert _join(parts[1:2], data).missing == ()
        _assert_whole(data)

    def test_a_file_of_which_nothing_came_is_damage(self, tmp_path: Path) -> None:
        """Each of two parts leaves it to the other."""
        digest = hashlib.sha256(b"labels").hexdigest()
        files = {name: {"bytes": 6, "sha256": digest} for name in ("b.u8", "c.u8")}
        (tmp_path / "x").mkdir()
        parts = [
            _one_part(tmp_path, parts=2, files=files),
            _one_part(tmp_path / "x", parts=2, part=2, files=files),
        ]

        with pytest.raises(DamagedPartError, match=r"c\.u8 is not what was packed") as caught:
            _join(parts, tmp_path / "data")

        assert "no part holds any of it" in caught.value.why
        assert _join(parts[:1], tmp_path / "data").missing == (2,)

    @pytest.mark.parametrize("content", [b"[1, 2]", b"\xff", b'{"parts": {"x": []}}'])
    def test_notes_that_cannot_be_read_cost_the_parts_only(
        self, tmp_path: Path, content: bytes
    ) -> None:
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts[:1], data)
        [gathered] = data.glob(".tiny.*.unpacking")
        (gathered / "taken.json").write_bytes(content)

        assert _join(parts[1:2], data).missing == (1, 3)
        assert _join(parts, data).missing == ()
        _assert_whole(data)


class TestFolderOfTheUser:
    """A part may name its set as a folder that is no data set."""

    @pytest.mark.parametrize("kind", ["folder", "file", "link"])
    def test_it_is_refused_and_stays(self, tmp_path: Path, kind: str) -> None:
        parts, data = _parts(tmp_path), tmp_path / "data"
        place = data / "tiny"
        data.mkdir()
        if kind == "folder":
            place.mkdir()
            (place / "thesis.txt").write_text("mine")
        elif kind == "file":
            place.write_text("mine")
        else:
            place.symlink_to(tmp_path / "gone")

        with pytest.raises(DataUnavailableError, match="is no data set of ours") as caught:
            _join(parts, data)

        assert "--data DIR" in caught.value.next_step
        assert sorted(path.name for path in data.iterdir()) == [".tiny.lock", "tiny"]
        if kind == "folder":
            assert [path.name for path in place.iterdir()] == ["thesis.txt"]

    def test_files_beside_a_set_that_is_joined_again_stay(self, tmp_path: Path) -> None:
        parts, data = _parts(tmp_path), tmp_path / "data"
        _join(parts, data)
        (data / "tiny" / "b.u8").write_bytes(b"other!")
        (data / "tiny" / "mine.txt").write_text("mine")

        assert _join(parts, data).missing == ()

        assert (data / "tiny" / "mine.txt").read_text() == "mine"
        (data / "tiny" / "mine.txt").unlink()
        _assert_whole(data)


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
