"""The table of low_precision_passes.py, and what its target came to; needs no GPU and no torch."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["GAIN", "gain_of", "line", "table", "targets"]

#: What all three passes of a wide layer have to be worth beside bf16, quantisation included.
GAIN = 1.2


def gain_of(row: dict[str, Any]) -> float:
    """How many times bf16's speed ours is: the median over turns."""
    return statistics.median(
        one / other for one, other in zip(row["bf16"], row["ours"], strict=True)
    )


def line(row: dict[str, Any], ceilings: dict[str, Any] | None) -> str:
    bf16, ours = (1e6 * statistics.median(row[name]) for name in ("bf16", "ours"))
    gain = gain_of(row)
    bound, share = "", ""
    if ceilings:
        # A product has at least its FLOP and its bytes to do; what quantises moves bytes only.
        moved = (row["bytes"] + row["extra_bytes"]) / ceilings["copy"]["per_second"]
        multiplied = row["flops"] / 2 / ceilings[row["precision"]]["per_second"]
        least = 1e6 * max(moved, multiplied)
        bound = f"{least:.1f} ({'bytes' if moved > multiplied else 'FLOP'})"
        share = f"{100 * least / ours:.0f} %"
    away = "" if row["distance"] is None else f"{row['distance']:.4f}"
    return (
        f"| {row['layer']} | {row['batch']} | {row['pass_']} | {row['precision']} | "
        f"{row['product']} | {row['quantisation']} | {bf16:.1f} | {ours:.1f} | {gain:.2f} | "
        f"{bound} | {share} | {away} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown; times in microseconds."""
    head = [
        "| layer | batch | pass | precision | by | quantisation | bf16 | ours | times bf16's speed "
        "| roofline | of it | distance |",
        "|---|---:|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [line(row, result["ceilings"]) for row in result["rows"]]
    return "\n".join([*head, *rows, "", *targets(result)[0]])


def targets(result: dict[str, Any]) -> tuple[list[str], bool]:
    """A line for each precision and batch: the geometric mean over layers, each by the faster of
    the ways to multiply it; and whether every mean reaches the target. What a layer below it could
    have at most is the roofline of its row."""
    best: dict[tuple[str, int], dict[str, float]] = {}
    for row in result["rows"]:
        if row["pass_"] == "step" and row["quantisation"] == "with":
            layers = best.setdefault((row["precision"], row["batch"]), {})
            layers[row["layer"]] = max(layers.get(row["layer"], 0.0), gain_of(row))
    lines = []
    for (precision, batch), layers in best.items():
        mean = statistics.geometric_mean(layers.values())
        reached = sum(gain >= GAIN for gain in layers.values())
        lines.append(
            f"{precision}, batch {batch}: {mean:.2f} times bf16's speed in the geometric mean of"
            f" {len(layers)} layers ({GAIN} asked), {reached} of them at {GAIN} or more, the least"
            f" {min(layers.values()):.2f}."
        )
    means = [statistics.geometric_mean(layers.values()) for layers in best.values()]
    return lines, bool(means) and min(means) >= GAIN
