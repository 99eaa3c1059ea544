"""What an experiment's `run(ctx)` gets: one row's parameters, its device, and where results go."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    List,
    Mapping,
    Optional,
    Sequence,
    Tuple,
    Union,
)

import numpy as np
import torch

from narrowgauge_contract.errors import DamagedRecordError, ExperimentFileError, UsageError
from narrowgauge_contract.events import EventKind, EventLog
from narrowgauge_contract.hashing import sha256_file
from narrowgauge_contract.job import SYNTHETIC, RowPlan
from narrowgauge_contract.placement import PlacementPlan, is_reference, parse_plan, plan_value
from narrowgauge_lab.checkpoint import Checkpoints
from narrowgauge_lab.data import FlatData, open_data, open_files, synthetic_data
from narrowgauge_lab.nodes import Meeting
from narrowgauge_lab.spans import NoSpans, RecordedSpans, Spans

__all__ = ["RowContext"]

#: One made-up set for all rows and repeats of a run, as a real set would be.
_SYNTHETIC_SEED = 0


class RowContext:
    """One row. Everything it records is an event at once; nothing is kept until the end.

    `parameters` has every declared parameter; `seed` is the run's seed plus the repeat; `device` is
    where the row runs; `checkpoints` belong to this row. `spans` is where `span` goes, and
    `at_rest` is called between two things of the experiment; profilers set them. Every method that
    records raises OSError where the disk is full, and TypeError for what JSON does not have.
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
        data_sets: Optional[Sequence[str]] = None,
        synthetic: bool = True,
        resume: bool = False,
        plans: Optional[Mapping[str, Any]] = None,
        meeting: Optional[Meeting] = None,
    ) -> None:
        """`data_sets`: what the row may read (None: any); `synthetic`: whether made-up data was
        asked for; `plans`: the Job's placement plans; `meeting`: where other machines that run the
        same row are met."""
        self.meeting = meeting
        self.parameters: Mapping[str, Any] = dict(plan.parameters)
        self.seed = plan.seed
        self.repeat = plan.repeat
        self.device = device
        self.profile = profile
        self.out = out
        self.folder = out / f"row-{plan.index}"
        self.checkpoints = Checkpoints(out / "checkpoints" / f"row-{plan.index}", resume)
        self.spans: Spans = NoSpans()
        self.at_rest: Callable[[], None] = _nothing
        self._index = plan.index
        self._log = log
        self._data_root = data_root
        self._data_sets = data_sets
        self._synthetic = synthetic
        self._plans = dict(plans or {})
        self._metrics: Dict[str, Tuple[str, str]] = {}
        self._side_files: List[Path] = []
        self._prefix = ""
        self._told_invalid: Optional[Callable[[str], None]] = None

    def data(self, name: str) -> FlatData:
        """A declared data set, memory-mapped.

        Raises DataUnavailableError, DataCorruptError, and ExperimentFileError for a set that the
        experiment does not declare: nobody would have fetched, mounted or checked it.
        """
        if name == SYNTHETIC:
            raise UsageError(
                "made-up data has no shape of its own",
                next_step="the experiment gives it one: ctx.synthetic(channels=…, size=…, …)",
            )
        self._require_declared(name)
        return open_data(name, self._data_root)

    def files(self, name: str) -> Dict[str, np.ndarray]:
        """The files of a declared set that is not images to train on, memory-mapped, by name.

        Raises what `data` raises.
        """
        self._require_declared(name)
        return open_files(name, self._data_root)

    def plan(self, value: str) -> PlacementPlan:
        """The placement plan that a parameter of type `plan` asks for by `value`, as the Job has
        it: what its file says by now does not matter.

        Raises UsageError where the Job has none, as for the value `none`; PlanFileError and
        DamagedRecordError where somebody changed it there.
        """
        if value not in self._plans:
            raise UsageError(
                f"this run has no placement plan '{value}'",
                why=f"it has: {', '.join(self._plans) or 'none'}",
                next_step="a plan is the value of a parameter of type plan, and 'none' is no plan",
            )
        plan = parse_plan(self._plans[value], f"the run's plan '{value}'")
        if is_reference(value) and plan_value(plan) != value:
            raise DamagedRecordError(
                f"the run's plan '{value}' is another",
                why=f"what is there under that name is {plan_value(plan)}",
                next_step="the job was changed after it was made; make it anew from the plan",
            )
        return plan

    def _require_declared(self, name: str) -> None:
        if self._data_sets is not None and name not in self._data_sets:
            raise ExperimentFileError(
                f"the experiment reads the data set '{name}', which it does not declare",
                why=f"this run may read: {', '.join(self._data_sets) or 'none'}",
                next_step="name it in [data] sets of its experiment.toml",
            )

    def synthetic(
        self, *, channels: int, size: int, classes: int, train: int, test: int
    ) -> FlatData:
        """Made-up data, the same for every row of the run; the row says so in its facts.

        Raises UsageError where nobody asked for it: it never stands in for a real set unasked.
        """
        if not self._synthetic:
            raise UsageError(
                "the experiment made up data that nobody asked for",
                next_step="its data parameter takes 'synthetic', and the record then says so",
            )
        self.fact("synthetic", True)
        return synthetic_data(
            _SYNTHETIC_SEED, channels=channels, size=size, classes=classes, train=train, test=test
        )

    def asked_data(
        self, *, channels: int, size: int, classes: int, train: int, test: int
    ) -> FlatData:
        """The set that the parameter `data` names, or made-up images of this shape where that is
        `synthetic`. Raises what `data` and `synthetic` raise."""
        name = self.parameters["data"]
        if name != SYNTHETIC:
            return self.data(name)
        return self.synthetic(channels=channels, size=size, classes=classes, train=train, test=test)

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
        """Append raw samples to a metric of this row: a number, or any sequence, array or tensor.

        `unit` and `source` must be the same at every call for one name. NaN and infinity are kept.
        """
        self.at_rest()
        name = self._prefix + name
        first = self._metrics.setdefault(name, (unit, source))
        if first != (unit, source):
            raise UsageError(
                f"metric '{name}' changes its unit or source within one row",
                why=f"{first[0]} from {first[1]}, then {unit} from {source}",
            )
        self._log.emit(
            EventKind.METRIC,
            self._index,
            name=name,
            unit=unit,
            source=source,
            values=_samples(values),
            index=index,
            conditions=conditions or {},
        )

    def fact(self, name: str, value: Any) -> None:
        """A property of the row: a number, text, truth value, or lists and tables of them."""
        self._log.emit(EventKind.FACT, self._index, name=self._prefix + name, value=value)

    def invalid(self, reason: str) -> None:
        """The row's numbers must not be used. May be said more than once; every reason is kept."""
        if self._told_invalid is not None:
            self._told_invalid(reason)
            return
        self._log.emit(EventKind.INVALID, self._index, reason=reason)

    def progress(self, done: float, total: float, unit: str = "", phase: str = "") -> None:
        """How far the row is; the launcher makes an ETA of it."""
        self.at_rest()
        self._log.emit(
            EventKind.PROGRESS, self._index, done=done, total=total, unit=unit, phase=phase
        )

    def log(self, text: str) -> None:
        """A line for whoever reads the run afterwards."""
        self._log.emit(EventKind.LOG, self._index, text=text)

    def span(self, name: str) -> ContextManager[None]:
        """A named part of the row, for a `with` block; it may nest, and be of any thread.

        Nothing is kept unless `-p profile=torch` or `nsys` asks, or the experiment does before
        (`record_spans`). On CUDA a kept span costs two events; see `spans.RecordedSpans`.
        """
        self.at_rest()
        return self.spans.span(name)

    def record_spans(self) -> None:
        """Keep the spans from now on, in a trace file of the row (`traces.TRACE_FILE`).

        On CUDA this synchronises the device. Under a profiler that keeps them anyway it is nothing.
        """
        if isinstance(self.spans, NoSpans):
            self.spans = RecordedSpans(self.device)

    def side_file(self, name: str) -> Path:
        """Where to write a file that belongs to the row; it is recorded when the row ends, however
        it ends. `name` may have folders in it."""
        path = self.folder / name
        self._require_inside(path, self.folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        if path not in self._side_files:
            self._side_files.append(path)
        return path

    def add_side_file(self, path: Path) -> None:
        """Record a finished file, anywhere below the run's `out`, now."""
        self._require_inside(path, self.out)
        name = path.resolve().relative_to(self.out.resolve()).as_posix()
        size = path.stat().st_size
        self._log.emit(
            EventKind.SIDE_FILE, self._index, path=name, sha256=sha256_file(path), bytes=size
        )

    def for_rank(self, rank: int, device: torch.device, scratch: Path) -> RowContext:
        """The row as one of several processes sees it that share it, each on its own device. Rank 0
        speaks for all: what another records goes nowhere, and its side files to `scratch`."""
        mine = copy.copy(self)
        mine.device = device
        if rank > 0:
            mine.out = mine.folder = scratch
            mine._log = EventLog(Path(os.devnull))
        return mine

    def for_stage(
        self, name: str, told_invalid: Optional[Callable[[str], None]] = None
    ) -> RowContext:
        """The row as one of its stages sees it, such as a training before the one that the row is
        about: its metrics and facts are called `name_…`, and its checkpoints are its own,
        until those of the row are cleared. `told_invalid`: told instead of the row that the stage's
        numbers must not be used; it decides what that means for the row."""
        mine = copy.copy(self)
        mine._prefix = f"{self._prefix}{name}_"
        mine.checkpoints = Checkpoints(self.checkpoints.folder / name, self.checkpoints.resume)
        if told_invalid is not None:
            mine._told_invalid = told_invalid
        return mine

    def finish(self, *, complete: bool = True) -> None:
        """Record the side files. Whoever made the context calls it once, after `run`.

        Raises UsageError where a side file was announced and never written, unless the row is not
        `complete` anyway.
        """
        missing = [path.name for path in self._side_files if not path.is_file()]
        for path in self._side_files:
            if path.is_file():
                self.add_side_file(path)
        self._side_files = []
        if missing and complete:
            raise UsageError(f"side files were announced and never written: {', '.join(missing)}")

    @staticmethod
    def _require_inside(path: Path, folder: Path) -> None:
        if folder.resolve() not in path.resolve().parents:
            raise UsageError(f"the side file {path} is not inside {folder}")


def _nothing() -> None:
    return


def _samples(values: Any) -> List[float]:
    """Arrays and tensors have `tolist`, which gives a bare number where they have no dimension."""
    listed = values.tolist() if hasattr(values, "tolist") else values
    try:
        return [float(value) for value in listed]
    except TypeError:
        return [float(listed)]
