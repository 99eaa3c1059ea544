"""What the memory of a CPU's tensors costs, by where it comes from.

    PYTHONPATH=src python benchmarks/layers/host_memory.py [--pairs N] [--json FILE]
    python benchmarks/layers/host_memory.py --show FILE

glibc gives a large block back to the system when it is freed, and the next one is new pages, each
cleared when it is first touched. `as it comes` is that; `huge pages`: torch asks for pages of 2 MiB
(THP_MEM_ALLOC_ENABLE=1; the system has to allow them: `madvise` or `always` in
/sys/kernel/mm/transparent_hugepage/enabled); `kept heap`: nothing goes back
(MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647), which a process of varying sizes pays for in
memory. Every process is a fresh one, and settings take turns; a figure is the median of the
processes' medians. `peak`: the most memory that a process had, of all work together.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files

SETTINGS: dict[str, dict[str, str]] = {
    "as it comes": {},
    "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "kept heap": {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**31 - 1)},
}
NETWORKS = ("b-alexnet", "nested", "resnet18, a quarter")
#: Passes without gradients and updates' gradients, and of how many images.
WORK = (("pass", 1), ("pass", 256), ("training", 128))
_SECONDS = 2.0


def network(name: str) -> Any:
    """One of NETWORKS with random weights."""
    from narrowgauge_lab.anytime.systems.branchynet import branchy_net
    from narrowgauge_lab.anytime.systems.nested import NestedNet
    from narrowgauge_lab.networks.cifar_resnet import cifar_resnet

    made: dict[str, Callable[[], Any]] = {
        NETWORKS[0]: lambda: branchy_net("b-alexnet"),
        NETWORKS[1]: NestedNet,
        NETWORKS[2]: lambda: cifar_resnet(18, 0.25),
    }
    return made[name]()


def child() -> dict[str, Any]:
    """All work of this process, its settings in its environment: medians in seconds, peak bytes."""
    import torch

    found: dict[str, float] = {}
    for name in NETWORKS:
        for work, batch in WORK:
            torch.manual_seed(0)
            net = network(name).train(work == "training")
            images = torch.randn(batch, 3, 32, 32)
            with torch.set_grad_enabled(work == "training"):
                found[f"{name}|{work}|{batch}"] = _timed(lambda: _once(net, images))  # noqa: B023
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": found, "peak": peak, "threads": torch.get_num_threads()}


def _once(net: Any, images: Any) -> None:
    answers = net(images)
    if net.training:
        for parameter in net.parameters():
            parameter.grad = None
        each = answers if isinstance(answers, list) else [answers]
        sum(logits.logsumexp(1).mean() for logits in each).backward()


def _timed(call: Callable[[], None]) -> float:
    call()
    samples: list[float] = []
    end = time.perf_counter() + _SECONDS
    while time.perf_counter() < end or len(samples) < 5:
        begun = time.perf_counter()
        call()
        samples.append(time.perf_counter() - begun)
    return statistics.median(samples)


def measured(pairs: int) -> dict[str, Any]:
    """So many processes of each setting, in turns."""
    from narrowgauge_lab.facts import gather

    inside = gather(os.environ)
    told = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    found: dict[str, list[Any]] = {name: [] for name in SETTINGS}
    for turn in range(pairs):
        for name in [*SETTINGS][:: 1 if turn % 2 == 0 else -1]:
            done = subprocess.run(
                [sys.executable, __file__, "--child"],
                env={**os.environ, **SETTINGS[name]}, stdout=subprocess.PIPE, check=True,
            )  # fmt: skip
            found[name].append(json.loads(done.stdout))
            print(f"{turn + 1} of {pairs}, {name}", file=sys.stderr, flush=True)
    return {
        "cpu": inside.cpu, "torch": inside.torch, "threads": found["as it comes"][0]["threads"],
        "huge_pages": told.read_text().strip() if told.exists() else "none", "processes": found,
    }  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """All of it, in Markdown."""
    processes = result["processes"]
    lines = [
        "| network | work | images | " + " | ".join(f"{name} (ms)" for name in SETTINGS) + " |",
        "|---|---|---:|" + "---:|" * len(SETTINGS),
    ]
    for key in processes["as it comes"][0]["seconds"]:
        cells = [
            f"{1e3 * statistics.median(each['seconds'][key] for each in processes[name]):.3g}"
            for name in SETTINGS
        ]
        lines.append(f"| {' | '.join([*key.split('|'), *cells])} |")
    peaks = [
        f"{statistics.median(each['peak'] for each in processes[name]) / 1e6:.0f} MB"
        for name in SETTINGS
    ]
    lines.append(f"| all | peak | | {' | '.join(peaks)} |")
    count = len(processes["as it comes"])
    where = (
        f"{result['cpu']}, {result['threads']} threads, torch {result['torch']}, {count} processes"
        f" each, transparent huge pages: {result['huge_pages']}"
    )
    return "\n".join([*lines, "", where])


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=5, help="processes of each setting")
    sample_files.add_options(parser)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        json.dump(child(), sys.stdout)
        return 0
    result = sample_files.shown_or_measured(options, lambda: measured(options.pairs))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
