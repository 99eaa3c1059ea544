"""What a replaceable multiply-accumulate costs on the CPU: every float policy beside torch's own.

    PYTHONPATH=src python benchmarks/kernels/manual_cpu.py [--threads N] [--batch N] [--pairs N]
        [--policies NAME ...] [--json FILE]
    python benchmarks/kernels/manual_cpu.py --show FILE

ResNet-50's 23 different convolutions, eight of the shapes of sparse convolution, and products of
4096 classes. Each ratio is of two calls that take turns; torch's call is its own fp32 operator.
Where `exact_fp32` differs from torch's by more than 1e-4 of the largest result, nothing is
measured. Needs the kernels built for the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: (channels, filters, kernel, stride, size of the map) of ResNet-50 at 224 x 224.
RESNET50 = [
    (3, 64, 7, 2, 224),
    (64, 64, 1, 1, 56), (64, 64, 3, 1, 56), (64, 256, 1, 1, 56), (256, 64, 1, 1, 56),
    (256, 128, 1, 1, 56), (128, 128, 3, 2, 56), (128, 512, 1, 1, 28), (256, 512, 1, 2, 56),
    (512, 128, 1, 1, 28), (128, 128, 3, 1, 28),
    (512, 256, 1, 1, 28), (256, 256, 3, 2, 28), (256, 1024, 1, 1, 14), (512, 1024, 1, 2, 28),
    (1024, 256, 1, 1, 14), (256, 256, 3, 1, 14),
    (1024, 512, 1, 1, 14), (512, 512, 3, 2, 14), (512, 2048, 1, 1, 7), (1024, 2048, 1, 2, 14),
    (2048, 512, 1, 1, 7), (512, 512, 3, 1, 7),
]  # fmt: skip
#: The 3 x 3 layers at which sparse convolution is measured elsewhere, of three networks.
SPARSE = [
    (128, 32, 3, 1, 56), (128, 32, 3, 1, 28), (128, 32, 3, 1, 14), (128, 32, 3, 1, 7),
    (64, 64, 3, 1, 56), (128, 128, 3, 1, 28), (256, 256, 3, 1, 14), (512, 512, 3, 1, 7),
]  # fmt: skip
#: (rows, K, N).
PRODUCTS = [(1, 4096, 4096), (32, 4096, 4096), (128, 4096, 1000)]

POLICIES = {
    "exact_fp32": ("exact_fp32", 0),
    "truncated(7)": ("truncated", 7),
    "mitchell": ("mitchell", 0),
    "axbf16": ("axbf16", 0),
    "axfpm": ("axfpm_faithful", 0),
    "axfpm_fixed": ("axfpm_fixed", 0),
}

Call = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair: `ratios` are torch's time to ours, so larger is better for us."""

    case: str
    policy: str
    products: int
    seconds: list[float]
    ratios: list[float]


def measure(threads: int, batch: int, pairs: int, policies: list[str]) -> dict[str, Any]:
    """Every case by every policy, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_kernels.mac import Mac
    from narrowgauge_lab.measure import TimingPlan, interleave

    narrowgauge_kernels.load()
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    plan = TimingPlan(hide_launches=False, limit_s=20.0)
    rows = []
    for case, products, ours, theirs in _cases(batch):
        _check(case, ours(Mac("exact_fp32")), theirs())
        for policy in policies:
            call = functools.partial(ours, Mac(*POLICIES[policy]))
            timed = interleave(call, theirs, device, plan, pairs)
            row = Row(case, policy, products, list(timed.first.seconds), list(timed.ratios))
            rows.append(dataclasses.asdict(row))
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {
        "torch": torch.__version__,
        "instruction_sets": torch.ops.narrowgauge.cpu_instruction_sets(),
        "threads": threads,
        "batch": batch,
        "pairs": pairs,
        "rows": rows,
    }


def _cases(batch: int) -> Iterator[tuple[str, int, Call, Callable[[], Any]]]:
    """(name, products, ours of a policy, torch's)."""
    import torch

    from narrowgauge_kernels.manual import conv2d, linear

    for channels, filters, kernel, stride, size in dict.fromkeys(RESNET50 + SPARSE):
        x = torch.relu(torch.randn(batch, channels, size, size))
        weight = torch.randn(filters, channels, kernel, kernel)
        padding = kernel // 2
        width = (size + 2 * padding - kernel) // stride + 1

        def ours(
            mac: Any, x: Any = x, weight: Any = weight, s: int = stride, p: int = padding
        ) -> Any:
            return conv2d(x, weight, None, mac, s, p)

        def theirs(x: Any = x, weight: Any = weight, s: int = stride, p: int = padding) -> Any:
            return torch.nn.functional.conv2d(x, weight, None, s, p)

        name = f"{channels}-{filters} {kernel}x{kernel}/{stride} @{size}"
        yield name, batch * filters * weight[0].numel() * width * width, ours, theirs
    for count, depth, columns in PRODUCTS:
        rows, matrix = torch.relu(torch.randn(count, depth)), torch.randn(columns, depth)
        yield (
            f"{count} x {depth} x {columns}", count * depth * columns,
            lambda mac, rows=rows, matrix=matrix: linear(rows, matrix, None, mac),
            lambda rows=rows, matrix=matrix: torch.nn.functional.linear(rows, matrix),
        )  # fmt: skip


def _check(case: str, ours: Any, theirs: Any) -> None:
    difference = (ours - theirs).abs().max().item()
    if not difference <= 1e-4 * theirs.abs().max().item():
        raise ArithmeticError(f"{case}: exact_fp32 is {difference} from torch's")


def _line(row: dict[str, Any]) -> str:
    seconds = statistics.median(row["seconds"])
    return (
        f"| {row['case']} | {row['policy']} | {seconds * 1e3:.2f} "
        f"| {row['products'] / seconds / 1e9:.1f} | {statistics.median(row['ratios']):.2f} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, and each policy's geometric mean over the cases, in Markdown."""
    lines = [
        "| case | policy | ms | G products/s | times torch's speed |",
        "|---|---|---:|---:|---:|",
        *map(_line, result["rows"]),
    ]
    for policy in dict.fromkeys(row["policy"] for row in result["rows"]):
        ratios = [
            statistics.median(row["ratios"]) for row in result["rows"] if row["policy"] == policy
        ]
        lines.append(f"| geometric mean | {policy} | | | {statistics.geometric_mean(ratios):.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--policies", nargs="+", choices=list(POLICIES), default=list(POLICIES))
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    result = measure(options.threads, options.batch, options.pairs, options.policies)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
