"""What an experiment's `run(ctx)` gets: one row's parameters, its device, and where results go."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict, List, Mapping, Optional, Sequence, Union

import torch

from narrowgauge_contract.errors import UsageError
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import RowPlan
from narrowgauge_lab.checkpoint import Checkpoints
from narrowgauge_lab.data import FlatData, open_data, synthetic_data

__all__ = ["RowContext"]


class RowContext:
    """One row. Everything it records is an event; nothing is kept until the end.

    `device` is where the row runs; `seed` is the run's seed plus the repeat.
    """

    def __init__(
        self,
        plan: RowPlan,
        log: EventLog,
        out: Path,
        *,
        device: torch.device,
        profile: str,
        data_root: Optional[Path] = None,
        resume: bool = False,
    ) -> None:
        self.parameters: Mapping[str, Any] = dict(plan.parameters)
        self.seed = plan.seed
        self.repeat = plan.repeat
        self.device = device
        self.profile = profile
        self.out = out
        self.folder = out / f"row-{plan.index}"
        self.checkpoints = Checkpoints(out / "checkpoints" / f"row-{plan.index}", resume)
        self._index = plan.index
        self._log = log
        self._data_root = data_root
        self._side_files: List[Path] = []

    def data(self, name: str) -> FlatData:
        """A declared data set, memory-mapped. Raises DataUnavailableError, DataCorruptError."""
        return open_data(name, self._data_root)

    def synthetic(self, *, channels: int, size: int, classes: int, train: int, test: int) -> FlatData:
        """Made-up data, the same for every row of the run; the row says so in its facts."""
        self.fact("synthetic", True)
        return synthetic_data(
            0, channels=channels, size=size, classes=classes, train=train, test=test
        )

    def metric(
        self,
        name: str,
        values: Union[float, Sequence[float]],
        *,
        unit: str,
        source: str,
        index: str = "",
        conditions: Optional[Dict[str, Any]] = None,
    ) -> None:
        """Append raw samples to a metric of this row. NaN and infinity are kept as they are."""
        listed = [float(v) for v in values] if isinstance(values, (list, tuple)) else None
        self._log.emit(
            EventKind.METRIC,
            self._index,
            name=name,
            unit=unit,
            source=source,
            values=listed if listed is not None else [float(values)],  # type: ignore[arg-type]
            index=index,
            conditions=conditions or {},
        )

    def fact(self, name: str, value: Any) -> None:
        """A property of the row: a number, text, truth value, or lists and tables of them."""
        self._log.emit(EventKind.FACT, self._index, name=name, value=value)

    def invalid(self, reason: str) -> None:
        """The row's numbers must not be used. May be said more than once; every reason is kept."""
        self._log.emit(EventKind.INVALID, self._index, reason=reason)

    def progress(self, done: float, total: float, unit: str = "", phase: str = "") -> None:
        """How far the row is; the launcher makes an ETA of it."""
        self._log.emit(
            EventKind.PROGRESS, self._index, done=done, total=total, unit=unit, phase=phase
        )

    def log(self, text: str) -> None:
        """A line for whoever reads the run afterwards."""
        self._log.emit(EventKind.LOG, self._index, text=text)

    def side_file(self, name: str) -> Path:
        """Where to write a file that belongs to the row; it is hashed when the row ends."""
        path = self.folder / name
        if self.folder.resolve() not in path.resolve().parents:
            raise UsageError(f"side file '{name}' is outside the row's folder")
        path.parent.mkdir(parents=True, exist_ok=True)
        if path not in self._side_files:
            self._side_files.append(path)
        return path

    def finish(self) -> None:
        """Record the side files. The supervisor calls it after `run`.

        Raises UsageError where a side file was announced and never written.
        """
        for path in self._side_files:
            name = path.relative_to(self.out).as_posix()
            if not path.is_file():
                raise UsageError(f"the side file {name} was announced and never written")
            size = path.stat().st_size
            self._log.emit(
                EventKind.SIDE_FILE, self._index, path=name, sha256=sha256_file(path), bytes=size
            )
