"""A bundle as a file: a zip archive with a seal, and how one is opened without trusting it.

The seal is the archive's comment: the sha256 of every byte before that hash. So one flipped bit
anywhere is found, in padding and headers too, where no file's own hash would notice. It proves that
nothing was damaged, not who made it: whoever can write a bundle can seal another.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
import stat
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Protocol

from narrowgauge.bundle.entries import SUMS_FILE, Hashed, name_problem, sums_text
from narrowgauge.errors import BundleDamaged, UsageError, disk_full
from narrowgauge_contract.hashing import sha256_file

__all__ = ["SealedZip", "Shelf", "Unpacked", "open_shelf", "write_archive"]

_SEAL_WORD = b"narrowgauge bundle 1 sha256:"
_SEAL = re.compile(re.escape(_SEAL_WORD) + rb"([0-9a-f]{64})\Z")
_HASH_CHARACTERS = 64
_CHUNK = 1 << 20
#: The earliest that a zip archive can say: a bundle's bytes do not depend on when files were made.
_DATE = (1980, 1, 1, 0, 0, 0)
_REGULAR = (stat.S_IFREG | 0o644) << 16
_COMPRESSED = (".gz", ".png", ".tar", ".zip", ".jpg")
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
#: No deflated byte stands for more than 1032.
_MOST_RATIO = 1100
_ENCRYPTED = 0x1
#: More than any bundle unpacks to: images of all targets are some 200 GB.
_MOST_BYTES = 1 << 40
#: Before a file's bytes an archive has at least so many of header.
_HEADER_BYTES = 30
_FULL = (errno.ENOSPC, errno.EDQUOT)


def write_archive(path: Path, files: Sequence[Hashed]) -> str:
    """Write `files` and their SHA256SUMS to `path`, sealed, whole or not at all; its sha256.

    Raises UsageError where a file has changed since it was hashed, or where something cannot be
    read or written; DiskFull.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with zipfile.ZipFile(partial, "w") as archive:
            for each in files:
                _write(archive, each)
            sums = sums_text(files).encode()
            archive.writestr(_info(SUMS_FILE), sums, zipfile.ZIP_DEFLATED)
            archive.comment = _SEAL_WORD + b"0" * _HASH_CHARACTERS
        _seal(partial)
        os.replace(partial, path)
    except OSError as error:
        if error.errno in _FULL:
            raise disk_full(path, "the bundle", next_step="--out FILE elsewhere") from error
        raise UsageError(
            f"cannot write the bundle {path}",
            why=str(error),
            next_step="--out FILE elsewhere, or see to the file that it names",
        ) from error
    finally:
        partial.unlink(missing_ok=True)
    return sha256_file(path)


def _write(archive: zipfile.ZipFile, each: Hashed) -> None:
    info = _info(each.entry.name)
    info.file_size = each.bytes
    stored = each.entry.name.endswith(_COMPRESSED)
    info.compress_type = zipfile.ZIP_STORED if stored else zipfile.ZIP_DEFLATED
    digest = hashlib.sha256()
    with archive.open(info, "w") as stream:
        for chunk in _content(each):
            digest.update(chunk)
            stream.write(chunk)
    if digest.hexdigest() != each.sha256:
        raise UsageError(
            f"{each.entry.name} changed while it was put into the bundle",
            why="something writes there",
            next_step="wait for its end, and bundle again",
        )


def _content(each: Hashed) -> Iterator[bytes]:
    if each.entry.source is None:
        yield each.entry.content
        return
    with open(each.entry.source, "rb") as stream:
        yield from iter(lambda: stream.read(_CHUNK), b"")


def _info(name: str) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name, _DATE)
    info.external_attr = _REGULAR
    info.create_system = 3
    return info


def _seal(path: Path) -> None:
    with open(path, "r+b") as stream:
        stream.seek(-_HASH_CHARACTERS, os.SEEK_END)
        end = stream.tell()
        stream.seek(0)
        digest = _hash_until(stream, end)
        stream.seek(end)
        stream.write(digest.encode())
        stream.flush()
        os.fsync(stream.fileno())


def _hash_until(stream: IO[bytes], end: int) -> str:
    digest, left = hashlib.sha256(), end
    while left:
        chunk = stream.read(min(_CHUNK, left))
        if not chunk:
            break
        digest.update(chunk)
        left -= len(chunk)
    return digest.hexdigest()


class Shelf(Protocol):
    """The files of a bundle, wherever they lie."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every file, sorted; folders are not listed."""

    def open(self, name: str) -> IO[bytes]:
        """Its bytes. Raises BundleDamaged."""

    def seal_problem(self) -> str:
        """What is wrong with the file as a whole; empty where nothing is."""


