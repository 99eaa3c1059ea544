"""A model with nothing left to decide but its batch size: its steps, packed weights and scales."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any, Dict, Mapping, Optional, Sequence, Tuple

import torch
from torch import fx, nn

from narrowgauge_lab.engines.own.gpu.calibration import calibrate, joined
from narrowgauge_lab.engines.own.gpu.formats import NumberFormat
from narrowgauge_lab.engines.own.gpu.lowering import Sizes, lower, trace
from narrowgauge_lab.engines.own.gpu.memory import Memory, stem_of
from narrowgauge_lab.engines.own.gpu.packing import (
    PackedWeight,
    pack_conv,
    pack_depthwise,
    pack_linear,
)
from narrowgauge_lab.engines.own.gpu.phases import Phases
from narrowgauge_lab.engines.own.gpu.placement import one_scale, place
from narrowgauge_lab.engines.own.gpu.steps import AffineStep, ConvStep, LinearStep, Plan

__all__ = ["Lowered", "Observed", "lowered", "sizes_of"]

Affines = Dict[str, Tuple[torch.Tensor, torch.Tensor]]


@dataclasses.dataclass(frozen=True)
class Observed:
    """What only running a network shows: the size of each value, and its scale in 8 bits. Kept with
    an engine, so that loading one starts none of the libraries by which torch would run it."""

    sizes: Sizes
    scales: Mapping[str, float]

    def document(self) -> Dict[str, Any]:
        """As JSON has it."""
        return {"sizes": dict(self.sizes), "scales": dict(self.scales)}

    @classmethod
    def of_document(cls, found: Any) -> Observed:
        """What `document` gave, read again; raises ValueError for anything else."""
        try:
            sizes, scales = found["sizes"].items(), found["scales"].items()
            return cls(
                {name: tuple(map(int, size)) for name, size in sizes},
                {name: float(scale) for name, scale in scales},
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"no sizes and scales: {error}") from error


@dataclasses.dataclass(frozen=True)
class Lowered:
    """A network with nothing left but its batch size. Weights and `affines` are on the device."""

    plan: Plan
    sizes: Sizes
    form: NumberFormat
    modules: Mapping[str, nn.Module]
    weights: Mapping[str, PackedWeight]
    affines: Affines
    scales: Mapping[str, float]
    stem: Optional[ConvStep]
    device: torch.device

    @property
    def observed(self) -> Observed:
        return Observed(self.sizes, self.scales)

    def memory(self, batch: int) -> Memory:
        stem = self.weights[self.stem.module] if self.stem is not None else None
        return Memory(self.plan, self.sizes, self.form, batch, stem, self.device)

    def nbytes(self) -> int:
        """Bytes of the packed weights."""
        return sum(
            each.values.numel() * each.values.element_size() for each in self.weights.values()
        )


def lowered(
    model: nn.Module,
    image: Tuple[int, ...],
    form: NumberFormat,
    calibration: Sequence[torch.Tensor],
    device: torch.device,
    observer: str = "min-max",
    *,
    observed: Optional[Observed] = None,
    phases: Optional[Phases] = None,
) -> Lowered:
    """`model` (float32, eval, on the CPU) for images [C, H, W] = `image`; it stays as it is.

    `calibration`: float images for 8-bit formats. `observed`: of the same call before; the network
    is then not run. `phases`: gets those of here. Raises NotApplicableError for a network that is
    not from one tensor to one, CalibrationError without images or with ones that are not finite.
    """
    phases = phases or Phases()
    with phases.of("trace"):
        graph = trace(_copied(model, device), in_place=True).to(device)
    with phases.of("observe"):
        blank = torch.zeros(1, *image, device=device)
        sizes = sizes_of(graph, blank) if observed is None else observed.sizes
    with phases.of("pack"):
        plan = lower(graph, sizes)
        stem = stem_of(plan, sizes)
        modules = dict(graph.named_modules())
        weights = _pack(plan, modules, sizes, form, stem)
        affines = _affines(plan, modules)
    scales: Mapping[str, float] = {} if observed is None else observed.scales
    if form.scaled and observed is None:
        with phases.of("calibrate"):
            leaders = one_scale(plan, place(plan, sizes, form, 1), joined(plan))
            scales = calibrate(graph, plan, calibration, form, observer, device, leaders)
    return Lowered(plan, sizes, form, modules, weights, affines, scales, stem, device)


def _copied(model: nn.Module, device: torch.device) -> nn.Module:
    """The model again, its tensors on `device`: folding takes float64, which a GPU is fast at."""
    parameters = {
        id(each): nn.Parameter(each.detach().to(device), each.requires_grad)
        for each in model.parameters()
    }
    buffers = {id(each): each.detach().to(device) for each in model.buffers()}
    return copy.deepcopy(model, {**parameters, **buffers})


def sizes_of(graph: fx.GraphModule, image: torch.Tensor) -> Sizes:
    """(C, H, W), or (features,), of every value for images like the one [1, C, H, W]; it is run."""
    sizes: Sizes = {}

    class Sizing(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            value = super().run_node(n)
            if isinstance(value, torch.Tensor) and value.dim() in (2, 4):
                sizes[n.name] = tuple(map(int, value.shape[1:]))
            return value

    with torch.no_grad():
        Sizing(graph).run(image)
    return sizes


def _pack(
    plan: Plan,
    modules: Mapping[str, nn.Module],
    sizes: Sizes,
    form: NumberFormat,
    stem: Optional[ConvStep],
) -> Dict[str, PackedWeight]:
    packed: Dict[str, PackedWeight] = {}
    for step in plan.steps:
        if isinstance(step, ConvStep):
            conv = modules[step.module]
            assert isinstance(conv, nn.Conv2d)
            packed[step.module] = (
                pack_depthwise(conv, form)
                if step.depthwise
                else pack_conv(conv, form, stem=step is stem)
            )
        elif isinstance(step, LinearStep):
            linear = modules[step.module]
            assert isinstance(linear, nn.Linear)
            source = sizes[step.source]
            packed[step.module] = pack_linear(
                linear, form, source if len(source) == 3 else (*source, 1, 1)
            )
    return packed


def _affines(plan: Plan, modules: Mapping[str, nn.Module]) -> Affines:
    """(s, b) of every batch normalisation that is left: x · s + b, made in float64."""
    names = [step.module for step in plan.steps if isinstance(step, AffineStep) and step.module]
    prologues = [getattr(step, "prologue", None) for step in plan.steps]
    names += [each.module for each in prologues if each is not None]
    made: Affines = {}
    for name in names:
        norm = modules[name]
        assert isinstance(norm, nn.BatchNorm2d)
        assert norm.running_mean is not None
        assert norm.running_var is not None
        ones = torch.ones_like(norm.running_mean, dtype=torch.float64)
        gamma = norm.weight.detach().double() if norm.affine else ones
        beta = norm.bias.detach().double() if norm.affine else ones * 0
        s = gamma / (norm.running_var.double() + norm.eps).sqrt()
        made[name] = (s.float(), (beta - norm.running_mean.double() * s).float())
    return made
