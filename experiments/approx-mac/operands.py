"""What one layer multiplies: made-up operands of a shape, and a sample of results to look at."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import torch

from narrowgauge_lab import torch_compat
from narrowgauge_lab.layers.manual.quantise import Format
from narrowgauge_lab.layers.passes import Problem
from narrowgauge_lab.networks.layer_shapes import LayerShape

__all__ = ["Drawn", "Operands", "Sample", "operands_of"]

#: Results that are looked at: so many pixels or rows, of so many filters.
_POSITIONS = _FILTERS = 16
#: Of half a normal distribution: so many deviations are the largest code.
_DEVIATIONS = 4.0


@dataclasses.dataclass(frozen=True)
class Drawn:
    """How operands are made up. `relu`: half of the activations are zero, the others positive;
    else both signs, and codes of the full range. `form`: of codes, None for float32."""

    device: torch.device
    seed: int
    relu: bool
    channels_last: bool
    form: Optional[Format] = None


@dataclasses.dataclass(frozen=True)
class Sample:
    """Rows of results (a pixel of an image, or a row) and filters, first and last among them."""

    positions: Tuple[Tuple[int, ...], ...]
    filters: Tuple[int, ...]
    windows: torch.Tensor
    weights: torch.Tensor

    def of(self, result: torch.Tensor) -> torch.Tensor:
        """[positions, filters] of [B, F, H, W] or [rows, F], on the CPU."""
        rows = [result[at[0], :, at[1], at[2]] if len(at) == 3 else result[at[0]]
                for at in self.positions]  # fmt: skip
        return torch.stack(rows).cpu()[:, list(self.filters)]

    def text(self, results: int, filters: int) -> str:
        return (
            f"{len(self.positions)} of {results} pixels or rows, "
            f"{len(self.filters)} of {filters} filters"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Operands:
    """Of one layer, on the device. `sample`: where results are looked at, with windows [P, K] and
    weights [F, K] on the CPU, of which these results are the products' sums."""

    shape: LayerShape
    problem: Problem
    x: torch.Tensor
    weight: torch.Tensor
    sample: Sample

    @property
    def depth(self) -> int:
        """Products that make one result."""
        return int(self.weight[0].numel())

    @property
    def macs(self) -> int:
        return self.problem.macs(self.x.shape, self.weight.shape)

    @property
    def results(self) -> int:
        """Pixels or rows of the result."""
        return self.macs // (self.depth * len(self.weight))

    def as_float(self) -> Operands:
        """Codes as float32 values, in the same layout; itself where they are."""
        if self.x.dtype == torch.float32:
            return self
        return dataclasses.replace(self, x=self.x.float(), weight=self.weight.float())


def operands_of(shape: LayerShape, batch: int, drawn: Drawn) -> Operands:
    """The same ones for the same `drawn`, whatever the device."""
    generator = torch_compat.generator_for(torch.device("cpu"), drawn.seed)
    form = drawn.form
    x = _drawn(
        shape.input_shape(batch), generator, drawn.relu,
        None if form is None else (form.input_signed, form.bits),
    )  # fmt: skip
    weight = _drawn(
        shape.weight_shape(), generator, False,
        None if form is None else (form.weight_signed, form.bits),
    )  # fmt: skip
    problem = Problem("linear")
    if not shape.linear:
        pair = (shape.stride, shape.stride), (shape.padding, shape.padding)
        problem = Problem("conv2d", *pair)
    sample = _sample(problem, x, weight)
    if drawn.channels_last and not shape.linear:
        x, weight = (each.contiguous(memory_format=torch.channels_last) for each in (x, weight))
    return Operands(shape, problem, x.to(drawn.device), weight.to(drawn.device), sample)


def _drawn(
    shape: Tuple[int, ...],
    generator: torch.Generator,
    relu: bool,
    codes: Optional[Tuple[bool, int]],
) -> torch.Tensor:
    if codes is None:
        values = torch.randn(shape, generator=generator)
        return values.clamp(min=0) if relu else values
    signed, bits = codes
    dtype = torch.int8 if signed else torch.uint8
    least, end = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if signed else (0, 2**bits)
    if relu:
        values = torch.randn(shape, generator=generator).clamp(min=0)
        return (values * ((end - 1) / _DEVIATIONS)).round().clamp(max=end - 1).to(dtype)
    return torch.randint(least, end, shape, generator=generator).to(dtype)


def _sample(problem: Problem, x: torch.Tensor, weight: torch.Tensor) -> Sample:
    shape = problem.output_shape(x.shape, weight.shape)
    filters = _spread(len(weight), _FILTERS)
    flat = weight.reshape(len(weight), -1)[filters]
    if problem.kind == "linear":
        rows = _spread(len(x), _POSITIONS)
        return Sample(tuple((row,) for row in rows), tuple(filters), x[rows], flat)
    _, _, height, width = shape
    positions = [
        (number // (height * width), number // width % height, number % width)
        for number in _spread(shape[0] * height * width, _POSITIONS)
    ]
    windows = [_window(problem, x, weight.shape[2:], at).reshape(-1) for at in positions]
    return Sample(tuple(positions), tuple(filters), torch.stack(windows), flat)


def _spread(count: int, most: int) -> List[int]:
    """At most so many whole numbers below `count`, evenly: the first and the last among them."""
    if count <= most:
        return list(range(count))
    return [at * (count - 1) // (most - 1) for at in range(most)]


def _window(
    problem: Problem, x: torch.Tensor, kernel: torch.Size, at: Tuple[int, int, int]
) -> torch.Tensor:
    """[C, kh, kw] of what one result sees: zeros outside the image, without dilation."""
    found = torch.zeros((x.shape[1], *kernel), dtype=x.dtype)
    inside, within = [], []
    for axis in (0, 1):
        first = at[1 + axis] * problem.stride[axis] - problem.padding[axis]
        begin, end = max(first, 0), min(first + kernel[axis], x.shape[2 + axis])
        inside.append(slice(begin, end))
        within.append(slice(begin - first, end - first))
    found[:, within[0], within[1]] = x[at[0], :, inside[0], inside[1]]
    return found
