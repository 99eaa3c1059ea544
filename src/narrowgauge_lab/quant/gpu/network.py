"""A folded network lowered to 8-bit integers or floats on a CUDA device, end to end.

Weights have one scale per output channel, activations one per tensor, found by running the float
network on calibration images. int8 sums are int32; fp8 sums are as wide as the tensor cores keep
them, which on Hopper is less than float32. Each layer's epilogue adds bias and residual, applies
ReLU and writes the next layer's 8 bits, so activations never leave that format.

int8 has no NaN: one in the images becomes some number, and the logits do not show it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Dict, Iterable, List, Mapping, Sequence, Tuple

import torch
from torch import fx, nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.errors import CalibrationError
from narrowgauge_lab.quant.gpu.launches import Prepared, prepare
from narrowgauge_lab.quant.gpu.number_format import (
    FORMATS,
    NumberFormat,
    PackedWeight,
    pack_conv,
    pack_linear,
)
from narrowgauge_lab.quant.gpu.plan import ConvStep, LinearStep, Plan, make_plan
from narrowgauge_lab.quant.gpu.tiles import Tile
from narrowgauge_lab.quant.observers import make_observer
from narrowgauge_lab.transforms import fold_batch_norm

__all__ = ["QuantizedNetwork", "calibrate", "lower", "pack", "require_device", "trace"]

#: Triton compiles 8-bit products from these capabilities on; 7.5 has the integer ones, Triton not.
_LEAST_CAPABILITY = {"int8": (8, 0), "fp8": (8, 9)}


class QuantizedNetwork:
    """Takes float images [B, C, H, W] of any strides and gives float32 logits [B, classes].

    The result is overwritten by the next call with the same shape. The first call with a shape
    allocates, tunes and, with `graph`, captures; every later one is two launches.
    """

    def __init__(
        self,
        plan: Plan,
        weights: Mapping[str, PackedWeight],
        scales: Mapping[str, float],
        form: NumberFormat,
        device: torch.device,
        *,
        graph: bool = True,
        tuned: bool = True,
    ) -> None:
        self._plan, self._scales, self._form, self._device = plan, dict(scales), form, device
        self._weights = {name: _moved(packed, device) for name, packed in weights.items()}
        self._graph, self._tuned = graph, tuned
        self._prepared: Dict[Tuple[int, ...], Prepared] = {}
        self._graphs: Dict[Tuple[int, ...], Any] = {}
        self._settled: Dict[Tuple[Any, ...], Tile] = {}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        shape = tuple(x.shape)
        if shape not in self._prepared:
            self._prepared[shape] = self._prepare(x)
        prepared = self._prepared[shape]
        prepared.read(x)
        if shape in self._graphs:
            self._graphs[shape].replay()
        else:
            for launch in prepared.rest:
                launch()
        return prepared.output

    def layers(self) -> List[Dict[str, Any]]:
        """Per convolution and linear layer of the last prepared shape: its kernel and tile."""
        if not self._prepared:
            return []
        last = list(self._prepared.values())[-1]
        return [
            {
                "layer": product.name,
                "kernel": f"triton conv_kernel {self._form.name}",
                "product": dataclasses.asdict(product.shape),
                "tile": dataclasses.asdict(product.tile),
            }
            for product in last.products()
        ]

    def _prepare(self, x: torch.Tensor) -> Prepared:
        prepared = prepare(
            self._plan, self._weights, self._scales, self._form, tuple(x.shape), self._device
        )
        prepared.read(x)
        for launch in prepared.rest:
            launch()
        if self._tuned:
            from narrowgauge_lab.quant.gpu.tuning import tune

            tune(prepared.products(), self._settled)
        if self._graph:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for launch in prepared.rest:
                    launch()
            self._graphs[tuple(x.shape)] = graph
        return prepared


def lower(
    model: nn.Module,
    batches: Iterable[torch.Tensor],
    precision: str,
    device: torch.device,
    *,
    observer: str = "min-max",
    graph: bool = True,
) -> QuantizedNetwork:
    """`model` in eval mode as an 8-bit network on `device`; the model itself stays as it is.

    `batches`: float images [B, C, H, W] to find the activations' ranges with. `precision`: int8 or
    fp8. Raises NotApplicableError where the device, torch, triton or the network cannot, and
    CalibrationError without images or with images that are not finite.
    """
    require_device(precision, device)
    form = FORMATS[precision]
    traced = trace(model).to(device)
    plan = make_plan(traced)
    scales = calibrate(traced, plan, batches, form, observer, device)
    return QuantizedNetwork(plan, pack(traced, plan, form), scales, form, device, graph=graph)


def trace(model: nn.Module) -> fx.GraphModule:
    """The network's graph with every batch norm folded into the convolution before it."""
    folded = fold_batch_norm(model)
    graph = fx.Tracer().trace(folded)
    for node in graph.nodes:
        node.type = None  # torch 1.8 cannot write a graph whose annotations are strings
    return fx.GraphModule(folded, graph)


