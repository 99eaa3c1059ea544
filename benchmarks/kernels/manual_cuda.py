"""Manual convolutions on CUDA cores beside cuDNN in strict float32, over 31 shapes at batch 32.

    PYTHONPATH=src python benchmarks/kernels/manual_cuda.py [--pairs N] [--batch N] [--seed N]
        [--channels-last] [--json FILE]
    python benchmarks/kernels/manual_cuda.py --show FILE

The shapes are ResNet-50's 23 unique convolutions and eight of sparse-convolution papers. Results
are compared first: exact ones with float64, every other policy's first image with the CPU's. Each
ratio is of two calls that take turns on the same tensors, launches hidden:

  cudnn       torch's convolution, TF32 off, cudnn.benchmark on; the names of its kernels stand
              beside it, because Winograd's algorithm needs fewer products than it is credited with
  lowered     torch without cuDNN: im2col and cuBLAS, so no Winograd
  untiled     a kernel of the original's design (unfold, then a thread for each output, from global
              memory), written anew and compiled by cupy; without cupy it is left out, and said
  functors    each policy beside our own exact one

Needs the kernels built for CUDA.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

#: (name, channels, size, filters, kernel, stride); padding is kernel // 2.
Shape = tuple[str, int, int, int, int, int]


def _resnet50() -> list[Shape]:
    """torchvision's: stride 2 is on the 3 x 3."""
    shapes = [("resnet50", 3, 224, 64, 7, 2)]
    inputs, size = 64, 56
    for stage, width in enumerate((64, 128, 256, 512)):
        stride = 1 if stage == 0 else 2
        out = size // stride
        shapes += [
            ("resnet50", inputs, size, width, 1, 1),
            ("resnet50", width, size, width, 3, stride),
            ("resnet50", width, out, 4 * width, 1, 1),
            ("resnet50", inputs, size, 4 * width, 1, stride),
            ("resnet50", 4 * width, out, width, 1, 1),
            ("resnet50", width, out, width, 3, 1),
        ]
        inputs, size = 4 * width, out
    return list(dict.fromkeys(shapes))


SPARSE: list[Shape] = [
    ("sparse", channels, size, filters, 3, 1)
    for channels, size, filters in (
        (128, 56, 32), (128, 28, 32), (128, 14, 32), (128, 7, 32),
        (64, 56, 64), (128, 28, 128), (256, 14, 256), (512, 7, 512),
    )
]  # fmt: skip
SHAPES = _resnet50() + SPARSE
#: (policy, bits) beside exact_fp32.
FUNCTORS = (
    ("truncated", 10),
    ("mitchell", 0),
    ("axbf16", 0),
    ("axfpm_faithful", 0),
    ("axfpm_fixed", 0),
)

#: As the original launched it: 8 x 8 x 8 threads over filters, pixels and images.
UNTILED = r"""
extern "C" __global__ void untiled(const float* x, const float* weight, float* out, int pixels,
                                   int depth, int filters, int images) {
  const int filter = blockIdx.x * blockDim.x + threadIdx.x;
  const int pixel = blockIdx.y * blockDim.y + threadIdx.y;
  const int image = blockIdx.z * blockDim.z + threadIdx.z;
  if (filter >= filters || pixel >= pixels || image >= images) return;
  const float* row = x + ((long long)image * pixels + pixel) * depth;
  float sum = 0.0f;
  for (int d = 0; d < depth; ++d) sum += row[d] * weight[(long long)d * filters + filter];
  out[((long long)image * pixels + pixel) * filters + filter] = sum;
}
"""

