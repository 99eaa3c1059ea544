"""What IResNeXt's convolutions by groups cost as one product of all channels, beside cuDNN's.

    PYTHONPATH=src python benchmarks/kernels/grouped_conv.py [--images 250] [--branches 4 8 16]
        [--groups 1 3 5 8] [--dtypes bfloat16 float32] [--pairs N] [--json FILE]
    python benchmarks/kernels/grouped_conv.py --show FILE

A call is the forward pass and both gradients of a 3x3 convolution in channels last, of maps as its
stage has them. `grouped` is `torch.nn.functional.conv2d` with groups; `filled` the same with
channels of zeros up to a multiple of 16, which keeps cuDNN's kernels within their tensors (see
`grouped_memory.py`). Each takes turns with ours (`grouped_conv` of
`narrowgauge_lab.anytime.systems.iresnext_parts`). Needs a GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: The extent of a branch's maps by its width: the stages of IResNeXt.
EXTENTS = {4: 32, 8: 16, 16: 8}
OTHERS = ("grouped", "filled")
#: Filters that cuDNN's kernels for grouped convolutions take at once.
_AT_ONCE = 16


def filled(x: Any, weight: Any, groups: int) -> Any:
    """The convolution with channels and filters of zeros, in groups of their own."""
    from torch.nn import functional

    beyond = -weight.shape[0] % _AT_ONCE
    wide = functional.pad(x, (0, 0, 0, 0, 0, beyond))
    filters = functional.pad(weight, (0, 0, 0, 0, 0, 0, 0, beyond))
    found = functional.conv2d(
        wide, filters, padding=1, groups=groups + beyond // int(weight.shape[1])
    )
    return found.narrow(1, 0, weight.shape[0])


def grouped(x: Any, weight: Any, groups: int) -> Any:
    """As cuDNN has it."""
    from torch.nn import functional

    return functional.conv2d(x, weight, padding=1, groups=groups)


def _call(
    way: Callable[[Any, Any, int], Any], tensors: tuple[Any, Any, Any], groups: int
) -> Callable[[], Any]:
    import torch

    x, weight, given = tensors
    return lambda: torch.autograd.grad(way(x, weight, groups), (x, weight), given)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Every case, with the conditions."""
    import torch

    from narrowgauge_lab.anytime.systems.iresnext_parts import grouped_conv
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda")
    torch.backends.cudnn.benchmark = True
    plan = TimingPlan(hide_launches=True, limit_s=options.limit)
    rows = []
    cases = [
        (dtype, branch, groups)
        for dtype in options.dtypes
        for branch in options.branches
        for groups in options.groups
    ]
    for dtype, branch, groups in cases:
        tensors = _tensors(dtype, branch, groups, options.images, device)
        row: dict[str, Any] = {"dtype": dtype, "branch": branch, "groups": groups}
        for name, way in zip(OTHERS, (grouped, filled), strict=True):
            ours, other = (_call(each, tensors, groups) for each in (grouped_conv, way))
            found = interleave(ours, other, device, plan, options.pairs)
            row["seconds"] = list(found.first.seconds)
            row[name] = list(found.ratios)
        rows.append(row)
        print(_line(row), file=sys.stderr, flush=True)
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "images": options.images,
        "rows": rows,
    }


def _tensors(
    dtype: str, branch: int, groups: int, images: int, device: Any
) -> tuple[Any, Any, Any]:
    """Images, filters, and what comes back."""
    import torch

    generator = torch.Generator(device=device).manual_seed(0)
    channels, extent = branch * groups, EXTENTS.get(branch, 8)
    shapes = ((images, channels, extent, extent), (channels, branch, 3, 3))
    x, weight = (
        torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))
        for shape in shapes
    )
    x = x.contiguous(memory_format=torch.channels_last)
    return x.requires_grad_(), weight.requires_grad_(), torch.randn_like(x)


def _line(row: dict[str, Any]) -> str:
    taken = 1e6 * statistics.median(row["seconds"])
    over = " | ".join(f"{statistics.median(row[name]):.2f}" for name in OTHERS)
    return f"| {row['dtype']} | {row['groups']} of {row['branch']} | {taken:.1f} | {over} |"


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| dtype | branches | us | times the speed grouped | times the speed filled |",
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
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    result = measure(options)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
