"""Packing a set into parts, and that joining makes the same set of them."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Dict

import numpy as np
import pytest
from data_cases import COLOUR, GREY, asking, dataset, write

from narrowgauge_contract.datasets import DataSet
from narrowgauge_contract.errors import BadValueError, DataCorruptError, DataUnavailableError
from narrowgauge_data.pack import Pack, pack, parse_size
from narrowgauge_data.parts import DamagedPartError, join

ROOT = Path(__file__).parents[2]


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
        [*(part.name for part in made.parts), "tiny.manifest.json"]
    )


def test_packing_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    one = [part.read_bytes() for part in _pack(tmp_path / "a", BIG).parts]
    other = [part.read_bytes() for part in _pack(tmp_path / "b", BIG).parts]

    assert one == other


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
