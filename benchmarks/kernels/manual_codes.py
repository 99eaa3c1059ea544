"""What a multiplier over 8-bit codes costs: exact, structured and by table, beside torch and peers.

    PYTHONPATH=src python benchmarks/kernels/manual_codes.py [--device cpu|cuda] [--threads N]
        [--pairs N] [--isa NAME] [--json FILE]
    python benchmarks/kernels/manual_codes.py --show FILE

Every row is a product or a convolution of random full-range codes, its result first compared bit
for bit with torch's own float64 arithmetic (exact, structured) or with look-ups (table). Each ratio
is of two calls that take turns: ours and a loop of gathers from the whole table, the form that
simulators in PyTorch take (`times gather`), and ours exact (`times exact`). Needs the kernels built
for the device.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

#: (name, x, weight, stride, groups): a few of ResNet-50's, sizes of one image on the CPU.
Case = tuple[str, tuple[int, int, int, int], tuple[int, int, int, int], int, int]
CASES: dict[str, list[Case]] = {
    "cpu": [
        ("7 x 7, 3 to 64", (1, 3, 224, 224), (64, 3, 7, 7), 2, 1),
        ("3 x 3, 64 at 56", (1, 64, 56, 56), (64, 64, 3, 3), 1, 1),
        ("3 x 3, 128 at 28", (4, 128, 28, 28), (128, 128, 3, 3), 1, 1),
        ("3 x 3, 256 at 14", (8, 256, 14, 14), (256, 256, 3, 3), 1, 1),
        ("1 x 1, 64 to 256 at 56", (1, 64, 56, 56), (256, 64, 1, 1), 1, 1),
        ("depthwise, 64 at 56", (1, 64, 56, 56), (64, 1, 3, 3), 1, 64),
        ("product, 1024", (1024, 1024, 1, 1), (1024, 1024, 1, 1), 1, 1),
        ("product, 16 rows", (16, 2048, 1, 1), (1000, 2048, 1, 1), 1, 1),
    ],
    "cuda": [
        ("7 x 7, 3 to 64", (32, 3, 224, 224), (64, 3, 7, 7), 2, 1),
        ("3 x 3, 64 at 56", (32, 64, 56, 56), (64, 64, 3, 3), 1, 1),
        ("3 x 3, 128 at 28", (32, 128, 28, 28), (128, 128, 3, 3), 1, 1),
        ("3 x 3, 256 at 14", (32, 256, 14, 14), (256, 256, 3, 3), 1, 1),
        ("1 x 1, 64 to 256 at 56", (32, 64, 56, 56), (256, 64, 1, 1), 1, 1),
        ("depthwise, 64 at 56", (32, 64, 56, 56), (64, 1, 3, 3), 1, 64),
        ("product, 4096", (4096, 4096, 1, 1), (4096, 4096, 1, 1), 1, 1),
    ],
}
#: Terms of the structured multipliers, in which no product is dropped: (a & mask) · b.
MASKS = {1: (0xFE,), 2: (0xF0, 0x0F), 4: (0xC0, 0x30, 0x0C, 0x03)}


@dataclasses.dataclass(frozen=True)
class Row:
    """One case and multiplier. Ratios are per pair, the other's time to ours: larger is better for
    us; empty where the other was not run."""

    case: str
    multiplier: str
    products: int
    seconds: list[float]
    over_exact: list[float]
    over_gather: list[float]


def multipliers() -> dict[str, Any]:
    """By name; activations uint8 and weights int8, as after a ReLU."""
    import torch

    from narrowgauge_kernels.codes import CodeMac, Term

    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-32640, 32641, (256, 256), generator=generator, dtype=torch.int32)
    made = {"exact": CodeMac("exact_int8", None, False, True)}
    for count, masks in MASKS.items():
        terms = tuple(Term(mask, 0xFF) for mask in masks)
        made[f"structured, {count}"] = CodeMac("structured", None, False, True, terms)
    made["table, 16 bits"] = CodeMac("lut8x8", table, False, True)
    made["table, 17 bits"] = CodeMac("lut8x8", table * 2, False, True)
    return made


class _Operands:
    """The tensors of one case, and the calls on them."""

    def __init__(self, case: Case, device: Any, isa: str) -> None:
        import torch

        self.name, x_shape, weight_shape, stride, groups = case
        generator = torch.Generator().manual_seed(1)
        x = torch.randint(0, 256, x_shape, generator=generator, dtype=torch.uint8)
        weight = torch.randint(-128, 128, weight_shape, generator=generator, dtype=torch.int8)
        self.x = x.to(device).contiguous(memory_format=torch.channels_last)
        self.weight = weight.to(device)
        side = weight_shape[2] // 2
        self.geometry = ([stride, stride], [side, side], [1, 1], groups)
        self.isa = isa

    def call(self, mac: Any, isa: str) -> Callable[[], Any]:
        """Ours, as an operator."""
        import torch

        arguments = mac.arguments(self.x.device)
        return lambda: torch.ops.narrowgauge.conv2d_codes(
            self.x, self.weight, *arguments, *self.geometry, 0, isa=isa
        )

    def rows(self) -> Any:
        """int64 [pixels, groups, K] and [groups, outputs, K]: indices of codes, unfolded."""
        import torch

        stride, padding, dilation, groups = self.geometry
        kernel = tuple(self.weight.shape[2:])
        unfolded = torch.nn.functional.unfold(
            self.x.double(), kernel, dilation, padding, stride
        ).transpose(1, 2)
        depth = self.weight[0].numel()
        left = unfolded.reshape(-1, groups, depth).long()
        right = self.weight.reshape(groups, -1, depth).long() + 128
        return left, right

    def gather(self, mac: Any) -> Callable[[], Any] | None:
        """One gather from the whole table per product, channel by channel; None where too large."""
        import torch

        left, right = self.rows()
        if left.numel() * right.shape[1] > 2**28:
            return None
        table = mac.products.int().to(self.x.device).reshape(-1)
        base = left * 256

        def run() -> Any:
            columns = [
                table[base + right[:, output]].sum(-1, dtype=torch.int32)
                for output in range(right.shape[1])
            ]
            return torch.stack(columns, -1)

        return run

    def check(self, mac: Any, isa: str) -> None:
        """ArithmeticError unless a sample of results has the bits of the table's sums."""
        import torch

        result = self.call(mac, isa)()
        left, right = self.rows()
        flat = result.permute(0, 2, 3, 1).reshape(-1, left.shape[1], right.shape[1])
        table = mac.products.to(self.x.device).reshape(-1)
        for pixel in torch.linspace(0, len(left) - 1, 16).long().tolist():
            wanted = table[left[pixel][:, None] * 256 + right].sum(-1)
            if not torch.equal(flat[pixel].long(), wanted):
                raise ArithmeticError(f"{self.name}: pixel {pixel} is wrong")


