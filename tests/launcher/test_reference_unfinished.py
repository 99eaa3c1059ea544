"""benchmarks/reference/unfinished.py: trainings that go on on another host."""

from __future__ import annotations

import json
import os
import random
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference"


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with archives cut after 20 kB."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    import unfinished as module

    monkeypatch.setattr(module, "ARRAYS_BYTES", 20_000)
    yield module
    for name in ("unfinished", "packing", "jobs"):
        sys.modules.pop(name, None)


def job(out: Path, name: str, size: int, shares: bool = True, **files: str) -> Path:
    """A run with two checkpoints of a row and one of a stage of it, of so many bytes each."""
    folder = out / name
    row = folder / "checkpoints" / "row-0"
    (row / "trunk").mkdir(parents=True)
    for path in ("checkpoint-000001.pt", "checkpoint-000002.pt", "trunk/checkpoint-000007.pt"):
        (row / path).write_bytes(random.Random(f"{name} {path}").randbytes(size))
    (folder / "job.json").write_text(json.dumps({"run_id": name}))
    (folder / "begun.json").write_text(json.dumps({"gpu": "0", "shares": shares}))
    (folder / "events.jsonl").write_text("{}")
    for file, text in files.items():
        (folder / file.replace("_", ".")).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_jobs_and_their_newest_checkpoints_come_to_another_host(
    unfinished: ModuleType, tmp_path: Path
) -> None:
    here, there, into = tmp_path / "here", tmp_path / "there", tmp_path / "into"
    into.mkdir()
    (into / "unfinished.5-of-9").write_bytes(b"of an earlier call")
    job(here, "large", 30_000)
    job(here, "small", 5_000)
    job(here, "timed", 5_000, shares=False)
    job(here, "through", 5_000, ended_json="{}")
    (here / "new").mkdir()

    kept, left = unfinished.pack_unfinished(here, into, 10**6)
    pieces = sorted(into.iterdir(), reverse=True)
    names = unfinished.restore_unfinished(pieces, there)

    assert (kept, left) == (["small, 0.0 MB", "large, 0.1 MB"], [])
    assert [piece.name for piece in reversed(pieces)] == [
        f"unfinished.{number}-of-5" for number in range(1, 6)
    ]
    assert names == ["large", "small"]
    expected = contents(here)
    carried = (
        "job.json",
        "checkpoints/row-0/checkpoint-000002.pt",
        "checkpoints/row-0/trunk/checkpoint-000007.pt",
    )
    assert contents(there) == {
        f"{name}/{path}": expected[f"{name}/{path}"] for name in names for path in carried
    }
    # What is not begun there either goes further, as it is.
    assert unfinished.pack_unfinished(there, into, 10**6)[0] == kept
    with pytest.raises(ValueError, match=r"'large' was begun in .* already"):
        unfinished.restore_unfinished(sorted(into.iterdir()), there)


def test_what_finds_no_room_is_said_and_the_smallest_goes_first(
    unfinished: ModuleType, tmp_path: Path
) -> None:
    job(tmp_path / "out", "large", 30_000)
    job(tmp_path / "out", "small", 5_000)

    found = unfinished.pack_unfinished(tmp_path / "out", tmp_path, 50_000)
    assert found == (["small, 0.0 MB"], ["large, 0.1 MB"])
    assert sum(each.stat().st_size for each in tmp_path.glob("unfinished.*")) <= 50_000
    assert unfinished.pack_unfinished(tmp_path / "out", tmp_path, 100)[0] == []
    assert list(tmp_path.glob("unfinished.*")) == []


def test_a_checkpoint_that_goes_while_it_is_packed_is_left_out(
    unfinished: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = job(tmp_path / "out", "ends", 100)
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        if path.name == "checkpoint-000002.pt":
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    kept, _ = unfinished.pack_unfinished(tmp_path / "out", tmp_path, 10**6)
    monkeypatch.undo()

    assert kept == ["ends, 0.0 MB"]
    with tarfile.open(tmp_path / "unfinished.1-of-1") as archive:
        assert archive.getnames() == [
            "ends/job.json", "ends/checkpoints/row-0/trunk/checkpoint-000007.pt"
        ]  # fmt: skip
    assert folder.is_dir()


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["unfinished.1-of-2"], "pieces are missing"),
        (["unfinished.1-of-1", "unfinished.2-of-2"], "pieces are missing"),
        (["records.tar.gz"], "is no piece"),
        (["unfinished.1-of-1"], "are no archive"),
    ],
)
def test_what_is_not_all_there_is_refused(
    unfinished: ModuleType, tmp_path: Path, names: list[str], said: str
) -> None:
    for name in names:
        (tmp_path / name).write_bytes(b"x" * 2000)

    with pytest.raises(ValueError, match=said):
        unfinished.restore_unfinished([tmp_path / name for name in names], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "linked"),
    [
        ("../job.json", False),
        ("/job/job.json", False),
        ("job/../../job.json", False),
        ("job/checkpoints/../../../x/checkpoint-000001.pt", False),
        ("job/begun.json", False),
        ("job/sub/job.json", False),
        ("job/checkpoints/row-0/checkpoint-000001.pt", True),
    ],
)
def test_nothing_lies_outside_of_a_job(
    unfinished: ModuleType, tmp_path: Path, name: str, linked: bool
) -> None:
    piece = tmp_path / "unfinished.1-of-1"
    with tarfile.open(piece, "w") as archive:
        member = tarfile.TarInfo(name)
        member.type = tarfile.SYMTYPE if linked else tarfile.REGTYPE
        member.linkname = os.devnull
        archive.addfile(member)

    with pytest.raises(ValueError, match="is no file of an unfinished job"):
        unfinished.restore_unfinished([piece], tmp_path / "out")
    assert not (tmp_path / "out").exists()
