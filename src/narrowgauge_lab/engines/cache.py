"""Built engines kept in one folder: a file per key, which says itself what it was made for.

A file is a line of magic, a line of JSON (the key's fields, the payload's size and sha256), and the
payload. It is written beside its place and renamed, so it is there whole or not at all; damage that
comes later is found by its sha256. Whoever builds holds a lock of the kernel's on `<key>.lock`,
which goes with its process: a second process waits, and then reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, Mapping, Optional, Tuple

from narrowgauge_lab.engines.errors import EngineCacheError
from narrowgauge_lab.engines.keys import CacheKey
from narrowgauge_lab.errors import is_disk_full

__all__ = ["CacheEntry", "CacheKey", "Cached", "EngineCache", "NothingKept"]

_MAGIC = b"narrowgauge engine 1\n"
_SUFFIX = ".engine"
#: A header is some hundred bytes; a line longer than this is none.
_HEADER_BYTES = 1 << 16
_TORCH = "version of torch"


@dataclasses.dataclass(frozen=True)
class CacheEntry:
    """`payload`, or None and the reason in `note`; both empty where there simply is none."""

    payload: Optional[bytes]
    note: str = ""


@dataclasses.dataclass(frozen=True)
class Cached:
    """What `EngineCache.fetch` gives: the engine as bytes, where from, and what there is to say."""

    payload: bytes
    from_cache: bool
    key: str
    note: str = ""


class _DamageError(Exception):
    """A file is not what was written."""


class EngineCache:
    """Engines by their keys, below `folder`, which is made when something is kept."""

    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)

    def path(self, key: CacheKey) -> Path:
        return self.folder / f"{key.engine}-{key.digest[:32]}{_SUFFIX}"

    def fetch(
        self,
        key: CacheKey,
        build: Callable[[], bytes],
        unusable: Callable[[bytes], str] = lambda _: "",
    ) -> Cached:
        """The engine of this key, built and kept where there is none that can be used.

        `unusable` says why the engine's library cannot take what was kept, or nothing. The note
        says why a kept engine was not used, why the new one could not be kept, or how long another
        process was waited for. Raises EngineCacheError where the folder is none; what `build`
        raises.
        """
        begin = time.monotonic()
        with self._locked(key) as (waited, unlocked):
            entry = self.get(key)
            reason = entry.note
            if entry.payload is not None:
                refused = unusable(entry.payload)
                if not refused:
                    note = _waited(begin) if waited else ""
                    return Cached(entry.payload, True, key.digest, note)
                reason = f"rebuilt: {refused}"
            payload = build()
            kept = unlocked or self.put(key, payload)
        return Cached(payload, False, key.digest, "; ".join(filter(None, (reason, kept))))

    def get(self, key: CacheKey) -> CacheEntry:
        """What is kept under this key. None with a note: damaged, or made elsewhere."""
        path = self.path(key)
        try:
            header, payload = _read(path)
        except FileNotFoundError:
            return CacheEntry(None, self._nearest(key))
        except NotADirectoryError as error:
            raise _no_folder(self.folder, error) from error
        except OSError as error:
            return CacheEntry(None, f"rebuilt: {path} cannot be read: {error.strerror}")
        except _DamageError as damage:
            return CacheEntry(None, f"rebuilt: the cached engine {path.name} was damaged: {damage}")
        if header["asked"] != dict(key.asked) or header["here"] != dict(key.here):
            return CacheEntry(None, f"rebuilt: {path.name} is another engine under this name")
        return CacheEntry(payload)

    def put(self, key: CacheKey, payload: bytes) -> str:
        """Keep an engine; why it could not be kept, or nothing. Raises EngineCacheError where the
        folder is none."""
        path = self.path(key)
        part = path.with_name(f"{path.name}.{os.getpid()}.part")
        header = {
            "asked": dict(key.asked), "here": dict(key.here),
            "bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest(),
        }  # fmt: skip
        try:
            self._make_folder()
            self._drop_parts(path)
            with open(part, "wb") as stream:
                stream.write(_MAGIC + json.dumps(header, sort_keys=True).encode() + b"\n")
                stream.write(payload)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(part, path)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink()
            return self._not_kept(error)
        return ""

    def _make_folder(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise _no_folder(self.folder, error) from error

    def _drop_parts(self, path: Path) -> None:
        """What processes left that were ended while they wrote this engine."""
        for part in self.folder.glob(f"{path.name}.*.part"):
            part.unlink()

    @contextlib.contextmanager
    def _locked(self, key: CacheKey) -> Iterator[Tuple[bool, str]]:
        """Hold the key's lock: whether another process had it first, and why there is no lock (a
        folder that cannot be written: what it holds can still be read)."""
        path = self.path(key).with_suffix(".lock")
        try:
            self._make_folder()
            stream = open(path, "a", encoding="utf-8")
        except OSError as error:
            yield False, self._not_kept(error)
            return
        with stream:
            waited, trouble = False, ""
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                waited = True
                fcntl.flock(stream, fcntl.LOCK_EX)
            except OSError as error:  # a file system without locks
                trouble = self._not_kept(error)
            yield waited, trouble

    def _not_kept(self, error: OSError) -> str:
        if is_disk_full(error):
            return f"not kept: no room left in {self.folder}; free some space there"
        why = error.strerror or str(error)
        if error.errno in (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS):
            why = f"its file system has no locks ({why})"
        return f"not kept: cannot write to {self.folder}: {why}; give a folder that can be written"

    def _nearest(self, key: CacheKey) -> str:
        """Why an engine that answers the same question is not used: it was made elsewhere."""
        found: List[Tuple[int, str]] = []
        for path in sorted(self.folder.glob(f"{key.engine}-*{_SUFFIX}")):
            try:
                header = _header(path)
            except (OSError, _DamageError):
                continue  # whoever asks for it will be told
            if _same_question(header, key):
                differing = _differences(header["here"], dict(key.here))
                found.append((len(differing), f"not used: {path.name}, made with {differing[0]}"))
        return min(found)[1] if found else ""


class NothingKept(EngineCache):
    """Stands where nothing may be kept: it always builds, and its notes say why."""

    def __init__(self, why: str) -> None:
        super().__init__(Path(os.devnull))
        self._why = why

    def fetch(
        self,
        key: CacheKey,  # noqa: ARG002
        build: Callable[[], bytes],
        unusable: Callable[[bytes], str] = lambda _: "",  # noqa: ARG002
    ) -> Cached:
        return Cached(build(), False, "", f"not kept: {self._why}")

    def get(self, key: CacheKey) -> CacheEntry:  # noqa: ARG002
        return CacheEntry(None)

    def put(self, key: CacheKey, payload: bytes) -> str:  # noqa: ARG002
        return ""


def _same_question(header: Mapping[str, Any], key: CacheKey) -> bool:
    """Whether an entry answers what `key` asks. A network's code is as its torch writes it down, so
    under another torch its weights have to do."""
    there, here = dict(header["asked"]), dict(key.asked)
    if header["here"].get(_TORCH) != key.here.get(_TORCH):
        there.pop("network", None)
        here.pop("network", None)
    return there == here


def _differences(there: Dict[str, str], here: Dict[str, str]) -> List[str]:
    """The device first, where it is another; our own source last."""
    names = sorted({*there, *here}, key=lambda name: (name != "device", name == "source", name))
    return [
        f"another {name}: {there.get(name, 'none')}, here {here.get(name, 'none')}"
        for name in names
        if there.get(name) != here.get(name)
    ] or ["the same in another file"]


def _header(path: Path) -> Dict[str, Any]:
    with open(path, "rb") as stream:
        return _parsed(stream)


def _read(path: Path) -> Tuple[Dict[str, Any], bytes]:
    with open(path, "rb") as stream:
        header = _parsed(stream)
        payload = stream.read()
    if len(payload) != header["bytes"]:
        raise _DamageError(f"it has {len(payload)} of {header['bytes']} bytes")
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise _DamageError("its sha256 is not that of what was written")
    return header, payload


def _parsed(stream: Any) -> Dict[str, Any]:
    if stream.read(len(_MAGIC)) != _MAGIC:
        raise _DamageError("it does not begin as one")
    try:
        header = json.loads(stream.readline(_HEADER_BYTES).decode())
        fields = {"asked": dict, "here": dict, "bytes": int, "sha256": str}
        if all(isinstance(header[name], kind) for name, kind in fields.items()):
            return dict(header)
    except (ValueError, KeyError, TypeError):
        pass
    raise _DamageError("its header cannot be read")


def _waited(begin: float) -> str:
    return f"built by another process, waited for {time.monotonic() - begin:.1f} s"


def _no_folder(folder: Path, error: OSError) -> EngineCacheError:
    return EngineCacheError(
        f"{folder} is no folder to keep engines in",
        why=error.strerror or str(error),
        next_step="give another, or none: engines are then built each time",
    )