def measure(device_name: str, pairs: int, threads: int, isa: str) -> dict[str, Any]:
    """Every case on one device, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device(device_name)
    narrowgauge_kernels.load()
    if threads:
        torch.set_num_threads(threads)
    plan = TimingPlan(hide_launches=device.type == "cuda", limit_s=10.0)
    rows = []
    for case in CASES[device.type]:
        operands = _Operands(case, device, isa)
        exact: Callable[[], Any] | None = None
        for name, mac in multipliers().items():
            chosen = isa if isa in _instruction_sets(mac, device.type) else "auto"
            operands.check(mac, chosen)
            ours = operands.call(mac, chosen)
            exact = exact or ours
            beside = interleave(ours, exact, device, plan, pairs)
            gather = operands.gather(mac) if name == "table, 16 bits" else None
            over = list(interleave(ours, gather, device, plan, pairs).ratios) if gather else []
            products = ours().numel() * operands.weight[0].numel()
            seconds = list(beside.first.seconds)
            rows.append(Row(case[0], name, products, seconds, list(beside.ratios), over))
            print(_line(dataclasses.asdict(rows[-1])), file=sys.stderr, flush=True)
    return {
        "device": device.type,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "isa": isa,
        "pairs": pairs,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


def _instruction_sets(mac: Any, device_type: str) -> list[str]:
    import torch

    if device_type != "cpu":
        return []
    return torch.ops.narrowgauge.codes_instruction_sets(mac.name == "lut8x8")


def _line(row: dict[str, Any]) -> str:
    rate = row["products"] / statistics.median(row["seconds"]) / 1e9
    over = f"{statistics.median(row['over_gather']):.1f}" if row["over_gather"] else "–"
    exact = f"{statistics.median(row['over_exact']):.2f}"
    return f"| {row['case']} | {row['multiplier']} | {rate:.1f} | {exact} | {over} |"


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| case | multiplier | G MAC/s | times exact's speed | times a gather's speed |",
        "|---|---|---:|---:|---:|",
    ]
    return "\n".join(head + [_line(row) for row in result["rows"]])


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cpu")
    parser.add_argument("--threads", type=int, default=1, help="0: as many as torch takes")
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--isa", default="auto", help="of the CPU, where the multiplier has it")
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    result = measure(options.device, options.pairs, options.threads, options.isa)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
