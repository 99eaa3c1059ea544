"""What int8 on the wire costs, and from which size a copy is better left to the kernel.

    PYTHONPATH=src python benchmarks/kernels/wire.py [--device cuda|cpu] [--pairs N] [--json FILE]
    python benchmarks/kernels/wire.py --show FILE [--check]

Packing and unpacking beside the same in torch's operators: each ratio is of two calls that take
turns. On CUDA also `mapped`: kernels that read or write page-locked memory themselves beside a copy
by the copy engine into a buffer of the device and then the kernel, from 1 KiB to 64 MiB on the
wire; and whether the policy `mapped`, which measures powers of two when it opens, picks the faster
way at other sizes too. Needs the kernels built for the device. With `--check` the exit code is 1
where a target is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files

#: (name, shape, channels_last): the maps of ResNet-20 at batch 32, one of ResNet-50, a linear
#: layer's input, and one that no cache holds.
CASES: list[tuple[str, tuple[int, ...], bool]] = [
    ("16 x 32 x 32", (32, 16, 32, 32), False),
    ("32 x 16 x 16", (32, 32, 16, 16), False),
    ("64 x 8 x 8", (32, 64, 8, 8), False),
    ("16 x 32 x 32, channels last", (32, 16, 32, 32), True),
    ("256 x 56 x 56", (8, 256, 56, 56), False),
    ("linear", (32, 2048), False),
    ("large", (64, 64, 112, 112), False),
]
DTYPES = ("float32", "bfloat16")
#: Bytes on the wire.
SIZES = [1 << power for power in range(10, 27)]
#: The same, for the choice between a copy and a kernel: three sizes to a doubling, by floats.
SWEEP = [round(256 * 2 ** (step / 3)) * 4 for step in range(49)]

#: What mapped memory has to be worth beside a copy and a kernel, up to which size on the wire.
MAPPED_GAIN, MAPPED_BYTES = 1.5, 256 * 1024
#: How often the policy has to pick the faster way.
CHOSEN_SHARE = 0.95

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair: `ratios` are the other's time to ours, so larger is better for us."""

    case: str
    dtype: str
    operation: str
    bytes: int
    seconds: list[float]
    ratios: list[float]


