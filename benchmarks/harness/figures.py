"""How the figures of the bench are made from what was measured; needs neither a GPU nor torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Make", "agreement", "overhead"]

#: `Figure` of bench.py: name, unit, target, samples, note.
Make = Callable[..., Any]


def overhead(
    figure: Make,
    calls: int,
    device: Sequence[float],
    held: Sequence[float],
    host: Sequence[float],
) -> list[Any]:
    """Microseconds per call beyond the bare loop's: on the device, on it when held, on the host.

    Only where the bare loop's own time holds no launch latency is a difference what the harness
    adds, and has a target: many calls between two events, launched as the bare loop does.
    """
    note = f"{calls} per sample"
    many = calls > 1
    return [
        figure("added GPU time per call", "us", 0.3 if many else None, tuple(device), note),
        figure("the same with launches hidden", "us", None, tuple(held), note),
        figure(
            "added host time per call, launches hidden",
            "us",
            2.0 if many else None,
            tuple(host),
            note,
        ),
    ]


def agreement(figure: Make, kernels: Sequence[dict[str, Any]]) -> list[Any]:
    """Differences from nvbench, and the wall time of both."""
    figures = []
    for mode in ("cold", "batch"):
        differences = tuple(
            abs(each[mode]["ours"] / each[mode]["nvbench"] - 1) * 100 for each in kernels
        )
        note = f"{len(kernels)} kernels from 2 us to 20 ms"
        name = f"median difference from nvbench, {mode}"
        figures.append(figure(name, "%", 1, differences, note))
    totals = {side: sum(each["wall"][side] for each in kernels) for side in ("ours", "nvbench")}
    note = f"{totals['ours']:.1f} s and {totals['nvbench']:.1f} s, {_widths(kernels)}"
    ratio = totals["ours"] / totals["nvbench"]
    return [*figures, figure("wall time over nvbench's", "x", 1, (ratio,), note)]


def _widths(kernels: Sequence[dict[str, Any]]) -> str:
    """How many of our intervals became as narrow as nvbench's, before a limit ended them."""
    ended = [each["stopped"] for each in kernels]
    as_wide = ended.count("interval")
    words = f"intervals as wide for {as_wide} of {len(ended)} kernels"
    others = sorted({why for why in ended if why != "interval"})
    stops = "; ".join(f"{ended.count(why)} stopped at the {why}" for why in others)
    return f"{words}; {stops}" if stops else words