Call = Callable[[], Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """One pair of calls. `ratios` are the other's time to ours: larger is better for us; of a
    functor, its own time to the exact policy's: smaller is better."""

    shape: str
    ours: str
    other: str
    products: int
    seconds: list[float]
    ratios: list[float]
    kernels: list[str]


class _Case:
    """The tensors of one shape, and the calls on them."""

    def __init__(self, shape: Shape, batch: int, last: bool, seed: int) -> None:
        import torch

        family, channels, size, filters, kernel, self.stride = shape
        self.name = (
            f"{family}: {channels} at {size} to {filters}, {kernel} x {kernel} / {self.stride}"
        )
        generator = torch.Generator(device="cuda").manual_seed(seed)
        draw = {"generator": generator, "device": "cuda"}
        self.x = torch.randn((batch, channels, size, size), **draw)
        self.weight = torch.randn((filters, channels, kernel, kernel), **draw)
        if last:
            self.x = self.x.contiguous(memory_format=torch.channels_last)
            self.weight = self.weight.contiguous(memory_format=torch.channels_last)
        self.padding = kernel // 2
        out = (size + 2 * self.padding - kernel) // self.stride + 1
        self.products = batch * out * out * filters * channels * kernel * kernel

    def ours(self, name: str, bits: int = 0) -> Call:
        from narrowgauge_kernels.mac import Mac
        from narrowgauge_kernels.manual import conv2d

        mac = Mac(name, bits=bits)
        return lambda: conv2d(self.x, self.weight, None, mac, self.stride, self.padding)

    def cudnn(self) -> Any:
        import torch

        return torch.nn.functional.conv2d(
            self.x, self.weight, stride=self.stride, padding=self.padding
        )

    def lowered(self) -> Any:
        import torch

        with torch.backends.cudnn.flags(enabled=False):
            return self.cudnn()

    def untiled(self, kernel: Any) -> Call:
        """Unfolding, transposing and reshaping included, as the original's layer does them."""
        import torch

        filters, depth = self.weight.shape[0], self.weight[0].numel()

        def run() -> Any:
            taps = torch.nn.functional.unfold(
                self.x, self.weight.shape[2:], padding=self.padding, stride=self.stride
            )
            rows = taps.transpose(1, 2).contiguous()
            columns = self.weight.reshape(filters, depth).t().contiguous()
            images, pixels = rows.shape[:2]
            out = rows.new_empty((images, pixels, filters))
            grid = tuple((each + 7) // 8 for each in (filters, pixels, images))
            numbers = (pixels, depth, filters, images)
            kernel(grid, rows, columns, out, numbers)
            side = round(pixels**0.5)
            return out.transpose(1, 2).reshape(images, filters, side, side)

        return run

    def check(self) -> None:
        """Exact with float64; every functor with the CPU, whose bits its tests vouch for."""
        import torch

        from narrowgauge_kernels.mac import Mac
        from narrowgauge_kernels.manual import conv2d

        exact = torch.nn.functional.conv2d(
            self.x[:2].double(), self.weight.double(), stride=self.stride, padding=self.padding
        )
        scale = exact.abs().max()
        for name, call in (("ours", self.ours("exact_fp32")), ("cuDNN", self.cudnn)):
            error = float((call()[:2].double() - exact).abs().max() / scale)
            if not error < 1e-5:
                raise SystemExit(f"{self.name}: {name} is off by {error:.2g} of the largest result")
        one, weight = self.x[:1].cpu(), self.weight.cpu()
        for policy, bits in FUNCTORS:
            wanted = conv2d(one, weight, None, Mac(policy, bits=bits), self.stride, self.padding)
            got = self.ours(policy, bits)()[:1].cpu()
            error = float((got - wanted).abs().max() / wanted.abs().max())
            if not error < 1e-5:
                raise SystemExit(f"{self.name}: {policy} is off by {error:.2g} from the CPU")


def _compiled_untiled() -> tuple[Any, str]:
    """(a call of the untiled kernel on torch's current stream, ""), or (None, why not)."""
    try:
        import cupy
    except ImportError as error:
        return None, str(error)
    import torch

    compiled = cupy.RawKernel(UNTILED, "untiled")

    def launch(
        grid: tuple[int, ...], x: Any, weight: Any, out: Any, numbers: tuple[int, ...]
    ) -> None:
        with cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream):
            sizes = tuple(cupy.int32(number) for number in numbers)
            pointers = tuple(each.data_ptr() for each in (x, weight, out))
            compiled(grid, (8, 8, 8), (*pointers, *sizes))

    return launch, ""


def _kernels_of(call: Call) -> list[str]:
    """The names of the kernels that one call launches, the longest-running first."""
    import torch

    call()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    events = [
        event
        for event in profile.events()
        if event.device_type == on_device and not event.name.lower().startswith("mem")
    ]
    return list(dict.fromkeys(event.name for event in events))[:4]


@contextlib.contextmanager
def _strict() -> Iterator[None]:
    """float32 that is float32, and cuDNN's own choice of the fastest algorithm."""
    import torch

    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.backends.cudnn.flags(enabled=True, benchmark=True, allow_tf32=False):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def measure(pairs: int, batch: int, last: bool, seed: int) -> dict[str, Any]:
    """Every shape, with the conditions."""
    import torch

    import narrowgauge_kernels

    narrowgauge_kernels.load()
    untiled, why = _compiled_untiled()
    if why:
        print(f"untiled is left out: {why}", file=sys.stderr)
    rows = []
    with _strict():
        for shape in SHAPES:
            case = _Case(shape, batch, last, seed)
            case.check()
            for row in _rows(case, untiled, pairs):
                rows.append(dataclasses.asdict(row))
                print(_line(rows[-1]), file=sys.stderr, flush=True)
    properties = torch.cuda.get_device_properties(0)
    return {
        "device": "cuda",
        "card": properties.name,
        "multiprocessors": properties.multi_processor_count,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "batch": batch,
        "channels_last": last,
        "seed": seed,
        "pairs": pairs,
        "untiled": why or "measured",
        "rows": rows,
    }


def _rows(case: _Case, untiled: Any, pairs: int) -> Iterator[Row]:
    import torch

    from narrowgauge_lab.measure import TimingPlan, interleave

    device = torch.device("cuda")
    plan = TimingPlan(hide_launches=True, limit_s=10.0)
    exact = case.ours("exact_fp32")
    others: list[tuple[str, Call]] = [("cudnn", case.cudnn), ("lowered", case.lowered)]
    if untiled is not None:
        others.append(("untiled", case.untiled(untiled)))
    for name, other in others:
        timed = interleave(exact, other, device, plan, pairs)
        kernels = _kernels_of(other) if name == "cudnn" else []
        yield Row(
            case.name, "exact_fp32", name, case.products,
            list(timed.first.seconds), list(timed.ratios), kernels,
        )  # fmt: skip
    for policy, bits in FUNCTORS:
        timed = interleave(case.ours(policy, bits), exact, device, plan, pairs)
        ratios = [1 / ratio for ratio in timed.ratios]
        yield Row(
            case.name, policy, "exact_fp32", case.products, list(timed.first.seconds), ratios, []
        )


def _line(row: dict[str, Any]) -> str:
    seconds = statistics.median(row["seconds"])
    kernels = ", ".join(name[:60] for name in row["kernels"])
    return (
        f"| {row['shape']} | {row['ours']} | {row['other']} | {seconds * 1e6:.1f} "
        f"| {row['products'] / seconds / 1e12:.2f} | {statistics.median(row['ratios']):.3f} "
        f"| {kernels} |"
    )


def _summary(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Geometric means over the shapes, of each pair; of cuDNN also where it took no Winograd."""
    groups: dict[str, list[float]] = {}
    for row in rows:
        ratio = statistics.median(row["ratios"])
        name = f"{row['ours']} beside {row['other']}"
        groups.setdefault(name, []).append(ratio)
        if row["other"] == "cudnn":
            winograd = any("winograd" in kernel.lower() for kernel in row["kernels"])
            kind = "with Winograd" if winograd else "without Winograd"
            groups.setdefault(f"{name} {kind}", []).append(ratio)
    for name, ratios in groups.items():
        yield f"{name}: {statistics.geometric_mean(ratios):.3f} over {len(ratios)} shapes"


def table(result: dict[str, Any]) -> str:
    """Medians, in Markdown, and the geometric means."""
    head = [
        "| shape | ours | other | us | T MAC/s | ratio | the other's kernels |",
        "|---|---|---|---:|---:|---:|---|",
    ]
    lines = [_line(row) for row in result["rows"]]
    return "\n".join([*head, *lines, "", *_summary(result["rows"])])


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--json", type=Path, help="write the raw samples there")
    parser.add_argument("--show", type=Path, help="print the table of such a file; measure nothing")
    options = parser.parse_args()
    if options.show:
        print(table(json.loads(options.show.read_text(encoding="utf-8"))))
        return 0
    result = measure(options.pairs, options.batch, options.channels_last, options.seed)
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
