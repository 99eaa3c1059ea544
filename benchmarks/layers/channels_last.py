"""What channels last is worth to the anytime networks on a CPU.

    PYTHONPATH=src python benchmarks/layers/channels_last.py [--threads N] [--limit S] [--json FILE]
    python benchmarks/layers/channels_last.py --show FILE

Images of either layout go through the same network with the same weights, and layers keep the
layout that they are given. Both sides take turns; images are noise. `pass`: all exits, in eval mode
without gradients; `training`: the losses of all exits and their gradients; `selection`: every
second image of what the first stage has left, as compaction takes them, by `index_select` and by
`network.select` (channels last on both sides).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files

#: What is measured, and of how many images at once.
WORK = (("pass", 1), ("pass", 256), ("training", 64), ("selection", 256))


def networks() -> dict[str, tuple[Callable[[], Any], tuple[int, int, int]]]:
    """How to make each, and the shape of its images."""
    from narrowgauge_lab.anytime.systems.branchynet import NETS, branchy_net
    from narrowgauge_lab.anytime.systems.iresnext import iresnext
    from narrowgauge_lab.anytime.systems.nested import NestedNet
    from narrowgauge_lab.anytime.systems.sact import AdaptiveResNet

    made: dict[str, tuple[Callable[[], Any], tuple[int, int, int]]] = {
        name: (lambda name=name: branchy_net(name), net.image)  # type: ignore[misc]
        for name, net in NETS.items()
    }
    made["nested"] = (NestedNet, (3, 32, 32))
    made["iresnext-incremental"] = (lambda: iresnext("incremental", 7, 1.0), (3, 32, 32))
    made["sact"] = (lambda: AdaptiveResNet("sact"), (3, 32, 32))
    return made


def lay_nothing_out() -> None:
    """Networks would lay both sides out alike."""
    from narrowgauge_lab.anytime.systems import (
        branchynet,
        iresnext,
        iresnext_incremental,
        nested,
        sact,
    )

    for module in (branchynet, iresnext, iresnext_incremental, nested, sact):
        module.laid_out = lambda images: images  # type: ignore[attr-defined]


def sides(net: Any, work: str, images: Any) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """The same work channels last, and channels first."""
    import torch

    from narrowgauge_lab.anytime.network import select

    last = images.clone(memory_format=torch.channels_last)
    net.train(work == "training")
    if work == "selection":
        state = net.advance(0, net.begin(last)).state
        half = torch.arange(0, len(images), 2)
        return (
            lambda: select(state, half),
            lambda: tuple(part.index_select(0, half) for part in state),
        )

    def trained(given: Any) -> None:
        for parameter in net.parameters():
            parameter.grad = None
        sum(logits.logsumexp(1).mean() for logits in net(given)).backward()

    call: Callable[[Any], Any] = trained if work == "training" else net
    return lambda: call(last), lambda: call(images)


def measured(threads: int, limit: float) -> dict[str, Any]:
    """Every network and piece of work: seconds of either side, in turns."""
    import torch

    from narrowgauge_lab.facts import gather
    from narrowgauge_lab.measure import TimingPlan, interleave

    if threads:
        torch.set_num_threads(threads)
    lay_nothing_out()
    cpu, rows = torch.device("cpu"), []
    plan = TimingPlan(limit_s=limit, warm_up_limit_s=limit / 4)
    for name, (make, shape) in networks().items():
        for work, batch in WORK:
            if (name, work) == ("sact", "selection"):
                continue  # one answer: nothing goes on
            torch.manual_seed(0)
            net, images = make(), torch.randn(batch, *shape)
            with torch.set_grad_enabled(work == "training"):
                one, other = sides(net, work, images)
                turns = interleave(one, other, cpu, plan, 30)
            rows.append(
                {"network": name, "work": work, "batch": batch,
                 "last": list(turns.first.seconds), "first": list(turns.second.seconds)}
            )  # fmt: skip
            print(line(rows[-1]), file=sys.stderr, flush=True)
    where = {"cpu": gather(os.environ).cpu, "threads": torch.get_num_threads()}
    return {**where, "torch": torch.__version__, "rows": rows}


def line(row: dict[str, Any]) -> str:
    """A line of the table: medians, and the ratio of two samples that stood side by side."""
    # Python 3.8, which the torch of the desktop image has, knows no `strict`.
    ratios = sorted(one / other for one, other in zip(row["first"], row["last"]))  # noqa: B905
    first, last = (1e3 * statistics.median(row[side]) for side in ("first", "last"))
    return (
        f"| {row['network']} | {row['work']} | {row['batch']} | {first:.3g} | {last:.3g} |"
        f" {statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}) |"
    )


def table(result: dict[str, Any]) -> str:
    """All of it, in Markdown."""
    head = (
        "| network | work | images | channels first (ms) | channels last (ms) | times as fast |",
        "|---|---|---:|---:|---:|---:|",
    )
    where = f"{result['cpu']}, {result['threads']} threads, torch {result['torch']}"
    return "\n".join([*head, *map(line, result["rows"]), "", where])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=0, help="0: as many as torch takes")
    parser.add_argument("--limit", type=float, default=5.0, help="seconds of one comparison")
    sample_files.add_options(parser)
    options = parser.parse_args()
    result = sample_files.shown_or_measured(
        options, lambda: measured(options.threads, options.limit)
    )
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
