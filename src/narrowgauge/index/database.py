"""The index as a SQLite file in the results folder.

The records are the truth and the file is a cache: it is brought up to date before each question,
thrown away where it cannot be read, and kept in memory where the folder cannot be written. New runs
are found by their folders' names; whether a record is still the one that was read, its size and
time tell, and that is looked at for the runs that are given. One whose bytes changed since they
were first seen was edited by hand, and is refused by name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sqlite3
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

from narrowgauge.index.listed import Listed, Witness, listed
from narrowgauge.store import JOB_FILE, RunFolder, RunState
from narrowgauge_contract.record import RECORD_FILE

__all__ = ["INDEX_FILE", "Index"]

INDEX_FILE = ".index.sqlite"
#: Raised with every change of the table: an older file is thrown away.
_VERSION = 1
_FIELDS = tuple(field.name for field in dataclasses.fields(Listed))
_TABLE = f"CREATE TABLE runs ({', '.join(_FIELDS)}, PRIMARY KEY (folder))"
_BY_AGE = "CREATE INDEX by_age ON runs (age DESC)"
#: Another process may be bringing the same file up to date.
_PATIENCE_S = 30.0


class Index:
    """The runs of one results folder. A context manager; up to date when entered.

    `witness` sees each record that has to be read for that, so that nobody need read it again.
    """

    def __init__(self, root: Path, witness: Witness | None = None) -> None:
        self.root = root
        self._witness = witness
        self._connection: sqlite3.Connection | None = None

    def __enter__(self) -> Index:
        try:
            self._connection = _opened(self.root / INDEX_FILE)
            self._refresh()
        except sqlite3.Error as error:
            # A damaged, foreign or busy file, or a folder that takes none: none of it is the truth.
            self._close()
            if not isinstance(error, sqlite3.OperationalError):
                with contextlib.suppress(OSError):
                    (self.root / INDEX_FILE).unlink(missing_ok=True)
            self._connection = _opened(Path(":memory:"))
            self._refresh()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._close()

    def runs(
        self, *, experiment: str | None = None, status: str | None = None, limit: int | None = None
    ) -> tuple[Listed, ...]:
        """The newest first; those of one experiment, of one status, at most so many.

        What is given was checked against its record just now. Which runs are damaged is asked of
        all records, as is everything without a limit.
        """
        if status == RunState.DAMAGED.value:
            self._renew(self._ask({"experiment": experiment}, None))
        while True:
            found = self._ask({"experiment": experiment, "status": status}, limit)
            if not self._renew(found):
                return found

    def _ask(self, wanted: Mapping[str, str | None], limit: int | None) -> tuple[Listed, ...]:
        chosen = {name: value for name, value in wanted.items() if value is not None}
        where = f" WHERE {' AND '.join(f'{name} = ?' for name in chosen)}" if chosen else ""
        question = f"SELECT {', '.join(_FIELDS)} FROM runs{where} ORDER BY age DESC LIMIT ?"
        values = (*chosen.values(), -1 if limit is None else limit)
        return tuple(Listed(*row) for row in self._open.execute(question, values))

    def _renew(self, runs: Sequence[Listed]) -> bool:
        """Read again what changed since it was read; whether anything had."""
        stale = []
        for run in runs:
            stamp = _stamp(str(self.root / run.folder))
            if stamp is not None and stamp != (run.size, run.mtime_ns):
                # One that could not be read may have been half a copy: its digest binds nobody.
                first = run.digest if run.rows is not None else ""
                stale.append(self._read(run.folder, *stamp, first))
        self._write((), stale)
        return bool(stale)

    def folder(self, run: Listed) -> RunFolder:
        """Where a run lies."""
        return RunFolder(self.root / run.folder)

    @property
    def _open(self) -> sqlite3.Connection:
        if self._connection is None:
            raise RuntimeError("the index is used outside of its context")
        return self._connection

    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _refresh(self) -> None:
        """Bring the table up to date with the folders: new runs, those that had no record when they
        were read, and those that are gone."""
        known = dict(self._open.execute("SELECT folder, size FROM runs"))
        new: list[Listed] = []
        for folder in _found(str(self.root), known):
            if known.pop(folder, -1) < 0:
                stamp = _stamp(str(self.root / folder))
                if stamp is not None:
                    new.append(self._read(folder, *stamp, ""))
        self._write(tuple(known), new)

    def _read(self, folder: str, size: int, mtime_ns: int, first: str) -> Listed:
        """Read a run. `first`: the digest of its record when it was first read; empty if it was
        not."""
        path = self.root / folder
        run = listed(self.root, RunFolder(path), size, mtime_ns, self._witness)
        if not first or first == run.digest:
            return run
        # The digest stays the first one, so that the edit is seen again next time.
        return dataclasses.replace(
            run,
            digest=first,
            status=RunState.DAMAGED.value,
            problem=f"{path / RECORD_FILE} was edited after it was recorded",
        )

    def _write(self, gone: Sequence[str], new: Sequence[Listed]) -> None:
        """One transaction: a kill leaves the table as it was."""
        if not gone and not new:
            return
        with self._open as transaction:
            transaction.executemany("DELETE FROM runs WHERE folder = ?", [(f,) for f in gone])
            transaction.executemany(
                f"INSERT OR REPLACE INTO runs VALUES ({', '.join('?' * len(_FIELDS))})",
                _tuples(new),
            )


def _tuples(runs: Iterable[Listed]) -> Iterator[tuple[object, ...]]:
    for run in runs:
        yield tuple(_storable(getattr(run, name)) for name in _FIELDS)


def _storable(value: object) -> object:
    """A record may hold half of a surrogate pair, which JSON can say and UTF-8 cannot."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value


def _opened(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=_PATIENCE_S)
    try:
        if not _current(connection):
            with connection:
                connection.execute("BEGIN IMMEDIATE")
                if not _current(connection):  # another process may have been faster
                    connection.execute("DROP TABLE IF EXISTS runs")
                    connection.execute(_TABLE)
                    connection.execute(_BY_AGE)
                    connection.execute(f"PRAGMA user_version = {_VERSION}")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _current(connection: sqlite3.Connection) -> bool:
    return bool(connection.execute("PRAGMA user_version").fetchone()[0] == _VERSION)


def _found(root: str, known: Container[str]) -> Iterator[str]:
    """The folder of every run below the root, relative to it, as `Store.all` finds them, without a
    Path for each of 100,000; only folders that are not `known` are looked into."""
    for first in _folders(root):
        if first in known or _stamp(f"{root}/{first}") is not None:
            yield first
            continue
        for second in _folders(f"{root}/{first}"):
            folder = f"{first}/{second}"
            if folder in known or _stamp(f"{root}/{folder}") is not None:
                yield folder


def _folders(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir()]
    except (FileNotFoundError, NotADirectoryError):
        return []


def _stamp(folder: str) -> tuple[int, int] | None:
    """None where the folder is no run."""
    with contextlib.suppress(OSError):
        found = os.stat(f"{folder}/{RECORD_FILE}")
        return found.st_size, found.st_mtime_ns
    return (-1, -1) if os.path.isfile(f"{folder}/{JOB_FILE}") else None
