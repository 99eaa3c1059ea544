"""What of a sweep was started and what came out: one line of JSON each, appended, never changed."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.errors import Busy
from narrowgauge.executors.base import save
from narrowgauge_contract.codec import encode
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.figures import figure, median
from narrowgauge_contract.record import Record

__all__ = ["Entry", "Journal", "sweep_folder"]

_FOLDER = ".sweeps"


@dataclass
class Entry:
    """The newest that is known of one point. `exit_code` is None until its run is recorded."""

    key: str
    run_id: str
    values: dict[str, Any]
    exit_code: int | None = None
    figures: Mapping[str, float] | None = None
    valid: bool = False

    @property
    def complete(self) -> bool:
        return self.exit_code is not None and self.exit_code in (
            ExitCode.OK,
            ExitCode.NO_VALID_ROW,
            ExitCode.NOT_APPLICABLE,
        )


def sweep_folder(results: Path, name: str) -> Path:
    return results / _FOLDER / name


class Journal:
    """The journal of one sweep. Any number of launchers may append; a torn last line (its launcher
    was killed) is passed over."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / "journal.jsonl"

    def entries(self) -> dict[str, Entry]:
        """By key of the point."""
        found: dict[str, Entry] = {}
        by_run: dict[str, Entry] = {}
        for body in self._lines():
            if "values" in body:
                entry = Entry(body["key"], body["run"], body["values"])
                found[entry.key] = by_run[entry.run_id] = entry
            elif body["run"] in by_run:
                entry = by_run[body["run"]]
                entry.exit_code, entry.valid = body["exit_code"], body["valid"]
                entry.figures = body["figures"]
        return found

    def started(self, key: str, run_id: str, values: Mapping[str, Any]) -> None:
        """A run is about to be started for a point."""
        self._append({"key": key, "run": run_id, "values": dict(values)})

    def ended(self, run_id: str, record: Record) -> dict[str, float]:
        """A run was recorded; its figures: per metric the median over its valid rows."""
        figures = figures_of(record)
        body = {"run": run_id, "exit_code": record.exit_code, "valid": bool(record.valid_rows())}
        self._append({**body, "figures": figures})
        return figures

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the sweep: two launchers would run each point twice. Raises Busy."""
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".lock", "a", encoding="ascii") as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise Busy(
                    f"another launcher works on the sweep {self.folder.name}",
                    why="it holds the sweep's lock",
                    next_step='wait for it; by method = "optuna" several may share one sweep',
                ) from None
            yield

    def keep(self, name: str, value: Any) -> None:
        """Write a document beside the journal."""
        self.folder.mkdir(parents=True, exist_ok=True)
        save(self.folder / name, encode(value))

    def _append(self, body: Mapping[str, Any]) -> None:
        line = json.dumps(body, sort_keys=True, default=str) + "\n"
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self._path, "a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)
            torn = stream.tell() > 0 and self._last_byte(stream.fileno()) != b"\n"
            stream.write((b"\n" if torn else b"") + line.encode("utf-8"))
            stream.flush()
            os.fsync(stream.fileno())

    @staticmethod
    def _last_byte(number: int) -> bytes:
        return os.pread(number, 1, os.fstat(number).st_size - 1)

    def _lines(self) -> Iterator[dict[str, Any]]:
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        for line in text.splitlines():
            try:
                body = json.loads(line)
            except ValueError:
                continue
            if isinstance(body, dict) and isinstance(body.get("run"), str):
                if "values" in body and not isinstance(body["values"], dict):
                    continue
                if {"key", "values"} <= body.keys() or {"exit_code", "figures"} <= body.keys():
                    yield {"valid": False, **body}


def figures_of(record: Record) -> dict[str, float]:
    """Per metric the median, over the valid rows, of what each row says of it."""
    values: dict[str, list[float]] = {}
    for row in record.valid_rows():
        for metric in row.metrics:
            if metric.values:
                values.setdefault(metric.name, []).append(figure(metric).value)
    return {name: median(listed) for name, listed in values.items()}
