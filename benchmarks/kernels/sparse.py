"""What skipping zeros gains on the CPU: the sparse convolution beside torch's dense one.

    PYTHONPATH=src python benchmarks/kernels/sparse.py [--threads N] [--batch N] [--pairs N]
        [--zeros P ...] [--layout nchw|nhwc] [--json FILE]
    python benchmarks/kernels/sparse.py --show FILE

The eight 3 x 3 shapes of three networks, on random maps with these fractions of zeros. Both sides
get the same map and include their ReLU, ours includes the making of its lists; its weight is packed
beforehand, as a layer keeps it, and torch's is as oneDNN takes it. Each ratio is of two calls that
take turns. Where the results differ by more than 1e-4 of the largest one, nothing is measured.
Needs the kernels built for the CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files

#: (channels, filters, height and width): DenseNet's and ResNet's, as the original publishes them.
SHAPES = [
    (128, 32, 56), (128, 32, 28), (128, 32, 14), (128, 32, 7),
    (64, 64, 56), (128, 128, 28), (256, 256, 14), (512, 512, 7),
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair: `ratios` are torch's time to ours, so larger is better for us."""

    case: str
    zeros: float
    products: int
    sparse_s: list[float]
    dense_s: list[float]
    ratios: list[float]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every shape at every fraction of zeros, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_lab.measure import TimingPlan, interleave

    narrowgauge_kernels.load()
    torch.set_num_threads(options.threads)
    plan = TimingPlan(limit_s=20.0)
    rows = []
    for zeros in options.zeros:
        for channels, filters, size in SHAPES:
            ours, theirs = _sides(options.batch, channels, filters, size, zeros, options.layout)
            case = f"{channels}-{filters} @{size}"
            _check(case, ours(), theirs())
            timed = interleave(ours, theirs, torch.device("cpu"), plan, options.pairs)
            products = options.batch * filters * channels * 9 * size * size
            rows.append(
                dataclasses.asdict(
                    Row(case, zeros, products, list(timed.first.seconds),
                        list(timed.second.seconds), list(timed.ratios))
                )
            )  # fmt: skip
            print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {
        "torch": torch.__version__,
        "instruction_sets": torch.ops.narrowgauge.cpu_instruction_sets(),
        "threads": options.threads,
        "batch": options.batch,
        "pairs": options.pairs,
        "layout": options.layout,
        "rows": rows,
    }


def _sides(
    batch: int, channels: int, filters: int, size: int, zeros: float, layout: str
) -> tuple[Any, Any]:
    import torch

    from narrowgauge_kernels.sparse_conv import packed, run_packed

    generator = torch.Generator().manual_seed(0)
    x = torch.rand((batch, channels, size, size), generator=generator) + 0.1
    x[torch.rand(x.shape, generator=generator) < zeros] *= -1.0
    if layout == "nhwc":
        x = x.contiguous(memory_format=torch.channels_last)
    weight = torch.randn((filters, channels, 3, 3), generator=generator)
    made = packed(weight)

    def ours() -> Any:
        return run_packed(x, weight, made, None, (1, 1), (1, 1), True, False)

    def theirs() -> Any:
        return torch.nn.functional.conv2d(torch.relu(x), weight, None, 1, 1)

    return ours, theirs


def _check(case: str, ours: Any, theirs: Any) -> None:
    difference = (ours - theirs).abs().max().item()
    if not difference <= 1e-4 * theirs.abs().max().item():
        raise ArithmeticError(f"{case}: the sparse result is {difference} from torch's")


def _line(row: dict[str, Any]) -> str:
    sparse, dense = statistics.median(row["sparse_s"]), statistics.median(row["dense_s"])
    return (
        f"| {row['case']} | {row['zeros']:.2f} | {sparse * 1e3:.3f} | {dense * 1e3:.3f} "
        f"| {row['products'] / dense / 1e9:.1f} | {statistics.median(row['ratios']):.2f} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, and the geometric mean over the shapes for each fraction of zeros, in Markdown."""
    lines = [
        "| shape | zeros | sparse ms | dense ms | dense G products/s | times torch's speed |",
        "|---|---:|---:|---:|---:|---:|",
        *map(_line, result["rows"]),
    ]
    for zeros in dict.fromkeys(row["zeros"] for row in result["rows"]):
        ratios = [statistics.median(r["ratios"]) for r in result["rows"] if r["zeros"] == zeros]
        mean = statistics.geometric_mean(ratios)
        lines.append(f"| geometric mean | {zeros:.2f} | | | | {mean:.2f} |")
    return "\n".join(lines)


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--zeros", type=float, nargs="+", default=[0.7])
    parser.add_argument("--layout", choices=["nchw", "nhwc"], default="nchw")
    sample_files.add_options(parser)
    options = parser.parse_args()
    print(table(sample_files.shown_or_measured(options, lambda: measure(options))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
