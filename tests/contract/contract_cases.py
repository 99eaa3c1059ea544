"""What the contract's tests share: one small experiment and its events."""

from __future__ import annotations

from typing import Any, Dict, List, Optional

from narrowgauge_contract.codec import encode
from narrowgauge_contract.events import Event, EventKind
from narrowgauge_contract.outcome import InsideFacts
from narrowgauge_contract.spec import ExperimentSpec, parse_spec


def document() -> Dict[str, Any]:
    """A parsed experiment.toml with a parameter of every type and both axes."""
    return {
        "experiment": {
            "id": "toy", "title": "Toy", "summary": "For tests.", "headline": ["accuracy"],
        },
        "data": {"parameter": "data"},
        "parameters": {
            "precision": {
                "type": "choice", "choices": ["fp32", "bf16", "fp16"], "default": "fp32",
                "axis": "row", "help": "What it computes in.",
            },
            "width": {
                "type": "int", "default": 8, "min": 1, "max": 64, "axis": "row", "help": "Width.",
                "aliases": ["breadth", "w"],
            },
            "lr": {"type": "float", "default": 0.1, "min": 0, "axis": "row", "help": "Rate."},
            "flip": {"type": "bool", "default": False, "axis": "run", "help": "Mirror images."},
            "note": {
                "type": "str", "default": "", "axis": "run", "help": "Free text.", "commas": True,
            },
            "data": {
                "type": "choice", "choices": ["mnist", "cifar10", "synthetic"], "default": "mnist",
                "axis": "run", "help": "The set.",
            },
        },
        "profiles": {"short": {"repeats": 2, "width": [4, 8], "minutes": 3}},
        "draw": [{"name": "acc", "kind": "curve", "title": "Accuracy", "metrics": ["accuracy"]}],
    }  # fmt: skip


def spec() -> ExperimentSpec:
    return parse_spec(document())


def event(kind: EventKind, t: float, row: Optional[int] = None, **data: Any) -> Event:
    return Event(kind, t, 1000.0 + t, row, data)


def run_start(t: float = 0.0) -> Event:
    inside = encode(InsideFacts("3.11.2", "Linux", torch="2.13.0"))
    return event(EventKind.RUN_START, t, inside=inside, source_hash="s", experiment_hash="e")


def row_start(row: int, t: float, repeat: int = 0) -> Event:
    return event(
        EventKind.ROW_START, t, row, repeat=repeat, seed=repeat, parameters={"width": 4 + row}
    )


def metric(row: int, t: float, values: List[float], name: str = "accuracy") -> Event:
    return event(
        EventKind.METRIC, t, row, name=name, unit="%", source="count", values=values,
        index="epoch", conditions={},
    )  # fmt: skip


def row_end(row: int, t: float, status: str = "complete") -> Event:
    return event(EventKind.ROW_END, t, row, status=status, seconds=2.5, error=None)
