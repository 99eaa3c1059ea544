"""Trainings that a host was given back before they ended, for another host to go on with.

What travels of a run is its job and its newest checkpoints, and none of its events: on the other
host it is a run of its own, with an id of its own, whose rows go on from there (`narrowgauge_lab
run --resume`) and say so (`resumed_after_epoch`, `began_elsewhere`).
Only trainings do that begin from nothing: jobs with `shares = true` that come after none but tests
(`verdict = true`) and have trained no weights of their own first. Of what is timed, half a record
of each of two hosts would be of neither, and what begins from weights would go on from others
there.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import secrets
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jobs import BEGUN, ENDED, begun_note
from packing import ARRAYS_BYTES
from progress import share_done

__all__ = ["STEM", "pack_unfinished", "restore_unfinished"]

#: Pieces are called STEM.DIGEST.1-of-3 and so on: such files travel singly, no larger than arrays.
STEM = "unfinished"
_PIECE = re.compile(r"\.([0-9a-f]{12})\.(\d+)-of-(\d+)$")
_JOB, _CHECKPOINTS, _SOURCES = "job.json", "checkpoints", "sources.json"
#: What a run is taken to have done at least, of which nothing is told.
_LEAST_SHARE = 0.01
#: Of a member beside its bytes: its header, and what fills its last block up.
_MEMBER_BYTES = 2 * tarfile.BLOCKSIZE


def pack_unfinished(
    out: Path, into: Path, room: int, experiments: Path
) -> tuple[list[str], list[str]]:
    """Pieces in `into` of what of the folders of `out` may go on elsewhere, as far as `room` bytes
    hold, the fewest bytes for what is done first; replaces those that are there. Returns a line for
    each job that is in them, and one for each that is not, and why."""
    for old in into.glob(f"{STEM}.*-of-*"):
        old.unlink()
    kept: list[str] = []
    left: list[str] = []
    body = io.BytesIO()
    with tarfile.open(fileobj=body, mode="w") as archive:
        sizes = {folder: _size(folder) for folder in _unfinished(out)}
        worth = {folder: max(_LEAST_SHARE, share_done(folder)) for folder in sizes}
        for folder in sorted(sizes, key=lambda each: sizes[each] / worth[each]):
            said = f"{folder.name}, {sizes[folder] / 1e6:.1f} MB"
            why = _why_not(folder)
            if not why and body.tell() + sizes[folder] + tarfile.RECORDSIZE > room:
                why = "no room"
            files = [] if why else _files(out, folder, experiments)
            if files:
                kept.append(said)
                for path, content in files:
                    member = tarfile.TarInfo(path)
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content))
            else:
                left.append(f"{said}: {why or 'it ends now'}")
    whole = body.getvalue() if kept else b""
    count = -(-len(whole) // ARRAYS_BYTES)
    for number in range(count):
        piece = whole[number * ARRAYS_BYTES : (number + 1) * ARRAYS_BYTES]
        name = f"{STEM}.{_digest(whole)}.{number + 1}-of-{count}"
        (into / name).write_bytes(piece)
    return kept, left


def _unfinished(out: Path) -> Iterator[Path]:
    """The folders of runs that began and have not ended, and have something to go on from."""
    for folder in sorted(path.parent for path in out.glob(f"*/{_JOB}")):
        if not (folder / ENDED).is_file() and _newest(folder):
            yield folder


def _newest(folder: Path) -> list[Path]:
    """The newest checkpoint of each row, and of each stage of one."""
    newest: dict[Path, Path] = {}
    for path in sorted((folder / _CHECKPOINTS).glob("*/**/checkpoint-*.pt")):
        newest[path.parent] = path
    return list(newest.values())


def _size(folder: Path) -> int:
    """Of its members, at most: a checkpoint that goes meanwhile is left out."""
    total = 3 * _MEMBER_BYTES + (folder / _JOB).stat().st_size
    for path in _newest(folder):
        try:
            total += path.stat().st_size + _MEMBER_BYTES
        except FileNotFoundError:
            continue
    return total


def _why_not(folder: Path) -> str:
    """Why a training has to end where it began; empty where it may travel. One that has not begun
    is what another host's `restore_unfinished` put here."""
    if any(folder.glob("**/weights-*.pt")):
        return "it has trained weights of its own to begin from"
    if not (folder / BEGUN).is_file():
        return ""
    begun = begun_note(folder)
    if not begun:
        return f"its {BEGUN} cannot be read"
    awaited = begun.get("after", ())
    made = [name for name in awaited if not begun_note(folder.parent / name).get("verdict")]
    if made:
        return f"it begins from what {', '.join(made)} made"
    return "" if begun.get("shares") else "what is timed does not travel"


