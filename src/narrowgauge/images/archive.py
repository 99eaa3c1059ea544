"""An image as a file: for a board without a registry, and for whoever archives an artifact."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import BuildFailed, DataCorrupt, DiskFull, UsageError, disk_full
from narrowgauge.images.client import BuildClient, translate
from narrowgauge.images.content import (
    LABEL_CONTENT,
    LABEL_TARGET,
    LABEL_UNRESOLVED,
)
from narrowgauge.images.inspect import facts_of, labels_of
from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.errors import NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file

__all__ = ["ARCHIVE_FORMAT", "Archive", "load_archive", "manifest_path", "save_archive"]

Say = Callable[[str], None]

#: 1: first.
ARCHIVE_FORMAT = 1


@dataclass(frozen=True)
class Archive:
    """What `FILE.json` says of FILE: the image, and what tells whether the file is whole.

    `digest` is the engine's image id; `bytes` and `sha256` are the file's.
    """

    format: int
    image: str
    digest: str
    target: str
    content: str
    architecture: str
    stand_in: bool
    unresolved: str
    bytes: int
    sha256: str


def manifest_path(file: Path) -> Path:
    """`image.tar` → `image.tar.json`."""
    return file.with_name(file.name + ".json")


def save_archive(client: BuildClient, name: str, file: Path, say: Say) -> Archive:
    """Write the image `name` to `file` and its manifest beside it.

    Raises UsageError where there is no such image or the file exists, DiskFull.
    """
    found = client.inspect(name)
    if found is None:
        raise UsageError(f"there is no image {name}", next_step="narrowgauge images build TARGET")
    if file.exists():
        raise UsageError(f"{file} exists", next_step="remove it, or name another --out")
    size = int(found["Size"])
    file.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(file.parent).free
    say(f"saving {name} to {file}: about {size / 1e9:.2f} GB, {free / 1e9:.0f} GB free there")
    if free < size:
        raise DiskFull(
            f"no room for {file}", why=f"{size / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free"
        )
    partial = file.with_name(file.name + ".partial")
    try:
        done = client.run(["save", "--output", str(partial), name], timeout_s=None)
        if done.returncode != 0:
            raise translate(done.stderr, f"{name} cannot be saved to {file}")
        archive = _archive(name, found, partial)
        os.replace(partial, file)
        write_json_atomic(manifest_path(file), archive)
    except OSError as error:
        raise disk_full(file, "the image") from error
    finally:
        partial.unlink(missing_ok=True)
    return archive


def load_archive(client: BuildClient, file: Path, say: Say) -> Archive:
    """Check `file` against its manifest, load it, and see that the engine has what it says.

    Raises UsageError where a file is missing, DataCorrupt where it is not what was saved.
    """
    archive = _read(file)
    if archive.bytes != file.stat().st_size or archive.sha256 != sha256_file(file):
        raise DataCorrupt(
            f"{file} is not what was saved",
            why=f"expected {archive.bytes} bytes with sha256 {archive.sha256}",
            next_step="copy it again, together with its .json",
        )
    say(f"loading {archive.image}: {archive.bytes / 1e9:.2f} GB")
    done = client.run(["load", "--input", str(file)], timeout_s=None)
    if done.returncode != 0:
        raise translate(done.stderr, f"{file} cannot be loaded")
    found = client.inspect(archive.image)
    if found is None or not _is_the_same(found, archive):
        raise BuildFailed(
            f"{file} was loaded, but the engine's {archive.image} is another image",
            why=f"expected {archive.digest}, found {found['Id'] if found else 'none'}",
        )
    return archive


def _is_the_same(found: Mapping[str, Any], archive: Archive) -> bool:
    """By id; between two kinds of engine the id differs, and what the image says of itself counts."""
    labels = labels_of(found)
    said = (labels.get(LABEL_TARGET), labels.get(LABEL_CONTENT), found["Architecture"])
    wanted = (archive.target, archive.content, archive.architecture)
    return bool(found["Id"] == archive.digest or (archive.content and said == wanted))


def _archive(name: str, found: Mapping[str, Any], file: Path) -> Archive:
    facts, labels = facts_of(name, found), labels_of(found)
    return Archive(
        format=ARCHIVE_FORMAT,
        image=name,
        digest=facts.digest,
        target=labels.get(LABEL_TARGET, ""),
        content=facts.content_tag,
        architecture=str(found["Architecture"]),
        stand_in=facts.stand_in,
        unresolved=labels.get(LABEL_UNRESOLVED, ""),
        bytes=file.stat().st_size,
        sha256=sha256_file(file),
    )


def _read(file: Path) -> Archive:
    manifest = manifest_path(file)
    for path in (file, manifest):
        if not path.is_file():
            raise UsageError(
                f"there is no {path}", next_step="both files that `images save` wrote are needed"
            )
    try:
        archive = decode(Archive, read_json(manifest), str(manifest))
    except NarrowgaugeError as error:
        raise DataCorrupt(f"{manifest} does not describe an image", why=error.what) from error
    if archive.format != ARCHIVE_FORMAT:
        raise DataCorrupt(f"{manifest} has format {archive.format}, not {ARCHIVE_FORMAT}")
    return archive
