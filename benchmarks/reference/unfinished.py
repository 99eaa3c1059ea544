"""Trainings that a host was given back before they ended, for another host to go on with.

What travels of a run is its job and its newest checkpoints, and none of its events: on the other
host it is the same job begun anew, whose rows go on from there (`narrowgauge_lab run --resume`) and
say so (`resumed_after_epoch`, `began_elsewhere`). Only jobs with `shares = true` do: of what is
timed, half a record of each of two hosts would be of neither.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import BEGUN, ENDED
from packing import ARRAYS_BYTES

__all__ = ["STEM", "pack_unfinished", "restore_unfinished"]

#: Pieces are called STEM.1-of-3 and so on: such files travel singly, and no larger than arrays.
STEM = "unfinished"
_PIECE = re.compile(r"\.(\d+)-of-(\d+)$")
_JOB, _CHECKPOINTS = "job.json", "checkpoints"


def pack_unfinished(out: Path, into: Path, room: int) -> tuple[list[str], list[str]]:
    """Pieces in `into` of what of the folders of `out` may go on elsewhere, the smallest first, as
    far as `room` bytes hold; replaces those that are there. Returns a line for each job that is in
    them, and one for each that found no room."""
    for old in into.glob(f"{STEM}.*-of-*"):
        old.unlink()
    kept: list[str] = []
    left: list[str] = []
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        for files in sorted(_unfinished(out), key=_size):
            name, size = files[0][0].split("/")[0], _size(files)
            fits = body.tell() + size + 2 * tarfile.BLOCKSIZE * len(files) <= room
            (kept if fits else left).append(f"{name}, {size / 1e6:.1f} MB")
            for path, content in files if fits else ():
                member = tarfile.TarInfo(path)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    whole = body.getvalue() if kept else b""
    count = -(-len(whole) // ARRAYS_BYTES)
    for number in range(count):
        piece = whole[number * ARRAYS_BYTES : (number + 1) * ARRAYS_BYTES]
        (into / f"{STEM}.{number + 1}-of-{count}").write_bytes(piece)
    return kept, left


def _size(files: Sequence[tuple[str, bytes]]) -> int:
    return sum(len(content) for _, content in files)


def _unfinished(out: Path) -> Iterator[list[tuple[str, bytes]]]:
    """Of each training that began and has not ended: its job, and its newest checkpoints."""
    for folder in sorted(path.parent for path in out.glob(f"*/{_JOB}")):
        if (folder / ENDED).is_file() or not _shares(folder):
            continue
        newest: dict[Path, Path] = {}
        for path in sorted((folder / _CHECKPOINTS).rglob("checkpoint-*.pt")):
            newest[path.parent] = path
        found = []
        for path in newest.values():
            try:
                found.append((str(path.relative_to(out)), path.read_bytes()))
            except FileNotFoundError:  # it has ended, or has a newer one, since
                continue
        if found:
            yield [(f"{folder.name}/{_JOB}", (folder / _JOB).read_bytes()), *found]


def _shares(folder: Path) -> bool:
    """What has not begun is what another host's `restore_unfinished` put here."""
    if not (folder / BEGUN).is_file():
        return True
    try:
        return bool(json.loads((folder / BEGUN).read_text())["shares"])
    except (OSError, ValueError, KeyError):
        return False


def restore_unfinished(pieces: Sequence[Path], out: Path) -> list[str]:
    """Put what was packed into the folders of `out`; the names of the jobs. Raises ValueError,
    having written nothing, for pieces that are not all there, for what is no such file, and for a
    job that was begun here already."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(_joined(pieces)), mode="r:") as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is None or not _of_a_job(out, member.name):
                    raise ValueError(f"'{member.name}' is no file of an unfinished job")
                found[member.name] = opened.read()
    except tarfile.TarError as error:
        raise ValueError(f"{pieces[0]} and the others are no archive: {error}") from error
    names = sorted({path.split("/")[0] for path in found})
    begun = [name for name in names if (out / name).exists()]
    if begun:
        raise ValueError(f"'{begun[0]}' was begun in {out} already")
    for path, content in found.items():
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_bytes(content)
    return names


def _joined(pieces: Sequence[Path]) -> bytes:
    """The pieces in their order, each once."""
    by_number: dict[int, Path] = {}
    counts = set()
    for path in pieces:
        match = _PIECE.search(path.name)
        if match is None:
            raise ValueError(f"{path} is no piece: they are called {STEM}.1-of-3 and so on")
        by_number[int(match[1])] = path
        counts.add(int(match[2]))
    if len(counts) != 1 or sorted(by_number) != list(range(1, max(counts) + 1)):
        raise ValueError(f"pieces are missing, or of several archives: {[p.name for p in pieces]}")
    return b"".join(by_number[number].read_bytes() for number in sorted(by_number))


def _of_a_job(out: Path, name: str) -> bool:
    """Whether this is a job's file or a checkpoint, and lies in that job's folder."""
    path = Path(name)
    inside = out.resolve() in (out / path).resolve().parents and ".." not in path.parts
    parts = path.parts
    return inside and (
        (len(parts) == 2 and parts[1] == _JOB) or (len(parts) > 3 and parts[1] == _CHECKPOINTS)
    )
