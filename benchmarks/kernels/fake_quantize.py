"""What fake quantisation costs beside a copy of the tensor, and beside torch's own operator.

    PYTHONPATH=src python benchmarks/kernels/fake_quantize.py [--device cuda|cpu] [--pairs N]
        [--json FILE]
    python benchmarks/kernels/fake_quantize.py --show FILE

Each ratio is of two calls that take turns. A copy reads and writes every byte once, as the forward
pass does; the backward pass reads one tensor more, so its share is of one and a half copies. All
calls make their results in new memory. Needs the kernels built for the device.
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

#: (name, shape, axis, channels_last). Each is many times larger than the caches of the device that
#: it is for: of less, a part is read from there, and a backward pass seems faster than memory.
CASES: dict[str, list[tuple[str, tuple[int, ...], int | None, bool]]] = {
    "cuda": [
        ("whole tensor", (256, 256, 56, 56), None, False),
        ("channels", (256, 256, 56, 56), 1, False),
        ("channels, 7 x 7", (4096, 2048, 7, 7), 1, False),
        ("channels last", (256, 256, 56, 56), 1, True),
        ("weight", (16384, 4096, 3, 3), 0, False),
    ],
    "cpu": [
        ("whole tensor", (8, 64, 112, 112), None, False),
        ("channels", (8, 64, 112, 112), 1, False),
        ("channels, 7 x 7", (64, 2048, 7, 7), 1, False),
        ("channels last", (8, 64, 112, 112), 1, True),
        ("weight", (1024, 512, 3, 3), 0, False),
    ],
}
DTYPES = ("float32", "float16", "bfloat16")
LIMITS = (-128, 127)


@dataclasses.dataclass(frozen=True)
class Row:
    """One case. Ratios are per pair: of the bytes' copy to ours, and of torch's operator to ours
    (empty where torch has none for this dtype and device); larger is better for us."""

    case: str
    dtype: str
    direction: str
    bytes: int
    seconds: list[float]
    copy_share: list[float]
    over_torch: list[float]


def measure(device_name: str, pairs: int) -> dict[str, Any]:
    """Every case on one device, with the conditions."""
    import torch

    import narrowgauge_kernels
    from narrowgauge_lab.measure import TimingPlan

    device = torch.device(device_name)
    narrowgauge_kernels.load()
    plan = TimingPlan(hide_launches=device.type == "cuda", limit_s=20.0)
    rows = []
    for name, shape, axis, last in CASES[device.type]:
        for dtype in DTYPES:
            case = _Case(name, shape, axis, last, dtype, device)
            for direction in ("forward", "backward"):
                rows.append(case.row(direction, plan, pairs))
                print(_line(dataclasses.asdict(rows[-1])), file=sys.stderr, flush=True)
    card = torch.cuda.get_device_name() if device.type == "cuda" else ""
    return {
        "device": device.type,
        "card": card,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "pairs": pairs,
        "rows": [dataclasses.asdict(row) for row in rows],
    }


class _Case:
    """The tensors of one case and dtype, and the calls on them."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, ...],
        axis: int | None,
        last: bool,
        dtype: str,
        device: Any,
    ) -> None:
        import torch

        self.name, self.dtype, self.device, self.axis = name, dtype, device, axis
        generator = torch.Generator(device=device).manual_seed(0)
        self.x = torch.randn(shape, generator=generator, device=device).to(getattr(torch, dtype))
        if last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
        channels = () if axis is None else (shape[axis],)
        self.scale = torch.full(channels, 0.02, device=device)
        self.zero_point = torch.zeros(channels, dtype=torch.int32, device=device)

    def row(self, direction: str, plan: Any, pairs: int) -> Row:
        from narrowgauge_lab.measure import interleave

        ours = self._ours(direction)
        copied = interleave(ours, self.x.clone, self.device, plan, pairs)
        weight = 1.0 if direction == "forward" else 1.5
        over: list[float] = []
        theirs = self._theirs() if direction == "forward" else None
        if theirs is not None:
            # torch looks at the zero points on the host, so it waits: its launches cannot hide, and
            # then neither may ours.
            exposed = dataclasses.replace(plan, hide_launches=False)
            over = list(interleave(ours, theirs, self.device, exposed, pairs).ratios)
        return Row(
            self.name,
            self.dtype,
            direction,
            self.x.numel() * self.x.element_size(),
            list(copied.first.seconds),
            [ratio * weight for ratio in copied.ratios],
            over,
        )

    def _ours(self, direction: str) -> Callable[[], Any]:
        import torch

        rest = (self.scale, self.zero_point, self.axis, *LIMITS)
        if direction == "forward":
            return lambda: torch.ops.narrowgauge.fake_quantize(self.x, *rest)
        return lambda: torch.ops.narrowgauge.fake_quantize_grad(self.x, self.x, *rest)

    def _theirs(self) -> Callable[[], Any] | None:
        """torch's operator on the same tensor; None where it takes no such tensor."""
        import torch

        if self.axis is None:
            call = lambda: torch.fake_quantize_per_tensor_affine(  # noqa: E731
                self.x, self.scale, self.zero_point, *LIMITS
            )
        else:
            call = lambda: torch.fake_quantize_per_channel_affine(  # noqa: E731
                self.x, self.scale, self.zero_point, self.axis, *LIMITS
            )
        try:
            call()
        except RuntimeError as error:
            print(f"torch, {self.dtype}: {str(error).splitlines()[0]}", file=sys.stderr)
            return None
        return call


def _line(row: dict[str, Any]) -> str:
    moved = row["bytes"] * (2 if row["direction"] == "forward" else 3)
    rate = moved / statistics.median(row["seconds"]) / 1e9
    over = f"{statistics.median(row['over_torch']):.2f}" if row["over_torch"] else "–"
    share = f"{100 * statistics.median(row['copy_share']):.0f} %"
    return (
        f"| {row['case']} | {row['dtype']} | {row['direction']} | {rate:.0f} | {share} | {over} |"
    )


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown."""
    head = [
        "| case | dtype | pass | GB/s | of a copy's rate | times torch's speed |",
        "|---|---|---|---:|---:|---:|",
    ]
    return "\n".join(head + [_line(row) for row in result["rows"]])


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=sorted(CASES), default="cuda")
    parser.add_argument("--pairs", type=int, default=30)
    sample_files.add_options(parser)
    options = parser.parse_args()
    result = sample_files.shown_or_measured(options, lambda: measure(options.device, options.pairs))
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