def calibrate(
    graph: fx.GraphModule,
    plan: Plan,
    batches: Iterable[torch.Tensor],
    form: NumberFormat,
    observer: str,
    device: torch.device,
) -> Dict[str, float]:
    """The scale of every value that is stored in the format, from the ranges seen in `batches`."""
    watch = _Watch(graph, {name: make_observer(observer) for name in plan.observed()})
    count = 0
    with torch.no_grad():
        for batch in batches:
            count += batch.shape[0]
            watch.run(batch.to(device).float())
    if count == 0:
        raise CalibrationError(
            "there are no calibration images",
            why="the ranges of the activations are measured on images",
            next_step="give at least one batch [B, C, H, W]",
        )
    return {name: _scale(*watch.observers[name].range(), form) for name in plan.observed()}


def pack(graph: fx.GraphModule, plan: Plan, form: NumberFormat) -> Dict[str, PackedWeight]:
    """The packed weights of every layer of the plan, by module."""
    modules = dict(graph.named_modules())
    packed: Dict[str, PackedWeight] = {}
    for step in plan.steps:
        if isinstance(step, ConvStep):
            packed[step.module] = pack_conv(modules[step.module], form)  # type: ignore[arg-type]
        elif isinstance(step, LinearStep):
            packed[step.module] = pack_linear(modules[step.module], form)  # type: ignore[arg-type]
    return packed


def require_device(precision: str, device: torch.device) -> None:
    """Raises NotApplicableError where `precision` cannot run on `device` with this torch."""
    if precision not in FORMATS:
        raise NotApplicableError(
            f"torch {torch.__version__} has no {precision}", next_step="fp8 needs torch 2.1"
        )
    if device.type != "cuda":
        raise NotApplicableError(
            f"the 8-bit GPU network does not run on {device.type}",
            next_step="narrowgauge_lab.quant has 8-bit execution for the CPU",
        )
    least = _LEAST_CAPABILITY[precision]
    capability = torch.cuda.get_device_capability(device)
    if capability < least:
        raise NotApplicableError(
            f"{precision} products cannot be compiled for this GPU",
            why=f"compute capability {_dotted(capability)}; Triton has them from {_dotted(least)}",
        )
    try:
        import narrowgauge_lab.quant.gpu.kernels  # noqa: F401
    except ImportError as error:
        raise NotApplicableError(
            "the 8-bit GPU network needs triton",
            why=str(error),
            next_step="torch for CUDA 12 and later brings it: the target desktop-next has it",
        ) from error


class _Watch(fx.Interpreter):
    """Runs the float graph and shows named values to their observers."""

    def __init__(self, graph: fx.GraphModule, observers: Mapping[str, Any]) -> None:
        super().__init__(graph)
        self.observers = dict(observers)

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.name in self.observers:
            self.observers[n.name].update(value)
        return value


def _scale(low: torch.Tensor, high: torch.Tensor, form: NumberFormat) -> float:
    largest = max(abs(float(low)), abs(float(high)))
    return largest / form.limit if largest > 0 else 1.0


def _moved(packed: PackedWeight, device: torch.device) -> PackedWeight:
    return dataclasses.replace(
        packed,
        values=packed.values.to(device),
        scale=packed.scale.to(device),
        bias=packed.bias.to(device),
    )


def _dotted(capability: Sequence[int]) -> str:
    return ".".join(str(part) for part in capability)
