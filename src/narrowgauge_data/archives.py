"""The files inside what a source gives: archives, wheels, Debian packages, or files as they lie.

Everything is read by the standard library: a slim image has no dpkg-deb.
"""

from __future__ import annotations

import gzip
import io
import lzma
import shutil
import tarfile
import zipfile
import zlib
from pathlib import Path
from typing import IO, BinaryIO, Callable, Dict, Iterable, Iterator, Tuple

__all__ = ["ARCHIVES", "DAMAGED", "BadSourceError", "collect"]

#: The ends of the names that are opened rather than taken.
ARCHIVES = (".tgz", ".tar.gz", ".deb", ".whl")
#: Everything that reading a damaged file of these formats raises.
DAMAGED = (
    EOFError, KeyError, ValueError,
    gzip.BadGzipFile, lzma.LZMAError, tarfile.TarError, zipfile.BadZipFile, zlib.error,
)  # fmt: skip

_AR_MAGIC = b"!<arch>\n"
_AR_HEADER = 60
Wants = Callable[[str], bool]


class BadSourceError(Exception):
    """A source gave nothing, or something that cannot be decoded; the text says what."""


def collect(sources: Iterable[Path], wants: Wants, into: Path) -> Dict[str, Path]:
    """The files whose base names are wanted, by that name: out of archives, or as they lie.

    Archives are unpacked below `into` by base name alone, so no path in them leads anywhere.
    Raises BadSourceError for a damaged archive, OSError as the file system gives it.
    """
    found: Dict[str, Path] = {}
    for path in sources:
        if not path.name.endswith(ARCHIVES):
            if wants(path.name):
                found.setdefault(path.name, path)
            continue
        try:
            for name, unpacked in _unpack(path, wants, into):
                found.setdefault(name, unpacked)
        except DAMAGED as error:
            raise BadSourceError(f"{path.name} is damaged: {error}") from error
    return found


def _unpack(path: Path, wants: Wants, into: Path) -> Iterator[Tuple[str, Path]]:
    for name, content in _zipped(path, wants) if path.suffix == ".whl" else _tarred(path, wants):
        target = into / name
        with content, open(target, "wb") as output:
            shutil.copyfileobj(content, output, 1 << 20)
        yield name, target


def _zipped(path: Path, wants: Wants) -> Iterator[Tuple[str, IO[bytes]]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            name = Path(member.filename).name
            if not member.is_dir() and wants(name):
                yield name, archive.open(member)


def _tarred(path: Path, wants: Wants) -> Iterator[Tuple[str, IO[bytes]]]:
    with open(path, "rb") as stream, _open_tar(path, stream) as archive:
        for member in archive:
            name = Path(member.name).name
            if not member.isfile() or not wants(name):
                continue
            content = archive.extractfile(member)
            assert content is not None
            yield name, content


def _open_tar(path: Path, stream: BinaryIO) -> tarfile.TarFile:
    if path.suffix != ".deb":
        return tarfile.open(fileobj=stream, mode="r:gz")
    name, content = _debian_data(stream)
    if name.endswith(".zst"):
        raise BadSourceError(
            f"{path.name} holds {name}, which Python cannot open: unpack it with dpkg-deb -x, "
            "and take the files inside"
        )
    return tarfile.open(fileobj=io.BytesIO(content), mode="r:*")


def _debian_data(stream: BinaryIO) -> Tuple[str, bytes]:
    """The member of an ar archive that holds the package's files: its name and its bytes."""
    if stream.read(len(_AR_MAGIC)) != _AR_MAGIC:
        raise ValueError("it does not begin as a Debian package does")
    while True:
        head = stream.read(_AR_HEADER)
        if len(head) < _AR_HEADER or head[58:] != b"`\n":
            raise ValueError("it ends before its data")
        name, size = head[:16].decode("ascii", "replace").rstrip(" /"), int(head[48:58])
        if name.startswith("data.tar"):
            content = stream.read(size)
            if len(content) != size:
                raise ValueError(f"{name} is truncated")
            return name, content
        stream.seek(size + size % 2, io.SEEK_CUR)
