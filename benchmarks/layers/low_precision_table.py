"""The table of low_precision_passes.py, and what its target came to; needs no GPU and no torch."""

from __future__ import annotations

import statistics
from typing import Any

__all__ = ["GAIN", "brief", "chosen", "gain_of", "line", "table", "targets"]

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
        least, by = _roofline(row, ceilings)
        bound, share = f"{1e6 * least:.1f} ({by})", _share(row, ceilings)
    away = "" if row["distance"] is None else f"{row['distance']:.4f}"
    return (
        f"| {row['layer']} | {row['batch']} | {row['pass_']} | {row['precision']} | "
        f"{row['product']} | {row['quantisation']} | {bf16:.1f} | {ours:.1f} | {gain:.2f} | "
        f"{bound} | {share} | {away} |"
    )


def _roofline(row: dict[str, Any], ceilings: dict[str, Any]) -> tuple[float, str]:
    """The least seconds that a row can take, and what of. A product has at least its FLOP and its
    bytes to do; what quantises moves bytes only."""
    moved = (row["bytes"] + row["extra_bytes"]) / ceilings["copy"]["per_second"]
    multiplied = row["flops"] / 2 / ceilings[row["precision"]]["per_second"]
    return max(moved, multiplied), "bytes" if moved > multiplied else "FLOP"


def _share(row: dict[str, Any], ceilings: dict[str, Any]) -> str:
    return f"{100 * _roofline(row, ceilings)[0] / statistics.median(row['ours']):.0f} %"


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown; times in microseconds."""
    head = [
        "| layer | batch | pass | precision | by | quantisation | bf16 | ours | times bf16's speed "
        "| roofline | of it | distance |",
        "|---|---:|---|---|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    rows = [line(row, result["ceilings"]) for row in result["rows"]]
    return "\n".join([*head, *rows, "", *targets(result)[0], *chosen(result)])


def brief(result: dict[str, Any]) -> str:
    """A line for each layer, batch and precision, by our products with what they quantise: how many
    times bf16's speed each pass and all three together are, and how much of the roofline is left to
    all three."""
    kinds = ("forward", "input_grad", "weight_grad", "step")
    found: dict[tuple[str, int, str], dict[str, dict[str, Any]]] = {}
    for row in result["rows"]:
        if row["product"] == "triton" and row["quantisation"] == "with":
            place = row["layer"], row["batch"], row["precision"]
            found.setdefault(place, {})[row["pass_"]] = row
    head = [
        "| layer | batch | precision | forward | input gradient | weight gradient | all three "
        "| of the roofline |",
        "|---|---:|---|---:|---:|---:|---:|---:|",
    ]
    lines = []
    for (layer, batch, precision), rows in found.items():
        gains = [f"{gain_of(rows[kind]):.2f}" if kind in rows else "" for kind in kinds]
        share = _share(rows["step"], result["ceilings"]) if "step" in rows else ""
        lines.append(f"| {layer} | {batch} | {precision} | {' | '.join(gains)} | {share} |")
    return "\n".join([*head, *lines, "", *targets(result)[0], *chosen(result)])


def chosen(result: dict[str, Any]) -> list[str]:
    """A line for each precision and batch: each pass alone, and what a plan is worth that runs only
    those passes in it that gain by it, of the sum of the three passes in bf16. Of medians of passes
    that were timed one by one, each with what it quantises: nobody has timed the sum."""
    best: dict[tuple[str, int], dict[tuple[str, str], tuple[float, float]]] = {}
    for row in result["rows"]:
        if row["pass_"] != "step" and row["quantisation"] == "with":
            passes = best.setdefault((row["precision"], row["batch"]), {})
            place = row["layer"], row["pass_"]
            bf16, ours = (statistics.median(row[name]) for name in ("bf16", "ours"))
            if place not in passes or bf16 / ours > passes[place][0] / passes[place][1]:
                passes[place] = bf16, ours
    lines = []
    for (precision, batch), passes in best.items():
        alone = ", ".join(
            f"{name} {statistics.geometric_mean(one / ours for one, ours in found):.2f}"
            for name in ("forward", "input_grad", "weight_grad")
            if (found := [both for (_, pass_), both in passes.items() if pass_ == name])
        )
        sums: dict[str, tuple[float, float]] = {}
        for (layer, _), (bf16, ours) in passes.items():
            whole, least = sums.get(layer, (0.0, 0.0))
            sums[layer] = whole + bf16, least + min(bf16, ours)
        gains = [whole / least for whole, least in sums.values()]
        lines.append(
            f"{precision}, batch {batch}, by pass: {alone}; where only passes that gain are in it,"
            f" {statistics.geometric_mean(gains):.2f} times bf16's speed over all three,"
            f" {sum(gain >= GAIN for gain in gains)} of {len(gains)} layers at {GAIN} or more."
        )
    return lines


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
