"""Products of 8-bit codes on a GPU, by table and by structured terms, beside exact ones.

    PYTHONPATH=src python benchmarks/kernels/manual_codes_cuda.py [--pairs N] [--json FILE]
    python benchmarks/kernels/manual_codes_cuda.py --show FILE

Each ratio is of two calls that take turns: a product beside torch._int_mm, which is the vendor's
exact int8; a convolution beside the half-precision one of the vendor's, channels last. Before a
call is timed, part of its result is compared with what the CPU's operator says. Maps "after ReLU"
are made up: half of a normal distribution, quantised, so that half of the codes are zero. Needs the
kernels built for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

SIDES = (1024, 4096)
BATCH = 32
#: (channels, size of x, outputs, kernel, stride): the 23 convolutions of ResNet-50 that differ.
LAYERS = [
    (3, 224, 64, 7, 2),
    (64, 56, 64, 1, 1), (64, 56, 64, 3, 1), (64, 56, 256, 1, 1), (256, 56, 64, 1, 1),
    (256, 56, 128, 1, 1), (128, 56, 128, 3, 2), (128, 28, 512, 1, 1), (256, 56, 512, 1, 2),
    (512, 28, 128, 1, 1), (128, 28, 128, 3, 1), (512, 28, 256, 1, 1), (256, 28, 256, 3, 2),
    (256, 14, 1024, 1, 1), (512, 28, 1024, 1, 2), (1024, 14, 256, 1, 1), (256, 14, 256, 3, 1),
    (1024, 14, 512, 1, 1), (512, 14, 512, 3, 2), (512, 7, 2048, 1, 1), (1024, 14, 2048, 1, 2),
    (2048, 7, 512, 1, 1), (512, 7, 512, 3, 1),
]  # fmt: skip
#: Masks of a broken array: lower bits of x meet fewer bits of the weight.
BROKEN = ((0xF0, 0xFF), (0x0C, 0xFC), (0x02, 0xF0), (0x01, 0xC0))

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair: `ratios` are the other's time to ours, so larger is better for us."""

    case: str
    multiplier: str
    products: int
    beside: str
    seconds: list[float]
    ratios: list[float]


def measure(pairs: int) -> dict[str, Any]:
    """Every case, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda")
    narrowgauge_kernels.load()
    plan = TimingPlan(hide_launches=True, limit_s=20.0)
    rows = []
    for case, multiplier, products, beside, ours, theirs in _calls():
        timed = interleave(ours, theirs, device, plan, pairs)
        row = Row(case, multiplier, products, beside, list(timed.first.seconds), list(timed.ratios))
        rows.append(dataclasses.asdict(row))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    return {
        "device": "cuda",
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "pairs": pairs,
        "batch": BATCH,
        "rows": rows,
    }


def _multipliers(signed: bool) -> dict[str, Any]:
    """name -> CodeMac; weights are signed, as layers have them."""
    import torch

    from narrowgauge_kernels.codes import CodeMac, Term

    generator = torch.Generator().manual_seed(0)
    signs = {"a_signed": signed, "b_signed": True}

    def by_table(least: int, most: int) -> Any:
        values = torch.randint(least, most, (256, 256), generator=generator, dtype=torch.int32)
        return CodeMac("lut8x8", values, **signs)

    structured = {
        f"structured, R = {count}": CodeMac(
            "structured", terms=tuple(Term(a, b) for a, b in BROKEN[-count:]), **signs
        )
        for count in (1, 2, 4)
    }
    tables = {
        "table of 16 bits": by_table(-32768, 32768),
        "table of 32 bits": by_table(-70000, 70000),
    }
    return {"exact": CodeMac("exact_int8", **signs), **structured, **tables}


def _codes(shape: tuple[int, ...], relu: bool) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1)
    if relu:
        normal = torch.randn(shape, generator=generator)
        return (normal.clamp(min=0) * 60).round().clamp(max=255).to(torch.uint8)
    return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)


def _calls() -> Iterator[tuple[str, str, int, str, Call, Call]]:
    for side in SIDES:
        yield from _products(side, relu=False)
        yield from _products(side, relu=True)
    for layer in LAYERS:
        yield from _convolutions(*layer)


def _products(side: int, relu: bool) -> Iterator[tuple[str, str, int, str, Call, Call]]:
    """torch._int_mm takes signed codes, so beside unsigned ones it has others, as many."""
    import torch

    from narrowgauge_kernels.codes import linear_codes

    x, weight = _codes((side, side), relu).cuda(), _codes((side, side), False).cuda()
    signed, turned = _codes((side, side), False).cuda(), weight.t()
    case = f"{side}³, {'after ReLU' if relu else 'random'}"
    for name, mac in _multipliers(not relu).items():
        part = linear_codes(x[:33].cpu(), weight[:70].cpu(), mac)
        if not torch.equal(linear_codes(x, weight, mac)[:33, :70].cpu(), part):
            raise SystemExit(f"{case}, {name}: the GPU's result is not the CPU's")
        yield (
            case, name, side**3, "torch._int_mm",
            lambda mac=mac: linear_codes(x, weight, mac),
            lambda: torch._int_mm(signed, turned),
        )  # fmt: skip


def _convolutions(
    channels: int, size: int, outputs: int, kernel: int, stride: int
) -> Iterator[tuple[str, str, int, str, Call, Call]]:
    """Codes after ReLU but for the first layer's, channels last, as layers hand them on."""
    import torch

    from narrowgauge_kernels.codes import conv2d_codes

    relu = channels > 3
    x = _codes((BATCH, channels, size, size), relu).cuda()
    x = x.contiguous(memory_format=torch.channels_last)
    weight = _codes((outputs, channels, kernel, kernel), False).cuda()
    half = x.half().contiguous(memory_format=torch.channels_last)
    half_weight = weight.half().contiguous(memory_format=torch.channels_last)
    geometry = ((stride, stride), (kernel // 2, kernel // 2))
    torch.backends.cudnn.benchmark = True
    case = f"{channels} x {size} x {size} to {outputs}, {kernel} x {kernel} / {stride}"
    for name, mac in _multipliers(not relu).items():
        given = conv2d_codes(x, weight, mac, *geometry)
        part = conv2d_codes(x[:1].cpu(), weight[:9].cpu(), mac, *geometry)
        if not torch.equal(given[:1, :9].cpu(), part):
            raise SystemExit(f"{case}, {name}: the GPU's result is not the CPU's")
        products = given.numel() * channels * kernel * kernel
        yield (
            case, name, products, "fp16 convolution",
            lambda mac=mac: conv2d_codes(x, weight, mac, *geometry),
            lambda: torch.nn.functional.conv2d(half, half_weight, None, *geometry),
        )  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    seconds = statistics.median(row["seconds"])
    return (
        f"| {row['case']} | {row['multiplier']} | {seconds * 1e6:.1f} "
        f"| {row['products'] / seconds / 1e12:.2f} | {statistics.median(row['ratios']):.3f} "
        f"| {row['beside']} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| case | multiplier | us | T MAC/s | times the other's speed | the other |",
        "|---|---|---:|---:|---:|---|",
    ]
    return "\n".join(head + [_line(row) for row in result["rows"]])


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    result = measure(options.pairs)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
