"""The table of the artefact's README, `B,C,H,W,N,t1,t2,t3,t4` in milliseconds, and a longer one."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Dict, List, Sequence

from .gemm import ALGORITHMS
from .times import Times

__all__ = ["COLUMNS", "line_of", "write_csv", "write_json"]

#: t1 to t3: cuDNN's three GEMM algorithms; t4: ours.
COLUMNS = ("B", "C", "H", "W", "N", *ALGORITHMS, "t4")
_MS = 1000.0


def line_of(times: Times) -> Dict[str, str]:
    """One line; a column that this host has no figure for is empty. Medians."""
    shape, batch = times.layer.shape, len(times.layer.x)
    sizes = (batch, shape.channels, shape.size, shape.size, shape.filters)
    line = {name: str(size) for name, size in zip(COLUMNS, sizes)}
    for name in ALGORITHMS:
        line[name] = f"{_MS * times.median(name):.6f}" if name in times.beside else ""
    line["t4"] = f"{_MS * times.median():.6f}"
    return line


def write_csv(path: Path, layers: Sequence[Times]) -> None:
    """The header, and a line for each layer."""
    with path.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(line_of(times) for times in layers)


def write_json(path: Path, layers: Sequence[Times], facts: Sequence[Dict[str, Any]]) -> None:
    """As a list of objects: the CSV's columns as numbers, every peer's milliseconds, and the facts
    of the row about the layer (zeros, nonzeros, errors, engines)."""
    about = {fact["name"]: fact for fact in facts}
    rows: List[Dict[str, Any]] = []
    for times in layers:
        ours = times.median()
        rows.append(
            {
                **{k: float(v) if v else None for k, v in line_of(times).items()},
                "ms": {name: _MS * times.median(name) for name in times.beside},
                "gflop_per_second": 2e-9 * times.layer.macs / ours,
                **about[times.layer.shape.name],
            }
        )
    path.write_text(json.dumps(rows, indent=1, sort_keys=True), encoding="utf-8")
