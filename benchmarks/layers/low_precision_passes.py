"""What the passes of ResNet-50's wide layers take in int8 and fp8 beside bf16, on a CUDA GPU.

    PYTHONPATH=src python benchmarks/layers/low_precision_passes.py [--batch 64 256] [--pairs N]
        [--only TEXT] [--json FILE]
    python benchmarks/layers/low_precision_passes.py --show FILE [--brief] [--check]

Each figure is of two calls that take turns, bf16's (cuDNN or cuBLAS, channels_last) and ours, each
a CUDA graph that is replayed, so no launch is in it. `with`: bf16 activations and gradients and
float32 weights come in, everything that is made of them included, for bf16 the cast of the weight.
`without`: operands and weights are in the precision already (of a weight gradient the turning of
both is still in it). `step`: all three passes, each operand quantised once. Results are bf16, and
float32 for the weight's gradient. The table and its targets are `low_precision_table.py`'s; with
`--check` the exit code is 1 where one is missed.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))
import sample_files
from low_precision_table import brief, line, table, targets

#: (input channels, output channels, side of the input, window, stride) of ResNet-50's layers with
#: at least 256 channels on both sides, at 224 x 224; the last is the linear layer.
LAYERS = (
    (256, 512, 56, 1, 2),
    (512, 256, 28, 1, 1),
    (256, 256, 28, 3, 2),
    (512, 1024, 28, 1, 2),
    (256, 1024, 14, 1, 1),
    (1024, 256, 14, 1, 1),
    (256, 256, 14, 3, 1),
    (1024, 512, 14, 1, 1),
    (512, 512, 14, 3, 2),
    (1024, 2048, 14, 1, 2),
    (512, 2048, 7, 1, 1),
    (2048, 512, 7, 1, 1),
    (512, 512, 7, 3, 1),
    (2048, 1000, 1, 0, 1),
)
PASSES = ("forward", "input_grad", "weight_grad", "step")
PRECISIONS = ("int8", "fp8")
#: What multiplies windows of one pixel, beside our kernels.
LIBRARIES = {"int8": "torch._int_mm", "fp8": "torch._scaled_mm"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One pass of one layer. `bf16` and `ours`: seconds, in turns. `bytes` are the least that a
    product alone reads and writes, `extra_bytes` those of what `with` adds; `distance` is
    |ours - fp32| / |fp32|, of the pass itself."""

    layer: str
    batch: int
    pass_: str
    precision: str
    product: str
    quantisation: str
    flops: int
    bytes: int
    extra_bytes: int
    distance: float | None
    bf16: list[float]
    ours: list[float]


class Layer:
    """Operands of one layer on the GPU, and its passes at each precision as calls."""

    def __init__(self, sizes: tuple[int, int, int, int, int], batch: int) -> None:
        import torch

        from narrowgauge_lab.layers.passes import Problem

        channels, count, side, window, stride = sizes
        self.batch, self.device = batch, torch.device("cuda", torch.cuda.current_device())
        self.name = f"{channels}→{count}, linear" if window == 0 else (
            f"{channels}→{count}, {window}x{window}/{stride} at {side}x{side}"
        )  # fmt: skip
        pad = window // 2
        self.problem = Problem("linear")
        self.image: tuple[int, ...] = (batch, channels)
        self.kernel: tuple[int, ...] = (count, channels)
        if window:
            self.problem = Problem("conv2d", (stride, stride), (pad, pad))
            self.image = (batch, channels, side, side)
            self.kernel = (count, channels, window, window)
        self.result = self.problem.output_shape(self.image, self.kernel)
        self.pointwise = window <= 1
        self.x = self._drawn(self.image).to(torch.bfloat16)
        self.grad = self._drawn(self.result).to(torch.bfloat16)
        self.weight = self._drawn(self.kernel) * (channels * max(1, window) ** 2) ** -0.5

    def _drawn(self, shape: tuple[int, ...]) -> Any:
        import torch

        made = torch.randn(shape, device=self.device)
        return made.contiguous(memory_format=torch.channels_last) if made.dim() == 4 else made

    def calls(self, precision: str, product: str = "") -> dict[tuple[str, str], Callable[[], Any]]:
        """By pass and by whether quantisation is in it."""
        import torch

        from narrowgauge_lab.layers.passes import passes_for

        passes: Any = passes_for(
            precision, self.device, self.problem, torch.bfloat16, product=product
        )
        x, grad, weight, image, kernel = self.x, self.grad, self.weight, self.image, self.kernel

        def step() -> tuple[Any, ...]:
            one, two = passes.prepared_input(x), passes.prepared_grad(grad, 1)
            return (
                passes.forward(one, weight),
                passes.input_grad(two, weight, image),
                passes.weight_grad(two, one, kernel),
            )

        one, two = passes.prepared_input(x), passes.prepared_grad(grad, 1)
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("forward", "with"): lambda: passes.forward(x, weight),
            ("input_grad", "with"): lambda: passes.input_grad(grad, weight, image, 1),
            ("weight_grad", "with"): lambda: passes.weight_grad(grad, x, kernel, 1),
            ("step", "with"): step,
            ("weight_grad", "without"): lambda: passes.weight_grad(two, one, kernel),
        }
        if precision == "bf16":
            ready = weight.to(torch.bfloat16)
            calls["forward", "without"] = lambda: passes.forward(x, ready)
            calls["input_grad", "without"] = lambda: passes.input_grad(grad, ready, image)
        elif passes.product == "triton":
            there, back = passes.folded_for(one, weight), passes.folded_back_for(two, weight)
            shape = self.result
            calls["forward", "without"] = lambda: passes.forward_by(one, there, shape, None)
            calls["input_grad", "without"] = lambda: passes.input_grad_by(two, back, image)
        return calls

    def work(self, pass_: str, width: int, quantisation: str) -> tuple[int, int, int]:
        """FLOP, least bytes of the products, and bytes that quantisation adds: each operand is read
        twice in bf16 and written once; so is a float32 weight, for either pass that takes one."""
        names = PASSES[:3] if pass_ == "step" else (pass_,)
        x, grad, weight = (each.numel() for each in (self.x, self.grad, self.weight))
        products = {
            "forward": width * (x + weight) + 2 * grad,
            "input_grad": width * (grad + weight) + 2 * x,
            "weight_grad": width * (grad + x) + 4 * weight,
        }
        taken = {"forward": (x,), "input_grad": (grad,), "weight_grad": (x, grad)}
        operands = (x, grad) if pass_ == "step" else taken[pass_]
        folds = sum(name != "weight_grad" for name in names)
        extra = (2 * 2 + width) * sum(operands) + (2 * 4 + width) * weight * folds
        flops = 2 * len(names) * self.problem.macs(self.image, self.kernel)
        return flops, sum(products[name] for name in names), extra * (quantisation == "with")


