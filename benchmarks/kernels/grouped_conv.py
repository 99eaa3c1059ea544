"""What IResNeXt's convolutions by groups cost as one product of all channels, beside cuDNN's.

    PYTHONPATH=src python benchmarks/kernels/grouped_conv.py [--images 250] [--branches 4 8 16]
        [--groups 1 3 5 8] [--dtypes bfloat16 float32] [--pairs N] [--json FILE]
    python benchmarks/kernels/grouped_conv.py --show FILE

A call is the forward pass and both gradients of a convolution in channels last, of maps as its
stage has them: 3x3 for each number of branches, and the 1x1 that ends a block of the incremental
form. `grouped` is `torch.nn.functional.conv2d` with groups; `filled` the same with channels of
zeros up to a multiple of 16, which keeps cuDNN's kernels within their tensors (`grouped_memory.py`
tells how `grouped` goes beyond; rows are written as they come, should that end the process). Each
takes turns with ours (`grouped_conv` of `narrowgauge_lab.anytime.systems.iresnext_parts`). float32
is IEEE's, not TF32. Needs a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files

#: The extent of a branch's maps by its width: the stages of IResNeXt.
EXTENTS = {4: 32, 8: 16, 16: 8}
#: Filters that cuDNN's kernels for grouped convolutions take at once.
_AT_ONCE = 16


def filled(x: Any, weight: Any, groups: int) -> Any:
    """The convolution with channels and filters of zeros, in groups of their own."""
    from torch.nn import functional

    beyond = -weight.shape[0] % _AT_ONCE
    if not beyond:
        return grouped(x, weight, groups)
    wide = functional.pad(x, (0, 0, 0, 0, 0, beyond))
    filters = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, beyond))
    more = beyond // int(weight.shape[1])
    return grouped(wide, filters, groups + more).narrow(1, 0, weight.shape[0])


def grouped(x: Any, weight: Any, groups: int) -> Any:
    """As cuDNN has it."""
    from torch.nn import functional

    return functional.conv2d(x, weight, padding=weight.shape[-1] // 2, groups=groups)


#: What takes turns with ours; the last one's turns are those whose seconds are kept.
OTHERS: dict[str, Callable[[Any, Any, int], Any]] = {"filled": filled, "grouped": grouped}


def _call(
    way: Callable[[Any, Any, int], Any], tensors: tuple[Any, Any, Any], groups: int
) -> Callable[[], Any]:
    import torch

    x, weight, given = tensors
    return lambda: torch.autograd.grad(way(x, weight, groups), (x, weight), given)


@dataclasses.dataclass(frozen=True)
class Case:
    """A convolution of `groups` groups from `branch` to `after` channels by size x size filters."""

    dtype: str
    branch: int
    groups: int
    after: int
    size: int

    def tensors(self, images: int, device: Any) -> tuple[Any, Any, Any]:
        """Images, filters, and what comes back."""
        import torch

        generator = torch.Generator(device=device).manual_seed(0)
        before, after, extent = self.branch * self.groups, self.after * self.groups, self._extent()
        shapes = (
            (images, before, extent, extent),
            (after, self.branch, self.size, self.size),
            (images, after, extent, extent),
        )
        x, weight, given = (
            torch.randn(shape, generator=generator, device=device).to(getattr(torch, self.dtype))
            for shape in shapes
        )
        x, given = (each.contiguous(memory_format=torch.channels_last) for each in (x, given))
        return x.requires_grad_(), weight.requires_grad_(), given

    def _extent(self) -> int:
        return EXTENTS.get(self.branch, 8)


def cases(options: argparse.Namespace) -> list[Case]:
    """Those asked for, and of each dtype and width the 1x1 of the incremental form."""
    from narrowgauge_lab.anytime.systems.iresnext_parts import GROUPS

    found = []
    for dtype in options.dtypes:
        for branch in options.branches:
            found += [Case(dtype, branch, groups, branch, 3) for groups in options.groups]
            found.append(Case(dtype, branch, GROUPS, 2 * branch, 1))
    return found


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every case, with the conditions."""
    import torch

    from narrowgauge_lab.anytime.systems.iresnext_parts import grouped_conv
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    plan = TimingPlan(hide_launches=True, limit_s=options.limit)
    result: dict[str, Any] = {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "images": options.images,
        "rows": [],
    }
    for case in cases(options):
        tensors = case.tensors(options.images, device)
        row = dataclasses.asdict(case)
        for name, way in OTHERS.items():
            ours, other = (_call(each, tensors, case.groups) for each in (grouped_conv, way))
            found = interleave(ours, other, device, plan, options.pairs)
            row[name] = list(found.ratios)
            row["seconds"] = list(found.first.seconds)
        result["rows"].append(row)
        print(_line(row), file=sys.stderr, flush=True)
        if options.json:
            sample_files.write(options.json, result)
    return result


def _line(row: dict[str, Any]) -> str:
    taken = 1e6 * statistics.median(row["seconds"])
    over = " | ".join(f"{statistics.median(row[name]):.2f}" for name in OTHERS)
    what = f"{row['groups']} of {row['branch']} to {row['after']}, {row['size']}x{row['size']}"
    return f"| {row['dtype']} | {what} | {taken:.1f} | {over} |"


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| dtype | branches | us | times the speed filled | times the speed grouped |",
        "|---|---|---:|---:|---:|",
    ]
    return "\n".join(head + [_line(row) for row in result["rows"]])


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--images", type=int, default=250)
    parser.add_argument("--branches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--groups", nargs="+", type=int, default=[1, 3, 5, 8])
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--limit", type=float, default=1.0, help="seconds for each side")
    sample_files.add_options(parser)
    options = parser.parse_args()
    print(table(sample_files.shown_or_measured(options, lambda: measure(options))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
