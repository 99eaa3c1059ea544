"""The table of cuts: every block by itself in every mode, and the highest links as the notes cut
them."""

from __future__ import annotations

import json
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.evalmode import in_eval_mode
from narrowgauge_lab.transforms.residual_links import (
    MODES,
    Cut,
    block_names,
    cut,
    identity_blocks,
)

from .variants import Outcome, Variants

#: A heat map of accuracy lost: what the host draws.
MAP_FILE = "lost.json"


def asked_modes(text: str) -> Tuple[str, ...]:
    """The modes that the table is to have, `full` never among them. Raises UnknownNameError."""
    modes = tuple(dict.fromkeys(filter(None, (each.strip() for each in text.split(",")))))
    known = [mode for mode in MODES if mode != "full"]
    for mode in modes:
        if mode not in known:
            raise UnknownNameError("mode", mode, known, where="of the table of cuts")
    return modes


def asked_factor(value: float) -> float:
    """What mode `scale` multiplies shortcuts by. Raises BadValueError where that is no `scale`."""
    if value in (0.0, 1.0):
        raise BadValueError(
            f"a shortcut times {value:g}",
            why="times 0 it is the mode no_shortcut, and times 1 the whole block",
            next_step="-p factor=0.5, or another mode",
        )
    return value


def record_whole(ctx: RowContext, variants: Variants, net: nn.Module) -> Outcome:
    """The network before any cut, and what its blocks are."""
    blocks = block_names(net)
    ctx.fact("blocks", list(blocks))
    ctx.fact("identity_shortcuts", list(identity_blocks(net)))
    found = variants.judge(cut(net, ()))
    _record_one(ctx, "full", found)
    return found


def record_table(
    ctx: RowContext, variants: Variants, net: nn.Module, whole: Outcome, modes: Sequence[str]
) -> None:
    """Each block by itself in each of `modes`: metrics over the blocks, in their order."""
    blocks, identities = block_names(net), identity_blocks(net)
    lines: Dict[str, List[float]] = {}
    factor = ctx.parameters["factor"]
    for number, mode in enumerate(modes):
        rows = []
        for place, block in enumerate(blocks):
            how = Cut(block, mode, factor if mode == "scale" else 1.0)
            rows.append(variants.judge(cut(net, [how])))
            done = number * len(blocks) + place + 1
            ctx.progress(done, len(modes) * len(blocks), unit="cut", phase="table of cuts")
        _record_mode(ctx, mode, rows, whole)
        lines.update(_lost(mode, rows, whole))
        if mode == "no_shortcut":
            saved = [whole.macs - row.macs for row, b in zip(rows, blocks) if b in identities]
            ctx.metric("identity_links_saved_macs", sum(saved), unit="MAC", source="computed")
            additions = _additions(net, blocks, variants)
            ctx.metric(
                "no_shortcut_saved_additions", additions, unit="1", source="computed", index="block"
            )
    if lines:
        _write_map(ctx, lines, blocks)


def record_highest_links(ctx: RowContext, variants: Variants, net: nn.Module) -> None:
    """The links of the higher layers, which the notes cut without saying which: that of the last
    block, and those of all blocks of the last stage."""
    blocks = block_names(net)
    last_stage = blocks[-1].rpartition(".")[0]
    _record_one(ctx, "highest_link", variants.judge(cut(net, [Cut(blocks[-1], "no_shortcut")])))
    stage = [Cut(each, "no_shortcut") for each in blocks if each.startswith(f"{last_stage}.")]
    _record_one(ctx, "last_stage_links", variants.judge(cut(net, stage)))


def record_asked(ctx: RowContext, variants: Variants, net: nn.Module, cuts: Sequence[Cut]) -> None:
    """The cut that the row asks for by name."""
    ctx.fact("cut", [str(each) for each in cuts])
    _record_one(ctx, "cut", variants.judge(cut(net, cuts)))


def _record_one(ctx: RowContext, name: str, found: Outcome) -> None:
    for suffix, value, unit, source in _figures(found):
        ctx.metric(f"{name}_{suffix}", value, unit=unit, source=source)


def _record_mode(ctx: RowContext, mode: str, rows: Sequence[Outcome], whole: Outcome) -> None:
    columns: Dict[str, Tuple[List[float], str, str]] = {}
    for row in rows:
        lost = [(f"lost{end}", value, "points", "computed") for end, value in row.lost(whole)]
        for suffix, value, unit, source in [*_figures(row), *lost]:
            columns.setdefault(suffix, ([], unit, source))[0].append(value)
    columns["saved_macs"] = ([whole.macs - row.macs for row in rows], "MAC", "computed")
    for suffix, (values, unit, source) in columns.items():
        ctx.metric(f"{mode}_{suffix}", values, unit=unit, source=source, index="block")


def _figures(found: Outcome) -> List[Tuple[str, float, str, str]]:
    """Those that were asked for: end of the metric's name, value, unit, source."""
    every: List[Tuple[str, Any, str, str]] = [
        ("accuracy", found.accuracy, "%", "computed"),
        ("accuracy_anew", found.anew, "%", "computed"),
        ("accuracy_tuned", found.tuned, "%", "computed"),
        ("macs", found.macs, "MAC", "computed"),
    ]
    if found.clocked is not None:
        clock = found.clocked.clock
        every.append(("latency", found.clocked.seconds, "s", clock))
        every.append(("speedup", found.clocked.speedup, "1", clock))
    return [each for each in every if each[1] is not None]


def _lost(mode: str, rows: Sequence[Outcome], whole: Outcome) -> Dict[str, List[float]]:
    """Points of accuracy that each block's cut costs, by the line of the map."""
    name = mode.replace("_", " ")
    lines: Dict[str, List[float]] = {}
    for row in rows:
        for ending, value in row.lost(whole):
            lines.setdefault(name + ending.replace("_", ", "), []).append(value)
    return lines


def _write_map(ctx: RowContext, lines: Dict[str, List[float]], blocks: Sequence[str]) -> None:
    table = {
        "rows": list(lines),
        "columns": list(blocks),
        "values": list(lines.values()),
        "label": "points of test accuracy lost",
    }
    ctx.side_file(MAP_FILE).write_text(json.dumps(table) + "\n", encoding="utf-8")


def _additions(net: nn.Module, blocks: Sequence[str], variants: Variants) -> List[int]:
    """Additions of one image that each block spends on its shortcut: one for each of its outputs.
    They are all that an identity costs."""
    outputs: Dict[str, int] = {}
    modules = dict(net.named_modules())

    def watch(name: str) -> Any:
        def note(_module: nn.Module, _inputs: Any, output: torch.Tensor) -> None:
            outputs[name] = output.numel()

        return note

    handles = [modules[name].register_forward_hook(watch(name)) for name in blocks]
    try:
        with in_eval_mode(net):
            variants.macs(net)
    finally:
        for handle in handles:
            handle.remove()
    return [outputs[name] for name in blocks]