def _files(out: Path, folder: Path, experiments: Path) -> list[tuple[str, bytes]]:
    """Its members; none where no checkpoint is left to read."""
    found = []
    for path in _newest(folder):
        try:
            found.append((str(path.relative_to(out)), path.read_bytes()))
        except FileNotFoundError:  # it has ended, or has a newer one, since
            continue
    if not found:
        return []
    job = (folder / _JOB).read_bytes()
    sources = json.dumps(_sources(experiments, json.loads(job)["experiment"])).encode()
    return [(f"{folder.name}/{_JOB}", job), (f"{folder.name}/{_SOURCES}", sources), *found]


def _sources(experiments: Path, name: str) -> dict[str, str]:
    """What of an experiment decides how it trains; the lab's own sources are in the checkpoint."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted((experiments / name).iterdir())
        if path.suffix == ".py" or path.name == "experiment.toml"
    }


def restore_unfinished(pieces: Sequence[Path], out: Path, experiments: Path) -> list[str]:
    """Put what was packed into the folders of `out`; the names of the jobs. Raises ValueError,
    having written nothing, for pieces that are not all there or not as they were, for what is no
    such file, for a job that was begun here already, and for one of another experiment's code."""
    found: dict[str, dict[str, bytes]] = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(_joined(pieces)), mode="r:") as archive:
            for member in archive:
                opened = archive.extractfile(member) if member.isfile() else None
                if opened is None or not _of_a_job(out, member.name):
                    raise ValueError(f"'{member.name}' is no file of an unfinished job")
                job, _, path = member.name.partition("/")
                found.setdefault(job, {})[path] = opened.read()
    except tarfile.TarError as error:
        raise ValueError(f"{pieces[0]} and the others are no archive: {error}") from error
    for name, files in found.items():
        _require_the_same_code(name, files, experiments)
        if (out / name).exists():
            raise ValueError(f"'{name}' was begun in {out} already")
    for name, files in found.items():
        files[_JOB] = _renamed(files[_JOB])
        del files[_SOURCES]
        for path, content in files.items():
            (out / name / path).parent.mkdir(parents=True, exist_ok=True)
            (out / name / path).write_bytes(content)
    return sorted(found)


def _require_the_same_code(name: str, files: dict[str, bytes], experiments: Path) -> None:
    try:
        experiment = json.loads(files[_JOB])["experiment"]
        before = json.loads(files[_SOURCES])
        now = _sources(experiments, experiment)
    except (KeyError, OSError, ValueError) as error:
        raise ValueError(f"'{name}' lacks what a job has: {error}") from error
    differing = sorted(each for each in {*before, *now} if before.get(each) != now.get(each))
    if differing:
        raise ValueError(
            f"'{name}' was begun with another {', '.join(differing)} of experiments/{experiment}"
        )


def _renamed(job: bytes) -> bytes:
    """The job under an id of its own: what there was of it before may be recorded by the old."""
    document = json.loads(job)
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    document["run_id"] = f"{stamp}-{document['experiment']}-{secrets.token_hex(3)}"
    return json.dumps(document).encode()


def _digest(whole: bytes) -> str:
    return hashlib.sha256(whole).hexdigest()[:12]


def _joined(pieces: Sequence[Path]) -> bytes:
    """The pieces in their order, each once."""
    by_number: dict[int, Path] = {}
    archives = set()
    for path in pieces:
        match = _PIECE.search(path.name)
        if match is None:
            raise ValueError(f"{path} is no piece: they are called {STEM}.….1-of-3 and so on")
        by_number[int(match[2])] = path
        archives.add((match[1], int(match[3])))
    names = [path.name for path in pieces]
    if len(archives) != 1:
        raise ValueError(f"pieces of several archives: {names}")
    [(digest, count)] = archives
    if sorted(by_number) != list(range(1, count + 1)) or len(pieces) != count:
        raise ValueError(f"pieces are missing, or there twice: {names}")
    whole = b"".join(by_number[number].read_bytes() for number in sorted(by_number))
    if _digest(whole) != digest:
        raise ValueError(f"the pieces are not as they were written: {names}")
    return whole


def _of_a_job(out: Path, name: str) -> bool:
    """Whether this is a job's file or a checkpoint, and lies in that job's folder."""
    path = Path(name)
    inside = out.resolve() in (out / path).resolve().parents and ".." not in path.parts
    parts = path.parts
    return inside and (
        (len(parts) == 2 and parts[1] in (_JOB, _SOURCES))
        or (len(parts) > 3 and parts[1] == _CHECKPOINTS)
    )