def measure(batches: list[int], pairs: int, only: str) -> dict[str, Any]:
    """Every layer at every batch, with the ceilings of this card."""
    import torch

    from narrowgauge_lab.layers.passes import missing
    from narrowgauge_lab.layers.passes.tiling import settled_tiles
    from narrowgauge_lab.measure.ceilings import ceiling

    torch.backends.cudnn.benchmark = True
    device = torch.device("cuda", torch.cuda.current_device())
    names = ("copy", "bf16", *(each for each in PRECISIONS if not missing(each, device)))
    rows = []
    for batch in batches:
        for sizes in LAYERS:
            layer = Layer(sizes, batch)
            if only in layer.name:
                for row in _rows(layer, [*names[2:]], pairs):
                    rows.append(dataclasses.asdict(row))
                    print(line(rows[-1], None), file=sys.stderr, flush=True)
            torch.cuda.empty_cache()
    return {
        "card": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "pairs": pairs,
        "ceilings": {name: ceiling(name, device).to_fact() for name in names},
        "tiles": {str(key): str(tile) for key, tile in settled_tiles().items()},
        "rows": rows,
    }


def _rows(layer: Layer, precisions: list[str], pairs: int) -> list[Row]:
    from narrowgauge_lab.measure import TimingPlan, interleave

    plan = TimingPlan(limit_s=10.0, warm_up_limit_s=1.0)
    theirs, exact, rows = layer.calls("bf16"), layer.calls("fp32"), []
    products = [(name, "") for name in precisions]
    if layer.pointwise:
        products += [(name, LIBRARIES[name]) for name in precisions]
    for precision, product in products:
        ours = layer.calls(precision, product)
        for (pass_, quantisation), call in ours.items():
            away = None
            if pass_ != "step":
                away = _distance(call(), exact[pass_, "with"]())
            one, other = _Replay(theirs[pass_, quantisation]), _Replay(call)
            turns = interleave(one, other, layer.device, plan, pairs)
            flops, least, extra = layer.work(pass_, 1, quantisation)
            rows.append(
                Row(
                    layer.name,
                    layer.batch,
                    pass_,
                    precision,
                    product or "triton",
                    quantisation,
                    flops,
                    least,
                    extra,
                    away,
                    list(turns.first.seconds),
                    list(turns.second.seconds),
                )
            )
    return rows


class _Replay:
    """A call as a graph: what it launches, without its launches."""

    def __init__(self, call: Callable[[], Any]) -> None:
        import torch

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # cuDNN and our kernels settle what runs
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._kept = call()

    def __call__(self) -> None:
        self._graph.replay()


def _distance(result: Any, exact: Any) -> float:
    return float((result.double() - exact.double()).norm() / exact.double().norm())


def main() -> int:
    """Measure or show; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--batch", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--only", default="", help="layers whose name has this in it")
    sample_files.add_options(parser)
    parser.add_argument("--brief", action="store_true", help="a line a layer, of our products")
    parser.add_argument("--check", action="store_true", help="exit 1 where a target is missed")
    options = parser.parse_args()
    result = sample_files.shown_or_measured(
        options, lambda: measure(options.batch, options.pairs, options.only)
    )
    print((brief if options.brief else table)(result))
    return int(options.check and not targets(result)[1])


if __name__ == "__main__":
    sys.exit(main())
