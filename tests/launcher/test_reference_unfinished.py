"""benchmarks/reference/unfinished.py: trainings that go on on another host."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import re
import shutil
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

REFERENCE = Path(__file__).parents[2] / "benchmarks" / "reference"


@pytest.fixture
def unfinished(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The module, with archives cut after 20 kB."""
    monkeypatch.syspath_prepend(str(REFERENCE))
    import unfinished as module

    monkeypatch.setattr(module, "ARRAYS_BYTES", 20_000)
    yield module
    for name in ("unfinished", "progress", "packing", "jobs"):
        sys.modules.pop(name, None)


@pytest.fixture
def experiments(tmp_path: Path) -> Path:
    """With one, of some code and a page."""
    folder = tmp_path / "experiments" / "tiny"
    folder.mkdir(parents=True)
    for name in ("run.py", "experiment.toml", "README.md"):
        (folder / name).write_text(name)
    return folder.parent


def job(out: Path, name: str, size: int, files: dict[str, str] | None = None, **begun: Any) -> Path:
    """A run with two checkpoints of a row and one of a stage of it, of so many bytes each."""
    folder = out / name
    row = folder / "checkpoints" / "row-0"
    (row / "trunk").mkdir(parents=True)
    for path in ("checkpoint-000001.pt", "checkpoint-000002.pt", "trunk/checkpoint-000007.pt"):
        (row / path).write_bytes(random.Random(f"{name} {path}").randbytes(size))
    (folder / "job.json").write_text(json.dumps({"run_id": name, "experiment": "tiny", "seed": 3}))
    note = {"gpu": "0", "shares": True, "after": [], **begun}
    (folder / "begun.json").write_text(json.dumps(note))
    (folder / "events.jsonl").write_text("{}")
    for file, text in (files or {}).items():
        (folder / file).write_text(text)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def test_jobs_and_their_newest_checkpoints_come_to_another_host(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    here, there, into = tmp_path / "here", tmp_path / "there", tmp_path / "into"
    into.mkdir()
    (into / "unfinished.0123456789ab.5-of-9").write_bytes(b"of an earlier call")
    job(here, "large", 30_000)
    job(here, "small", 5_000)
    job(here, "through", 5_000, {"ended.json": "{}"})
    (here / "new").mkdir()
    (job(here, "bare", 10) / "checkpoints").rename(tmp_path / "elsewhere")

    kept, left = unfinished.pack_unfinished(here, into, 10**6, experiments)
    pieces = sorted(into.iterdir(), reverse=True)
    names = unfinished.restore_unfinished(pieces, there, experiments)

    assert (kept, left) == (["small, 0.0 MB", "large, 0.1 MB"], [])
    assert [piece.name.split(".", 2)[2] for piece in reversed(pieces)] == [
        f"{number}-of-5" for number in range(1, 6)
    ]
    assert names == ["large", "small"]
    before, after = contents(here), contents(there)
    carried = (
        "checkpoints/row-0/checkpoint-000002.pt",
        "checkpoints/row-0/trunk/checkpoint-000007.pt",
    )
    for name in names:
        found = json.loads(after.pop(f"{name}/job.json"))
        assert re.fullmatch(r"\d{8}T\d{6}Z-tiny-[0-9a-f]{6}", found["run_id"])
        assert (found["experiment"], found["seed"]) == ("tiny", 3)
    assert after == {
        f"{name}/{path}": before[f"{name}/{path}"] for name in names for path in carried
    }
    # What is not begun there either goes further, as it is.
    again = unfinished.pack_unfinished(there, into, 10**6, experiments)[0]
    assert [line.split(",")[0] for line in again] == ["small", "large"]
    with pytest.raises(ValueError, match=r"'small' was begun in .* already"):
        unfinished.restore_unfinished(sorted(into.iterdir()), there, experiments)


def test_what_has_to_end_where_it_began_stays(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    """Timed; fine-tuned from another job's weights, or from its own; of a host before this."""
    out = tmp_path / "out"
    job(out, "timed", 10, shares=False)
    job(out, "tuned", 10, after=["weights-18"])
    job(out, "own", 10, {"weights-approx-0.pt": ""})
    job(out, "unreadable", 10, {"begun.json": "{"})

    kept, left = unfinished.pack_unfinished(out, tmp_path, 10**6, experiments)

    assert kept == []
    assert left == [
        "own, 0.0 MB: it has trained weights of its own to begin from",
        "timed, 0.0 MB: what is timed does not travel",
        "tuned, 0.0 MB: it begins from what weights-18 made",
        "unreadable, 0.0 MB: its begun.json cannot be read",
    ]
    assert list(tmp_path.glob("unfinished.*")) == []


def test_what_waited_for_tests_alone_may_travel(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    for name, begun in (("tests", '{"verdict": true}'), ("weights", "{}"), ("torn", "{")):
        (out / name).mkdir(parents=True)
        (out / name / "begun.json").write_text(begun)
    job(out, "tested", 10, after=["tests"])
    job(out, "tuned", 10, after=["tests", "weights", "torn", "gone"])

    kept, left = unfinished.pack_unfinished(out, tmp_path, 10**6, experiments)

    assert [line.split(",")[0] for line in kept] == ["tested"]
    assert left == ["tuned, 0.0 MB: it begins from what weights, torn, gone made"]


def test_what_finds_no_room_is_said_and_the_smallest_goes_first(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    job(tmp_path / "out", "large", 30_000)
    job(tmp_path / "out", "small", 5_000)

    for room, count in ((60_000, 1), (26_000, 1), (25_000, 0), (100, 0)):
        kept, left = unfinished.pack_unfinished(tmp_path / "out", tmp_path, room, experiments)
        assert (len(kept), len(left)) == (count, 2 - count)
        assert left[-1] == "large, 0.1 MB: no room"
        assert sum(each.stat().st_size for each in tmp_path.glob("unfinished.*")) <= room


def test_what_is_nearly_done_goes_first(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    """Two trainings of one size, of which there is room for one; what is told of a third is no
    progress, and half a line."""
    for name, done in (("begun", 4), ("late", 74), ("silent", 0)):
        event = {"kind": "progress", "row": 0, "t": 1.0, "data": {"done": done, "total": 80}}
        told = json.dumps({**event, "kind": "metric"}) if name == "silent" else json.dumps(event)
        job(tmp_path / "out", name, 30_000, {"events.jsonl": f'{told}\n{{"kind": "prog'})

    kept, left = unfinished.pack_unfinished(tmp_path / "out", tmp_path, 80_000, experiments)

    assert [each.partition(",")[0] for each in kept] == ["late"]
    assert [each.partition(",")[0] for each in left] == ["begun", "silent"]


def test_a_checkpoint_that_goes_while_it_is_packed_is_left_out(
    unfinished: ModuleType, experiments: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job(tmp_path / "out", "ends", 100)
    read = Path.read_bytes

    def gone(path: Path) -> bytes:
        if path.name == name:
            path.unlink()
        return read(path)

    monkeypatch.setattr(Path, "read_bytes", gone)
    name = "checkpoint-000002.pt"
    kept, _ = unfinished.pack_unfinished(tmp_path / "out", tmp_path, 10**6, experiments)
    assert kept == ["ends, 0.0 MB"]
    [piece] = tmp_path.glob("unfinished.*.1-of-1")
    with tarfile.open(piece) as archive:
        assert archive.getnames() == [
            "ends/job.json", "ends/sources.json",
            "ends/checkpoints/row-0/trunk/checkpoint-000007.pt",
        ]  # fmt: skip
    (tmp_path / "out/ends/checkpoints/row-0/checkpoint-000001.pt").unlink()
    name = "checkpoint-000007.pt"
    kept, left = unfinished.pack_unfinished(tmp_path / "out", tmp_path, 10**6, experiments)
    assert (kept, left) == ([], ["ends, 0.0 MB: it ends now"])


def test_pieces_that_are_not_all_there_are_refused(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    both = []
    for name in ("one", "two"):
        job(tmp_path / name, name, 12_000)
        (tmp_path / name / "into").mkdir()
        unfinished.pack_unfinished(tmp_path / name, tmp_path / name / "into", 10**6, experiments)
        both.append(sorted((tmp_path / name / "into").iterdir()))
    one, two = both
    changed = tmp_path / one[1].name
    changed.write_bytes(one[1].read_bytes()[:-1] + b"x")
    strange = tmp_path / "records.tar.gz"
    strange.write_bytes(b"x")

    for pieces, said in (
        (one[1:], "missing, or there twice"),
        ([*one, one[0]], "missing, or there twice"),
        ([*one, *two], "of several archives"),
        ([one[0], changed], "not as they were written"),
        ([strange], "is no piece"),
    ):
        with pytest.raises(ValueError, match=said):
            unfinished.restore_unfinished(pieces, out, experiments)
    assert not out.exists()
    assert unfinished.restore_unfinished(one, out, experiments) == ["one"]


def written(unfinished: ModuleType, folder: Path, body: bytes) -> Path:
    piece = folder / f"unfinished.{hashlib.sha256(body).hexdigest()[:12]}.1-of-1"
    piece.write_bytes(body)
    return piece


def test_another_experiment_than_it_began_with_is_refused(
    unfinished: ModuleType, experiments: Path, tmp_path: Path
) -> None:
    job(tmp_path / "out", "carried", 100)
    unfinished.pack_unfinished(tmp_path / "out", tmp_path, 10**6, experiments)
    pieces = list(tmp_path.glob("unfinished.*"))
    (experiments / "tiny" / "README.md").write_text("of another page nobody learns otherwise")
    (experiments / "tiny" / "run.py").write_text("another")
    (experiments / "tiny" / "new.py").write_text("new")

    with pytest.raises(ValueError, match=r"another new\.py, run\.py of experiments/tiny"):
        unfinished.restore_unfinished(pieces, tmp_path / "there", experiments)
    shutil.rmtree(experiments / "tiny")
    with pytest.raises(ValueError, match="lacks what a job has"):
        unfinished.restore_unfinished(pieces, tmp_path / "there", experiments)
    with pytest.raises(ValueError, match="are no archive"):
        unfinished.restore_unfinished(
            [written(unfinished, tmp_path, b"x" * 2000)], tmp_path / "there", experiments
        )
    assert not (tmp_path / "there").exists()


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
    unfinished: ModuleType, experiments: Path, tmp_path: Path, name: str, linked: bool
) -> None:
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        member = tarfile.TarInfo(name)
        member.type = tarfile.SYMTYPE if linked else tarfile.REGTYPE
        member.linkname = os.devnull
        archive.addfile(member)
    piece = written(unfinished, tmp_path, body.getvalue())

    with pytest.raises(ValueError, match="is no file of an unfinished job"):
        unfinished.restore_unfinished([piece], tmp_path / "out", experiments)
    assert not (tmp_path / "out").exists()
