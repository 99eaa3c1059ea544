"""What a conditional node of a CUDA graph costs the device, beside the same pieces in a row.

    PYTHONPATH=src python benchmarks/kernels/conditional.py [--nodes 1 3 7] [--json FILE]

A piece is four kernels of one element. `straight` runs all of them; `nested` puts each next piece
into the body of an IF node together with the rest, as decisions between exits do; `flat, N` gives
each a SWITCH node of N bodies behind the last, as compaction does. Every condition holds from the
start, so no kernel sets one: what is left is the node. Graphs take turns with the straight one, and
the difference is divided by the number of nodes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

_KERNELS = 4


def piece() -> Any:
    """A captured graph of a few small kernels, one after another."""
    import torch

    from narrowgauge_lab.anytime.stage_graphs import new_graph

    cell = torch.zeros(1, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        cell.add_(1)
    torch.cuda.synchronize()
    graph = new_graph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(_KERNELS):
            cell.add_(1)
    return graph, cell


def nested(graphs: Any, pieces: list[int]) -> int:
    graph = body = graphs.create()
    after: list[int] = []
    for number, each in enumerate(pieces):
        after = [graphs.add_child(body, after, each)]
        if number < len(pieces) - 1:
            handle = graphs.new_condition(body, at_first=1)
            body, after = graphs.add_if(body, after, handle), []
    return int(graph)


def flat(graphs: Any, pieces: list[int], bodies: int) -> int:
    """Each piece the last body of a SWITCH node of its own, behind the one before."""
    graph = graphs.create()
    after = [graphs.add_child(graph, [], pieces[0])]
    for each in pieces[1:]:
        handle = graphs.new_condition(graph, at_first=bodies - 1)
        node, made = graphs.add_switch(graph, after, handle, bodies)
        graphs.add_child(made[-1], [], each)
        after = [node]
    return int(graph)


#: By name, how pieces become one graph.
WAYS: dict[str, Callable[[Any, list[int]], int]] = {
    "nested": nested,
    "flat, 1": lambda graphs, pieces: flat(graphs, pieces, 1),
    "flat, 8": lambda graphs, pieces: flat(graphs, pieces, 8),
}


def require_all_ran(name: str, cells: list[Any], launch: Callable[[], None]) -> None:
    """Raises RuntimeError where a launch does not run every piece once: a condition that does not
    hold would leave out what is to be timed."""
    import torch

    before = [float(cell) for cell in cells]
    launch()
    torch.cuda.synchronize()
    ran = [float(cell) - one for cell, one in zip(cells, before, strict=True)]
    if ran != [_KERNELS] * len(cells):
        raise RuntimeError(f"{name}: of {_KERNELS} kernels each, the pieces ran {ran}")


def measured(nodes: int, pairs: int) -> list[dict[str, Any]]:
    """Each way with so many conditional nodes."""
    import torch

    from narrowgauge_lab.anytime.chains import chained
    from narrowgauge_lab.anytime.conditional import DriverGraphs, why_no_switch
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda", torch.cuda.current_device())
    graphs = DriverGraphs(device)
    held = [piece() for _ in range(nodes + 1)]
    raw = [graph.raw_cuda_graph() for graph, _ in held]

    def launched(name: str, graph: int) -> Callable[[], None]:
        executable = graphs.instantiate(graph)

        def launch() -> None:
            graphs.launch(executable, torch.cuda.current_stream().cuda_stream)

        require_all_ran(name, [cell for _, cell in held], launch)
        return launch

    straight = launched("straight", chained(graphs, raw, 0)[0])
    rows = []
    for name, make in WAYS.items():
        reason = why_no_switch(device) if make is not nested else ""
        if reason:
            print(f"{name:8} left out: {reason}")
            continue
        turns = interleave(launched(name, make(graphs, raw)), straight, device, TimingPlan(), pairs)
        both = zip(turns.first.seconds, turns.second.seconds, strict=True)
        added = [(one - other) / nodes for one, other in both]
        rows.append({"way": name, "nodes": nodes, "added_s": added})
    return rows


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 3, 7])
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    rows = []
    for nodes in options.nodes:
        for row in measured(nodes, options.pairs):
            rows.append(row)
            took = sorted(row["added_s"])
            print(
                f"{row['way']:8} {nodes} nodes: {statistics.median(took) * 1e6:.2f} us each"
                f" ({took[0] * 1e6:.2f} to {took[-1] * 1e6:.2f})",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
