"""Packing a set into parts, and that joining makes the same set of them."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Dict, List, Type

import numpy as np
import pytest
from data_cases import COLOUR, GREY, asking, dataset, write

from narrowgauge_contract.datasets import DataSet
from narrowgauge_contract.errors import (
    BadValueError,
    DataCorruptError,
    DataUnavailableError,
    DiskFullError,
    NarrowgaugeError,
)
from narrowgauge_data import local
from narrowgauge_data.pack import Pack, pack, parse_size
from narrowgauge_data.parts import DamagedPartError, join, read_header

ROOT = Path(__file__).parents[2]
#: Where the package under test lies.
SOURCE = Path(local.__file__).parents[1]


def _smooth(count: int) -> np.ndarray:
    """Colour images that compress as photographs do: a slope, noise, and channels alike."""
    chance = np.random.default_rng(1)
    slope = np.add.outer(np.arange(32), np.arange(32))
    base = slope + chance.integers(0, 100, (count, 1, 1, 1))
    grey = base + chance.integers(0, 12, (count, 1, 32, 32))
    return (grey + chance.integers(0, 4, (count, 3, 32, 32))).astype(np.uint8)


BIG = {**COLOUR, "train-images.u8": _smooth(600), "test-images.u8": _smooth(50)}


def _pack(tmp_path: Path, content: Dict[str, np.ndarray], most: int = 300_000) -> Pack:
    write(tmp_path / "data" / "tiny", {name: a.tobytes() for name, a in content.items()})
    return pack(
        dataset(content), tmp_path / "data", tmp_path / "out", most=most, block=100_000,
        caller=asking(),
    )  # fmt: skip


@pytest.mark.parametrize("content", [GREY, COLOUR, BIG], ids=["grey", "colour", "big"])
def test_packed_and_joined_is_the_same_set(tmp_path: Path, content: Dict[str, np.ndarray]) -> None:
    made = _pack(tmp_path, content)

    [result] = join(list(reversed(made.parts)), tmp_path / "there", asking())

    assert result.folder == tmp_path / "there" / "tiny"
    for name, array in content.items():
        assert (result.folder / name).read_bytes() == array.tobytes()


def test_no_part_is_larger_than_asked_and_each_is_in_the_manifest(tmp_path: Path) -> None:
    made = _pack(tmp_path, BIG)

    assert len(made.parts) > 2
    assert all(part.stat().st_size <= 300_000 for part in made.parts)
    manifest = json.loads(made.manifest.read_text())
    assert manifest["parts"] == {
        part.name: {
            "bytes": part.stat().st_size,
            "sha256": hashlib.sha256(part.read_bytes()).hexdigest(),
        }
        for part in made.parts
    }
    assert set(manifest["files"]) == set(BIG)
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [".tiny.lock", *(part.name for part in made.parts), "tiny.manifest.json"]
    )


def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    one = [part.read_bytes() for part in _pack(tmp_path / "a", BIG).parts]
    other = [part.read_bytes() for part in _pack(tmp_path / "b", BIG).parts]

    assert one == other


def test_what_a_killed_packing_left_changes_nothing(tmp_path: Path) -> None:
    """Its blocks came first in the parts of the next, which could then not be joined."""
    write(tmp_path / "data" / "tiny", {name: a.tobytes() for name, a in BIG.items()})
    code = (
        "import os\n"
        "from data_cases import asking, dataset\n"
        "from test_data_pack import BIG\n"
        "from narrowgauge_data import pack\n"
        "pack._write_parts = lambda *_: os._exit(9)\n"
        f"pack.pack(dataset(BIG), __import__('pathlib').Path({str(tmp_path / 'data')!r}), "
        f"__import__('pathlib').Path({str(tmp_path / 'out')!r}), most=300_000, block=100_000, "
        "caller=asking())\n"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": f"{Path(__file__).parent}:{SOURCE}"}, check=False,
    )  # fmt: skip
    assert killed.returncode == 9

    made = _pack(tmp_path, BIG)

    [result] = join(made.parts, tmp_path / "there", asking())
    assert result.folder == tmp_path / "there" / "tiny"
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        [".tiny.lock", *(part.name for part in made.parts), "tiny.manifest.json"]
    )


def test_two_packings_into_one_folder_take_turns(tmp_path: Path) -> None:
    with local.changing("tiny", tmp_path / "out", asking()):
        said: List[str] = []
        other = threading.Thread(target=_pack_telling, args=(tmp_path, said))
        other.start()
        deadline = time.monotonic() + 60
        while other.is_alive() and not said and time.monotonic() < deadline:
            time.sleep(0.01)
        waited = other.is_alive()
        assert not (tmp_path / "out" / "tiny.manifest.json").exists()
    other.join(120)

    assert waited
    assert said[:1] == ["tiny: another process is changing it; waiting"]
    assert (tmp_path / "out" / "tiny.manifest.json").is_file()


def _pack_telling(tmp_path: Path, said: List[str]) -> None:
    write(tmp_path / "data" / "tiny", {name: a.tobytes() for name, a in GREY.items()})
    pack(
        dataset(GREY), tmp_path / "data", tmp_path / "out", most=10**7, caller=asking(said=said)
    )  # fmt: skip


def test_another_size_of_parts_is_another_packing(tmp_path: Path) -> None:
    one, other = _pack(tmp_path / "a", BIG), _pack(tmp_path / "b", BIG, most=400_000)
    there = tmp_path / "there"

    assert _pack_id(one.parts[0]) != _pack_id(other.parts[0])
    join(one.parts[:1], there, asking())
    [result] = join(other.parts[1:], there, asking())

    assert result.missing == (1,)
    [result] = join(other.parts[:1], there, asking())
    assert result.folder == there / "tiny"


def _pack_id(part: Path) -> str:
    with open(part, "rb") as stream:
        return read_header(stream, str(part)).pack


def test_colour_is_packed_much_smaller_than_it_is(tmp_path: Path) -> None:
    made = _pack(tmp_path, BIG)

    assert made.packed_bytes < 0.75 * made.raw_bytes


def test_a_damaged_part_is_found(tmp_path: Path) -> None:
    made = _pack(tmp_path, BIG)
    content = bytearray(made.parts[1].read_bytes())
    content[-100] ^= 1
    made.parts[1].write_bytes(bytes(content))

    with pytest.raises(DamagedPartError, match="2-of-"):
        join(made.parts, tmp_path / "there", asking())

    assert not (tmp_path / "there" / "tiny").exists()


def test_joining_needs_the_standard_library_only(tmp_path: Path) -> None:
    """As on a GPU host: an isolated Python, this source tree, and nothing installed."""
    made = _pack(tmp_path, COLOUR)
    code = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n"
        "from narrowgauge_data.cli import main; sys.exit(main(sys.argv[1:], {}))"
    )
    command = [sys.executable, "-I", "-S", "-c", code, "join", *map(str, made.parts)]
    done = subprocess.run(
        [*command, "--data", str(tmp_path / "there")], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    assert "complete and verified" in done.stdout


class TestRefusals:
    @pytest.mark.parametrize(
        ("number", "error"),
        [(errno.ENOSPC, DiskFullError), (errno.EROFS, DataUnavailableError)],
    )
    def test_what_the_file_system_says_names_the_folder_and_the_way_out(
        self,
        tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
        number: int,
        error: Type[NarrowgaugeError],
    ) -> None:
        def fail(*_: object) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr("narrowgauge_data.pack.shutil.copyfileobj", fail)

        with pytest.raises(error) as caught:
            _pack(tmp_path, GREY)

        assert str(tmp_path / "out") in str(caught.value)
        assert "--out DIR" in caught.value.next_step
        assert [path.name for path in (tmp_path / "out").iterdir()] == [".tiny.lock"]

    def test_a_set_that_is_not_whole_is_not_packed(self, tmp_path: Path) -> None:
        with pytest.raises(DataUnavailableError, match="4 of 4 files are missing"):
            _only(tmp_path, dataset(GREY))
        write(tmp_path / "data" / "tiny", {name: a.tobytes() for name, a in GREY.items()})
        (tmp_path / "data" / "tiny" / "test-labels.u8").write_bytes(b"0" * 10)
        with pytest.raises(DataCorruptError, match=r"test-labels\.u8"):
            _only(tmp_path, dataset(GREY))

    def test_parts_too_small_for_anything_are_refused(self, tmp_path: Path) -> None:
        write(tmp_path / "data" / "tiny", {name: a.tobytes() for name, a in GREY.items()})

        with pytest.raises(BadValueError, match="too small"):
            pack(dataset(GREY), tmp_path / "data", tmp_path / "out", most=1000, caller=asking())

    @pytest.mark.parametrize("text", ["", "MB", "60 MBit", "-1MB", "sixty"])
    def test_a_size_that_is_none_is_refused(self, text: str) -> None:
        with pytest.raises(BadValueError, match="is not a size"):
            parse_size(text)


def _only(tmp_path: Path, declared: DataSet) -> Pack:
    return pack(declared, tmp_path / "data", tmp_path / "out", most=10**7, caller=asking())


@pytest.mark.parametrize(
    ("text", "size"),
    [("60MB", 60_000_000), ("64 MiB", 64 << 20), ("1.5gb", 1_500_000_000), ("4096", 4096)],
)
def test_sizes_are_read(text: str, size: int) -> None:
    assert parse_size(text) == size
