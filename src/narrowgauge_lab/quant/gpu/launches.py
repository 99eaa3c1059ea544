"""A plan's steps as kernel launches on buffers of one batch shape."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Dict, List, Mapping, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.measure.watch import declare
from narrowgauge_lab.quant.gpu.arena import Need, assign
from narrowgauge_lab.quant.gpu.number_format import (
    CHANNEL_STEP,
    STEM_PIXEL,
    NumberFormat,
    PackedWeight,
)
from narrowgauge_lab.quant.gpu.plan import (
    AveragePoolStep,
    ConvStep,
    LinearStep,
    MaxPoolStep,
    Plan,
    Step,
)
from narrowgauge_lab.quant.gpu.tiles import ProductShape, Tile, candidates

__all__ = ["ConvLaunch", "Launch", "Prepared", "prepare"]

#: What the kernels call their output formats.
_CODES = {"int8": 0, "fp8": 1}
_FLOAT32 = 2

Run = Callable[[], None]


@dataclasses.dataclass
class ConvLaunch:
    """One convolution or linear layer; `tile` is settled by measurement."""

    name: str
    shape: ProductShape
    key: Tuple[Any, ...]
    start: Callable[[Tile], None]
    tile: Tile

    def __call__(self) -> None:
        self.start(self.tile)


@dataclasses.dataclass(frozen=True)
class Launch:
    """Another kernel."""

    name: str
    start: Run

    def __call__(self) -> None:
        self.start()


@dataclasses.dataclass(frozen=True)
class Prepared:
    """The launches of one input shape. `read` quantises the input; `rest` goes on from there to
    `output`, float32 [B, classes]; `buffers` keeps their memory alive."""

    read: Callable[[torch.Tensor], None]
    rest: Tuple[Any, ...]
    output: torch.Tensor
    buffers: Mapping[str, torch.Tensor]

    def products(self) -> List[ConvLaunch]:
        return [launch for launch in self.rest if isinstance(launch, ConvLaunch)]


def prepare(
    plan: Plan,
    weights: Mapping[str, PackedWeight],
    scales: Mapping[str, float],
    form: NumberFormat,
    shape: Sequence[int],
    device: torch.device,
) -> Prepared:
    """Buffers and launches for inputs of `shape` [B, C, H, W].

    `weights` by module, on `device`; `scales` by value: its unit in the format.
    """
    return _Preparation(plan, weights, scales, form, shape, device).prepared()


class _Preparation:
    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, PackedWeight],
        scales: Mapping[str, float],
        form: NumberFormat,
        shape: Sequence[int],
        device: torch.device,
    ) -> None:
        from narrowgauge_lab.quant.gpu import kernels

        self._kernels = kernels
        self._plan, self._weights, self._form, self._device = plan, weights, form, device
        self._scales = dict(scales)
        self._input = tuple(shape)
        #: Of every value: height, width, channels as stored.
        self._sizes: Dict[str, Tuple[int, int, int]] = {}
        self._stem = self._stem_of()
        self._trace_sizes()
        self._buffers = self._allocate()

    def prepared(self) -> Prepared:
        rest = tuple(self._launch(step) for step in self._plan.steps)
        output = self._buffers[self._plan.steps[-1].output]
        return Prepared(self._read, rest, output, self._buffers)

    # ---- sizes and memory

    def _stem_of(self) -> ConvStep:
        readers = [s for s in self._plan.steps if s.source == self._plan.source]
        first = readers[0]
        if len(readers) != 1 or not isinstance(first, ConvStep):
            raise NotApplicableError(
                "the 8-bit GPU network cannot take this network",
                why=f"{len(readers)} steps read the images; one convolution may",
            )
        return first

    def _trace_sizes(self) -> None:
        _, _, height, width = self._input
        for step in self._plan.steps:
            if step.source == self._plan.source:
                above, across = height, width
            else:
                above, across, _ = self._sizes[step.source]
            if isinstance(step, ConvStep):
                packed = self._weights[step.module]
                columns = packed.rows  # windows are square; a stem's columns are folded away
                high = (above + 2 * packed.padding - packed.rows) // packed.stride + 1
                wide = (across + 2 * packed.padding - columns) // packed.stride + 1
                self._sizes[step.output] = (high, wide, packed.values.shape[0])
            elif isinstance(step, MaxPoolStep):
                high = (above + 2 * step.padding - step.window) // step.stride + 1
                wide = (across + 2 * step.padding - step.window) // step.stride + 1
                self._sizes[step.output] = (high, wide, self._sizes[step.source][2])
                self._scales[step.output] = self._scales[step.source]
            elif isinstance(step, AveragePoolStep):
                self._sizes[step.output] = (1, 1, self._sizes[step.source][2])
            else:
                if (above, across) != (1, 1):
                    raise NotApplicableError(
                        f"the 8-bit GPU network cannot take '{step.module}' after "
                        f"{above}×{across} pixels",
                        why="activations are stored pixel by pixel, its weights channel by channel",
                        next_step="pool to one pixel before it",
                    )
                self._sizes[step.output] = (1, 1, self._weights[step.module].values.shape[0])
            self._check_residual(step)
        packed = self._weights[self._stem.module]
        out_w = self._sizes[self._stem.output][1]
        run = packed.channels // STEM_PIXEL
        widest = max(width + 2 * packed.padding, (out_w - 1) * packed.stride + run)
        padded = -(-widest // 16) * 16
        self._sizes[self._plan.source] = (height + 2 * packed.padding, padded, STEM_PIXEL)

    def _check_residual(self, step: Step) -> None:
        """What is added must have the shape of what it is added to: nothing is broadcast."""
        residual = getattr(step, "residual", None)
        if residual is not None and self._sizes[residual] != self._sizes[step.output]:
            raise NotApplicableError(
                f"the 8-bit GPU network cannot add {self._sizes[residual]} to "
                f"{self._sizes[step.output]} (height, width, channels)",
                why="the addition rides in a convolution and takes equal shapes only",
            )

    def _allocate(self) -> Dict[str, torch.Tensor]:
        last: Dict[str, int] = {}
        made: Dict[str, int] = {self._plan.source: 0}
        for place, step in enumerate(self._plan.steps, start=1):
            made[step.output] = place
            for read in (step.source, getattr(step, "residual", None)):
                if read is not None:
                    last[read] = place
        final = self._plan.steps[-1].output
        needs = [
            Need(name, self._elements(name), made[name], last[name])
            for name in made
            if name != final
        ]
        offsets, total = assign(needs)
        # Zeroed once: a block that is read before its first use must hold no NaN.
        block = torch.zeros(total, dtype=torch.uint8, device=self._device)
        buffers = {
            need.name: block[offsets[need.name] : offsets[need.name] + need.size].view(
                self._form.dtype
            )
            for need in needs
        }
        classes = self._sizes[final][2]
        buffers[final] = torch.empty(
            self._input[0], classes, dtype=torch.float32, device=self._device
        )
        return buffers

    def _elements(self, name: str) -> int:
        high, wide, channels = self._sizes[name]
        return self._input[0] * high * wide * channels

    # ---- launches

    def _read(self, x: torch.Tensor) -> None:
        batch, channels, height, width = x.shape
        high, wide, _ = self._sizes[self._plan.source]
        packed = self._weights[self._stem.module]
        block = 256
        self._kernels.quantize_input_kernel[(batch * high, -(-wide // block))](
            x, self._buffers[self._plan.source].view(torch.int32),
            *x.stride(), height, width, high, wide, 1.0 / self._scales[self._plan.source],
            CHANNELS=channels, PADDING=packed.padding, OUT=_CODES[self._form.name], BLOCK=block,
        )  # fmt: skip

    def _launch(self, step: Step) -> Any:
        if isinstance(step, (ConvStep, LinearStep)):
            return self._product(step)
        if isinstance(step, MaxPoolStep):
            return Launch(f"max-pool {step.output}", self._max_pool(step))
        return Launch(f"average-pool {step.output}", self._average_pool(step))

    def _product(self, step: Any) -> ConvLaunch:
        packed = self._weights[step.module]
        high, wide, _ = self._sizes[step.output]
        in_h, in_w, stored = self._sizes[step.source]
        count = packed.values.shape[0]
        batch = self._input[0]
        residual: Optional[str] = getattr(step, "residual", None)
        final = isinstance(step, LinearStep)
        unit = 1.0 if final else self._scales[step.output]
        scale = packed.scale * (self._scales[step.source] / unit)
        bias = packed.bias / unit
        residual_scale = self._scales[residual] / unit if residual is not None else 0.0
        padding = 0 if packed.stem else packed.padding
        shape = ProductShape(
            batch * high * wide, count, packed.channels, packed.rows * packed.columns
        )
        source, target = self._buffers[step.source], self._buffers[step.output]
        other = self._buffers[residual] if residual is not None else target
        relu = bool(getattr(step, "relu", False))
        out = _FLOAT32 if final else _CODES[self._form.name]
        kernel = self._kernels.conv_kernel
        multiplied = shape.pixels * shape.count * shape.depth * shape.window

        def start(tile: Tile) -> None:
            declare("triton::conv_kernel", source, packed.values, target, multiplied)
            grid = (-(-shape.pixels // tile.m) * -(-count // tile.n),)
            kernel[grid](
                source, packed.values, scale, bias, other, target,
                shape.pixels, count, packed.channels, high, wide, in_h, in_w,
                in_h * in_w * stored, in_w * stored, stored, residual_scale,
                COLUMNS=packed.columns, STRIDE=packed.stride, PADDING=padding,
                WINDOW=shape.window, RESIDUAL=residual is not None, RELU=relu, OUT=out,
                BLOCK_M=tile.m, BLOCK_N=tile.n, BLOCK_K=tile.k,
                num_warps=tile.warps, num_stages=tile.stages,
            )  # fmt: skip

        key = (shape, packed.columns, packed.stride, padding, residual is not None, relu, out)
        return ConvLaunch(step.module, shape, key, start, candidates(shape)[0])

    def _max_pool(self, step: MaxPoolStep) -> Run:
        high, wide, channels = self._sizes[step.output]
        in_h, in_w, _ = self._sizes[step.source]
        pixels = self._input[0] * high * wide
        source, target = self._buffers[step.source], self._buffers[step.output]
        block_m, block_c = 32, CHANNEL_STEP
        grid = (-(-pixels // block_m), -(-channels // block_c))
        kernel = self._kernels.max_pool_kernel

        def start() -> None:
            kernel[grid](
                source, target, pixels, channels, high, wide, in_h, in_w,
                WINDOW=step.window, STRIDE=step.stride, PADDING=step.padding,
                BLOCK_M=block_m, BLOCK_C=block_c,
            )  # fmt: skip

        return start

    def _average_pool(self, step: AveragePoolStep) -> Run:
        in_h, in_w, channels = self._sizes[step.source]
        factor = self._scales[step.source] / self._scales[step.output] / (in_h * in_w)
        source, target = self._buffers[step.source], self._buffers[step.output]
        block = 64
        grid = (self._input[0], -(-channels // block))
        kernel = self._kernels.average_pool_kernel

        def start() -> None:
            kernel[grid](
                source, target, in_h * in_w, channels, factor,
                OUT=_CODES[self._form.name], BLOCK_C=block, num_warps=2,
            )  # fmt: skip

        return start