def measure(device_name: str, pairs: int) -> dict[str, Any]:
    """Every case on one device, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device(device_name)
    narrowgauge_kernels.load()
    plan = TimingPlan(hide_launches=device.type == "cuda", limit_s=20.0)
    rows = []
    for case, dtype, operation, count, ours, theirs in _calls(device):
        timed = interleave(ours, theirs, device, plan, pairs)
        row = Row(case, dtype, operation, count, list(timed.first.seconds), list(timed.ratios))
        rows.append(dataclasses.asdict(row))
        print(_line(rows[-1]), file=sys.stderr, flush=True)
    choices = _choices(device, plan, pairs) if device.type == "cuda" else []
    return {
        "device": device.type,
        "card": torch.cuda.get_device_name() if device.type == "cuda" else "",
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "pairs": pairs,
        "rows": rows,
        "choices": choices,
    }


def _choices(device: Any, plan: Any, pairs: int) -> list[dict[str, Any]]:
    """At each size and in each direction: what the policy picks, and how many times as fast as the
    copy engine the kernel is."""
    import torch

    from narrowgauge_kernels.wire import mapped_copy
    from narrowgauge_lab.layers.hetero.chooser import Chooser
    from narrowgauge_lab.measure import interleave

    chooser = Chooser.measured(device)
    found = []
    for size in SWEEP:
        near = torch.empty(size // 4, pin_memory=True)
        far = torch.empty(size // 4, device=device)
        for direction, into, source in (("up", far, near), ("down", near, far)):
            timed = interleave(
                lambda into=into, source=source: mapped_copy(into, source),
                lambda into=into, source=source: into.copy_(source, non_blocking=True),
                device, plan, pairs,
            )  # fmt: skip
            found.append(
                {
                    "direction": direction,
                    "bytes": size,
                    "maps": chooser.maps(direction, size),
                    "ratio": statistics.median(timed.ratios),
                }
            )
    return found


def _calls(device: Any) -> Iterator[tuple[str, str, str, int, Call, Call]]:
    for name, shape, last in CASES:
        for dtype in DTYPES:
            yield from _packing(device, name, shape, last, dtype)
    if device.type == "cuda":
        for size in SIZES:
            yield from _mapped(device, size)


def _packing(
    device: Any, name: str, shape: tuple[int, ...], last: bool, dtype: str
) -> Iterator[tuple[str, str, str, int, Call, Call]]:
    """Bytes are those read and written once: packing reads x a second time, from a cache or not."""
    import torch

    from narrowgauge_kernels.wire import pack_int8, unpack_int8, unpack_int8_ref

    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(
        device, getattr(torch, dtype)
    )
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    values, scale = pack_int8(x)
    count = x.numel() * (x.element_size() + 1)
    along = [1, -1] + [1] * (x.dim() - 2)
    others = [dimension for dimension in range(x.dim()) if dimension != 1]

    def torchs_pack(draws: bool) -> Any:
        step = x.abs().amax(others).float() / 127
        scaled = x / step.reshape(along)
        rounded = torch.floor(scaled + torch.rand_like(scaled)) if draws else torch.round(scaled)
        return rounded.clamp(-127, 127).to(torch.int8), step

    def torchs_unpack() -> Any:
        return unpack_int8_ref(values, scale, x.dtype)

    yield name, dtype, "pack", count, lambda: pack_int8(x), lambda: torchs_pack(False)
    yield name, dtype, "pack, draws", count, lambda: pack_int8(x, 1), lambda: torchs_pack(True)
    yield name, dtype, "unpack", count, lambda: unpack_int8(values, scale, x.dtype), torchs_unpack


def _mapped(device: Any, size: int) -> Iterator[tuple[str, str, str, int, Call, Call]]:
    """`size` bytes on the wire, each way: as they are, and as int8."""
    import torch

    from narrowgauge_kernels.wire import mapped_copy, pack_int8_into, unpack_int8_into

    name = f"{size // 1024} KiB"
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    there, staged = (torch.empty(size, dtype=torch.uint8, device=device) for _ in range(2))
    yield (
        name, "uint8", "to the device: mapped beside copy and kernel", size,
        lambda: mapped_copy(there, host),
        lambda: mapped_copy(there, staged.copy_(host, non_blocking=True)),
    )  # fmt: skip
    yield (
        name, "uint8", "to the device: mapped beside copy alone", size,
        lambda: mapped_copy(there, host), lambda: there.copy_(host, non_blocking=True),
    )  # fmt: skip
    yield (
        name, "uint8", "from the device: mapped beside kernel and copy", size,
        lambda: mapped_copy(host, there),
        lambda: (mapped_copy(staged, there), host.copy_(staged, non_blocking=True)),
    )  # fmt: skip
    shape = (8, 16, size // 128)
    x = torch.randn(shape, device=device)
    scale, host_scale = torch.ones(16, device=device), torch.ones(16).pin_memory()
    values = torch.zeros(shape, dtype=torch.int8, device=device)
    host_values = torch.zeros(shape, dtype=torch.int8).pin_memory()

    def copied_to() -> None:
        values.copy_(host_values, non_blocking=True)
        scale.copy_(host_scale, non_blocking=True)
        unpack_int8_into(x, values, scale)

    def copied_from() -> None:
        pack_int8_into(values, scale, x)
        host_values.copy_(values, non_blocking=True)
        host_scale.copy_(scale, non_blocking=True)

    yield (
        name, "int8", "to the device: mapped unpack beside copies and unpack", size,
        lambda: unpack_int8_into(x, host_values, host_scale), copied_to,
    )  # fmt: skip
    yield (
        name, "int8", "from the device: mapped pack beside pack and copies", size,
        lambda: pack_int8_into(host_values, host_scale, x), copied_from,
    )  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    seconds = statistics.median(row["seconds"])
    return (
        f"| {row['case']} | {row['dtype']} | {row['operation']} | {seconds * 1e6:.1f} "
        f"| {row['bytes'] / seconds / 1e9:.1f} | {statistics.median(row['ratios']):.2f} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| case | dtype | operation | us | GB/s | times the other's speed |",
        "|---|---|---|---:|---:|---:|",
    ]
    return "\n".join(head + [_line(row) for row in result["rows"]] + targets(result)[0])


def targets(result: dict[str, Any]) -> tuple[list[str], bool]:
    """What the targets came to, line by line, and whether all of them are met: neither on a CPU."""
    lines, met = [""], True
    mapped = [
        (statistics.median(row["ratios"]), row)
        for row in result["rows"]
        if "mapped" in row["operation"]
        and not row["operation"].endswith("alone")
        and row["bytes"] <= MAPPED_BYTES
    ]
    if mapped:
        least, row = min(mapped, key=lambda pair: pair[0])
        short = sum(ratio < MAPPED_GAIN for ratio, _ in mapped)
        met = short == 0
        lines.append(
            f"Mapped memory up to {MAPPED_BYTES // 1024} KiB: at least {least:.2f} times the speed"
            f" of a copy and a kernel ({row['case']}, {row['dtype']}, {row['operation']}); below"
            f" {MAPPED_GAIN} in {short} of {len(mapped)} cases."
        )
    choices = result.get("choices", [])
    if choices:
        wrong = [each for each in choices if each["maps"] != (each["ratio"] > 1)]
        share = 1 - len(wrong) / len(choices)
        met = met and share >= CHOSEN_SHARE
        slower = max((max(each["ratio"], 1 / each["ratio"]) for each in wrong), default=1.0)
        lines.append(
            f"The policy mapped picks the faster way at {len(choices) - len(wrong)} of"
            f" {len(choices)} sizes ({share:.1%}, {CHOSEN_SHARE:.0%} asked), elsewhere at most"
            f" {slower:.2f} times as slow."
        )
    return (lines if len(lines) > 1 else []), met


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--pairs", type=int, default=30)
    sample_files.add_options(parser)
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args()
    result = sample_files.shown_or_measured(options, lambda: measure(options.device, options.pairs))
    print(table(result))
    return int(options.check and not targets(result)[1])


if __name__ == "__main__":
    sys.exit(main())
