"""What each epoch of training measured, as the record names it."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Tuple

from narrowgauge_lab import turns
from narrowgauge_lab.context import RowContext

__all__ = ["EPOCH_METRICS", "SCALING_METRICS", "UNDERFLOW_METRICS", "History"]

#: Every per-epoch metric with its unit and where it comes from. Accuracies are in percent.
#: The source of `images_per_second` is the clock of the timing window.
EPOCH_METRICS = {
    "train_loss": ("nat", "computed"),
    "train_accuracy": ("%", "computed"),
    "test_loss": ("nat", "computed"),
    "test_accuracy": ("%", "computed"),
    "images_per_second": ("image/s", ""),
    "learning_rate": ("1", "schedule"),
    "epoch_seconds": ("s", "monotonic"),
}
#: What is no figure where others work on the GPU too.
_TIMES = ("images_per_second", "epoch_seconds")
#: The scale after the epoch, and how many of its updates an overflow cost.
SCALING_METRICS = {"loss_scale": ("1", "computed"), "skipped_steps": ("step", "computed")}
#: After the epoch: the largest share of a gradient's values not 0 that a placed pass took for 0.
UNDERFLOW_METRICS = {"gradient_underflow": ("%", "computed")}


class History:
    """One value per metric and epoch; no times where the GPU is shared, of any of a row's epochs.

    `clock` is the source of the timing windows; `scaling` and `underflow`: whether epochs have
    these metrics; `more`: others, their unit and source by name.
    """

    def __init__(
        self,
        scaling: bool,
        underflow: bool = False,
        more: Optional[Dict[str, Tuple[str, str]]] = None,
    ) -> None:
        unmeasured = _TIMES if turns.sharing() else ()
        self._declared = {
            name: kind for name, kind in EPOCH_METRICS.items() if name not in unmeasured
        }
        self._declared.update(SCALING_METRICS if scaling else {})
        self._declared.update(UNDERFLOW_METRICS if underflow else {})
        self._declared.update(more or {})
        self.values: Dict[str, List[float]] = {name: [] for name in self._declared}
        self.clock = ""

    def add(self, epoch: Dict[str, float], clock: str) -> None:
        """Take one epoch. KeyError where a declared metric is missing."""
        self.clock = clock
        for name, values in self.values.items():
            values.append(epoch[name])

    def last(self, name: str) -> float:
        return self.values[name][-1]

    def emit(self, ctx: RowContext, first: int = 0) -> None:
        """Record the epochs from `first`, counted from 0, to the last."""
        for name, (unit, source) in self._declared.items():
            values = self.values[name][first:]
            ctx.metric(name, values, unit=unit, source=source or self.clock, index="epoch")

    def forget_times(self) -> None:
        """Neither tell of the times of the epochs until now nor take those of later ones."""
        for name in _TIMES:
            self._declared.pop(name, None)
            self.values.pop(name, None)

    def state_dict(self) -> Dict[str, Any]:
        return {"clock": self.clock, "values": {k: list(v) for k, v in self.values.items()}}

    def load_state_dict(self, saved: Dict[str, Any]) -> None:
        self.clock = saved["clock"]
        known = saved["values"]
        self._declared = {name: kind for name, kind in self._declared.items() if name in known}
        self.values = {name: list(known[name]) for name in self._declared}
