"""What a run needs on its board: its inputs, its data sets, its image. Each is sent once."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from narrowgauge.errors import (
    BuildFailed,
    DataCorrupt,
    DiskFull,
    NarrowgaugeError,
    NotApplicableError,
)
from narrowgauge.fleet.errors import LinkCut, WrongImage, board_said
from narrowgauge.fleet.facts import have_of
from narrowgauge.fleet.link import Link
from narrowgauge.machine import ARCHITECTURES
from narrowgauge.plan import Places
from narrowgauge_contract.datasets import FlatFile, data_set
from narrowgauge_contract.hashing import tree_files
from narrowgauge_contract.job import Job

__all__ = [
    "board_image",
    "data_files",
    "is_same",
    "pack_inputs",
    "require_architecture",
    "require_same",
    "send_data",
    "send_image",
    "sha256_bytes",
]

Say = Callable[[str], None]

_CHUNK = 1 << 18
#: How often a file is sent on after the link was cut.
_TRIES = 5
#: Results of other machines belong to no run's inputs.
_NOT_SENT = "reference"
#: What of an image's configuration decides how a run in it goes, besides its layers.
_DECIDES = ("Labels", "Env", "Entrypoint", "Cmd", "User")


def pack_inputs(job: Job, places: Places) -> bytes:
    """A tar with job.json and the experiment's folder; the same bytes for the same content."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, places.job, "job.json")
        root = places.experiments / job.experiment
        for path in sorted(tree_files(root)):
            name = path.relative_to(root)
            if name.parts[0] != _NOT_SENT and path.is_file():
                _add(tar, path, f"experiments/{job.experiment}/{name.as_posix()}")
    return stream.getvalue()


def _add(tar: tarfile.TarFile, path: Path, name: str) -> None:
    content = path.read_bytes()
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), 0o755 if path.stat().st_mode & 0o100 else 0o644
    tar.addfile(entry, io.BytesIO(content))


def data_files(names: Iterable[str]) -> dict[str, FlatFile]:
    """Every file of these data sets, named from the folder of data sets on."""
    sets = [data_set(name) for name in names]
    return {f"{found.name}/{file.name}": file for found in sets for file in found.files}


def send_data(
    link: Link,
    names: Iterable[str],
    root: Path,
    folder: str,
    say: Say,
    known: Mapping[str, tuple[str, str]],
) -> None:
    """Bring every file of these data sets to `folder` on the board, if it is not there. A file that
    was sent in part is sent on from there. `known`: what the board said of files by the way (see
    BoardState). Raises DiskFull, DataCorrupt, BoardUnreachable."""
    files = data_files(names)
    there = dict(known)
    unasked = [name for name in files if name not in there]
    if unasked:
        answers = link.call("have", [f"{folder}/{name}" for name in unasked])
        there |= dict(zip(unasked, have_of(answers), strict=True))
    for name, file in files.items():
        size, part = there[name]
        if size == str(file.bytes):
            continue
        say(f"{link.board.name}: sending {name}, {file.bytes / 1e6:.1f} MB")
        _send_file(link, root / name, f"{folder}/{name}", int(part), file.sha256)


def _send_file(link: Link, source: Path, path: str, offset: int, sha256: str) -> None:
    size = source.stat().st_size
    for attempt in range(_TRIES):
        try:
            words = [path, str(offset), str(size), sha256]
            link.call("put", words, _rest(source, offset))
            return
        except LinkCut:
            if attempt == _TRIES - 1:
                raise
        except NarrowgaugeError as error:
            if attempt == _TRIES - 1 or isinstance(error, (DiskFull, DataCorrupt)):
                raise
        ((there, part),) = have_of(link.call("have", [path]))
        if there == str(size):
            return
        offset = int(part)


def _rest(source: Path, offset: int) -> Iterator[bytes]:
    with open(source, "rb") as stream:
        stream.seek(offset)
        yield from _chunks(stream)


def _chunks(stream: IO[bytes]) -> Iterator[bytes]:
    while chunk := stream.read(_CHUNK):
        yield chunk


def board_image(link: Link, name: str) -> Mapping[str, Any] | None:
    """What the board's engine says of the image; None where it has none of that name or id."""
    for answer, _ in link.call("image", [name]):
        if answer.word == "image":
            found: Mapping[str, Any] = json.loads(answer.text)
            return found
    return None


def send_image(
    link: Link, wanted: Mapping[str, Any], name: str, docker: str, env: Mapping[str, str], say: Say
) -> str:
    """Send the image `wanted` (as an engine inspects it) by `docker save | docker load`, and give
    its id there, which differs from the one here where the two keep images in different stores.
    Raises WrongImage where the board then has another of that name, BuildFailed, DiskFull."""
    say(f"{link.board.name}: sending the image {name}, {int(wanted['Size']) / 1e6:.0f} MB")
    _save_and_load(link, name, docker, env)
    return require_same(link, board_image(link, name), wanted, name)


def require_same(
    link: Link, found: Mapping[str, Any] | None, wanted: Mapping[str, Any], name: str
) -> str:
    """The board's id of the image, where it is the one that is wanted. Raises WrongImage."""
    if found is not None and is_same(found, wanted):
        return str(found["Id"])
    raise WrongImage(
        f"the board {link.board.name} has another image than this run is of",
        why=f"{name} should be {wanted['Id']}, and is {found['Id'] if found else 'not there'}",
        next_step=f"on the board: docker image rm {name}; then start again, and it is sent",
    )


def require_architecture(link: Link, made: str, host_has: str) -> None:
    """Raises NotApplicableError for an image of another processor than the board's."""
    if ARCHITECTURES.get(made, made) != host_has:
        raise NotApplicableError(
            f"the image is for {made}, and the board {link.board.name} is {host_has}",
            next_step="name the target that is the board's: `target` in hosts.toml",
        )


def is_same(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    """By id; two kinds of image store give one image two ids, and its layers the same sums."""
    if found["Id"] == wanted["Id"]:
        return True
    layers = [(each.get("RootFS") or {}).get("Layers") for each in (found, wanted)]
    configs = [each.get("Config") or {} for each in (found, wanted)]
    # One store leaves out what is empty, and another writes it down.
    said = [[each.get(key) or None for key in _DECIDES] for each in configs]
    made = [each.get("Architecture") or None for each in (found, wanted)]
    same = layers[0] == layers[1] and said[0] == said[1] and made[0] == made[1]
    return bool(layers[0]) and same


def _save_and_load(link: Link, name: str, docker: str, env: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [docker, "save", name], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(env)
    ) as saving:
        assert saving.stdout is not None
        assert saving.stderr is not None
        try:
            answers = link.call("load", (), _chunks(saving.stdout))
        except BaseException:
            saving.kill()
            raise
        finally:
            saving.stdout.close()  # or it would wait for a reader, and nothing more be said
        said = saving.stderr.read().decode("utf-8", errors="replace")
    if saving.returncode != 0:
        raise BuildFailed(f"the image {name} cannot be saved here", why=said)
    if not any(answer.word == "loaded" for answer, _ in answers):
        raise board_said(link.board.name, "load", "it said nothing")


def sha256_bytes(content: bytes) -> str:
    """The sha256 of what is sent."""
    return hashlib.sha256(content).hexdigest()