class SealedZip:
    """A bundle that is one file. Nothing is unpacked; names and sizes are checked first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._zip = zipfile.ZipFile(path)
        except (zipfile.BadZipFile, OSError, ValueError, NotImplementedError) as error:
            raise BundleDamaged(
                f"{path} is not a bundle, or was cut short", why=str(error), next_step=_AGAIN
            ) from error
        try:
            self._infos = _checked(self._zip.infolist(), path)
        except BundleDamaged:
            self._zip.close()
            raise

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._infos))

    def open(self, name: str) -> IO[bytes]:
        try:
            return self._zip.open(self._infos[name])
        except (
            zipfile.BadZipFile,
            OSError,
            ValueError,
            NotImplementedError,
            RuntimeError,
        ) as error:
            raise BundleDamaged(f"{name} cannot be read", why=str(error)) from error

    def seal_problem(self) -> str:
        size = self._path.stat().st_size
        wanted = len(_SEAL_WORD) + _HASH_CHARACTERS
        with open(self._path, "rb") as stream:
            stream.seek(max(0, size - wanted))
            match = _SEAL.search(stream.read(wanted))
            if match is None:
                return "the file does not end with a bundle's seal"
            stream.seek(0)
            found = _hash_until(stream, size - _HASH_CHARACTERS)
        same = found.encode() == match[1]
        return "" if same else "the file's bytes are not those that were sealed"

    def close(self) -> None:
        self._zip.close()


_AGAIN = "copy or download it again"


def _checked(infos: Sequence[zipfile.ZipInfo], path: Path) -> dict[str, zipfile.ZipInfo]:
    """By name. Raises BundleDamaged for anything that unpacking could be harmed by."""
    found: dict[str, zipfile.ZipInfo] = {}
    for info in infos:
        problem = name_problem(info.orig_filename) or _entry_problem(info)
        if info.orig_filename.casefold() in found:
            problem = "it is there twice, or differs from another by the case of a letter only"
        if problem:
            raise BundleDamaged(
                f"{path} holds a file that no bundle has: {info.orig_filename!a}",
                why=problem,
                next_step="do not unpack it; nothing was unpacked here",
            )
        found[info.orig_filename.casefold()] = info
    problem = _together_problem(infos)
    if problem:
        raise BundleDamaged(f"{path} is no archive that a bundle is", why=problem, next_step=_AGAIN)
    return {info.orig_filename: info for info in found.values()}


def _together_problem(infos: Sequence[zipfile.ZipInfo]) -> str:
    """Bombs that no single file shows: many that share their bytes, or too much in all."""
    end = 0
    for info in sorted(infos, key=lambda each: each.header_offset):
        if info.header_offset < end:
            return f"{info.orig_filename!a} shares bytes with another file"
        name = len(info.orig_filename.encode("utf-8", "surrogatepass"))
        end = info.header_offset + _HEADER_BYTES + name + info.compress_size
    if sum(info.file_size for info in infos) > _MOST_BYTES:
        return f"it unpacks to more than {_MOST_BYTES / 2**40:g} TiB"
    return ""


def _entry_problem(info: zipfile.ZipInfo) -> str:
    if stat.S_IFMT(info.external_attr >> 16) not in (0, stat.S_IFREG):
        return "it is a link or a device"
    if info.flag_bits & _ENCRYPTED:
        return "it is encrypted"
    if info.compress_type not in _METHODS:
        return "it is compressed in a way that bundles do not use"
    if info.file_size > max(1, info.compress_size) * _MOST_RATIO:
        return "it claims to be far larger than it can be"
    return ""


class Unpacked:
    """A bundle that was unpacked to a folder. It has no seal: only each file's hash."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names = tuple(sorted(self._walk()))

    @property
    def names(self) -> tuple[str, ...]:
        return self._names

    def open(self, name: str) -> IO[bytes]:
        try:
            return open(self._folder / name, "rb")
        except OSError as error:
            raise BundleDamaged(f"{name} cannot be read", why=str(error)) from error

    def seal_problem(self) -> str:
        return ""

    def close(self) -> None: ...

    def _walk(self) -> Iterator[str]:
        for folder, folders, names in os.walk(self._folder):
            linked = [name for name in (*folders, *names) if Path(folder, name).is_symlink()]
            for name in linked:
                raise BundleDamaged(
                    f"{Path(folder, name)} is a link", why="a bundle has none, so somebody made it"
                )
            yield from (Path(folder, n).relative_to(self._folder).as_posix() for n in names)


@contextmanager
def open_shelf(path: Path) -> Iterator[SealedZip | Unpacked]:
    """The bundle at `path`, a file or a folder it was unpacked to. UsageError, BundleDamaged."""
    if not path.exists():
        raise UsageError(f"there is no bundle {path}")
    shelf = Unpacked(path) if path.is_dir() else SealedZip(path)
    try:
        yield shelf
    finally:
        shelf.close()
