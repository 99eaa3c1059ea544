"""What lies in the data folder: whether a set is whole, and the lock under which it is changed.

Hashing 180 MB before each run would cost a second, so a set that was hashed once gets a marker with
the sizes and times of its files; a file that changed since is hashed again.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Dict, Iterable, Iterator, Optional, Tuple

from narrowgauge_contract.codec import decode, read_json, write_json_atomic
from narrowgauge_contract.data_commands import DataCommands
from narrowgauge_contract.datasets import DataSet
from narrowgauge_contract.errors import DataCorruptError, DataUnavailableError, NarrowgaugeError
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_data.caller import Caller

__all__ = [
    "MARKER",
    "FileState",
    "Report",
    "changing",
    "check",
    "is_ours",
    "raise_if_wrong",
    "replace_set",
    "staging",
]

#: Beside the files of a set that was hashed and found good.
MARKER = "verified.json"


@dataclass(frozen=True)
class FileState:
    """One flat file. `found` is its sha256, None where the file is missing."""

    path: Path
    expected: str
    found: Optional[str]

    @property
    def problem(self) -> str:
        """Empty for a good file."""
        if self.found is None:
            return "missing"
        return "" if self.found == self.expected else "corrupt"


@dataclass(frozen=True)
class Report:
    """A set as it lies on disk."""

    name: str
    files: Tuple[FileState, ...]

    @property
    def complete(self) -> bool:
        return all(not state.problem for state in self.files)

    @property
    def finding(self) -> str:
        """The set in one line."""
        problems = {state.problem for state in self.files} - {""}
        return f"{self.name}: {' and '.join(sorted(problems)) or 'complete and verified'}"

    def raise_if_corrupt(self, commands: DataCommands) -> None:
        """Raises DataCorruptError, naming each wrong file and both hashes."""
        wrong = [state for state in self.files if state.problem == "corrupt"]
        if wrong:
            raise DataCorruptError(
                f"{self.name}: {', '.join(s.path.name for s in wrong)} is not what it should be",
                why="\n".join(
                    f"{s.path}\n  has sha256 {s.found}\n  should be  {s.expected}" for s in wrong
                ),
                next_step=f"{commands.repair.format(self.name)} fetches the set again",
            )

    def raise_if_incomplete(self, commands: DataCommands) -> None:
        """Raises DataUnavailableError, naming each missing file."""
        missing = [state.path for state in self.files if state.problem == "missing"]
        if missing:
            raise DataUnavailableError(
                f"{self.name}: {len(missing)} of {len(self.files)} files are missing",
                why="\n".join(f"{path} is not there" for path in missing),
                next_step=commands.fetch.format(self.name),
            )


def raise_if_wrong(reports: Iterable[Report], commands: DataCommands) -> None:
    """Raises DataCorruptError, or DataUnavailableError where files are only missing."""
    looked = tuple(reports)
    for report in looked:
        report.raise_if_corrupt(commands)
    for report in looked:
        report.raise_if_incomplete(commands)


@dataclass(frozen=True)
class _Stamp:
    bytes: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class _Marker:
    files: Dict[str, _Stamp]


def check(dataset: DataSet, root: Path, *, thorough: bool = False) -> Report:
    """Look at a set below `root`; `thorough` hashes every file whatever the marker says.

    A set found good by hashing gets its marker anew, where the folder can be written.
    """
    folder = root / dataset.name
    known = {} if thorough else _stamps(folder)
    states, hashed = [], False
    for flat in dataset.files:
        path = folder / flat.name
        found = None
        if path.is_file():
            stamp = known.get(flat.name)
            fresh = stamp is not None and (stamp.bytes, stamp.mtime_ns) == _size_and_time(path)
            hashed = hashed or not fresh
            found = stamp.sha256 if stamp is not None and fresh else sha256_file(path)
        states.append(FileState(path, flat.sha256, found))
    report = Report(dataset.name, tuple(states))
    if hashed and report.complete:
        _mark(dataset, folder)
    return report


def _mark(dataset: DataSet, folder: Path) -> None:
    """Note that `folder` was just verified to hold `dataset`. A read-only one stays unmarked."""
    stamps = {
        flat.name: _Stamp(*_size_and_time(folder / flat.name), flat.sha256)
        for flat in dataset.files
    }
    try:
        write_json_atomic(folder / MARKER, _Marker(stamps))
    except OSError:
        return  # it costs a hash at the next run, no more


def _stamps(folder: Path) -> Dict[str, _Stamp]:
    path = folder / MARKER
    try:
        return decode(_Marker, read_json(path), str(path)).files
    except (OSError, NarrowgaugeError):
        return {}


def is_ours(folder: Path) -> bool:
    """Whether this program made `folder`, or once found a whole set in it."""
    return bool(_stamps(folder))


def _size_and_time(path: Path) -> Tuple[int, int]:
    status = path.stat()
    return status.st_size, status.st_mtime_ns


@contextmanager
def changing(name: str, root: Path, caller: Caller) -> Iterator[None]:
    """One process at a time changes a set; the system frees the lock of one that was killed.

    What the file system says meanwhile becomes DiskFullError or DataUnavailableError.
    """
    with caller.naming_failures(name, root):
        root.mkdir(parents=True, exist_ok=True)
        with open(root / f".{name}.lock", "w", encoding="utf-8") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                caller.say(f"{name}: another process is changing it; waiting")
                fcntl.flock(stream, fcntl.LOCK_EX)
            yield


@contextmanager
def staging(name: str, root: Path) -> Iterator[Path]:
    """A folder on the data's own file system, gone at the end. Call it under `changing`.

    What a killed fetch left behind is removed first: the lock says that nobody uses it.
    """
    for stale in root.glob(f".{name}.*.partial"):
        shutil.rmtree(stale, ignore_errors=True)
    folder = Path(tempfile.mkdtemp(prefix=f".{name}.", suffix=".partial", dir=root))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def replace_set(dataset: DataSet, made: Path, root: Path) -> Path:
    """Put the verified files of the folder `made` in the set's place. Call it under `changing`.

    A new set appears whole. In a folder that is there, only the set's own files are replaced, one
    by one: whatever else a user keeps in it stays. A process that has an old file mapped keeps it,
    and where this is stopped halfway the set is as wrong as it was, and looked at again.
    """
    for flat in dataset.files:
        (made / flat.name).chmod(0o644)
    made.chmod(0o755)
    folder = root / dataset.name
    if not folder.exists():
        _mark(dataset, made)
        os.replace(made, folder)
        return folder
    for flat in dataset.files:
        _move(made / flat.name, folder / flat.name)
    _mark(dataset, folder)
    shutil.rmtree(made, ignore_errors=True)
    return folder


def _move(source: Path, target: Path) -> None:
    """Replace `target` in one step, also where its folder is a link to another file system."""
    try:
        os.replace(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:
            raise
        beside = target.with_name(f".{target.name}.partial")
        try:
            shutil.copyfile(source, beside)
            os.replace(beside, target)
        except BaseException:
            if beside.exists():
                beside.unlink()
            raise
