"""A model's layers placed by a plan, and the model's handle afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
from typing import Any, Dict, Iterator, List, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from narrowgauge_contract.errors import (
    NotApplicableError,
    SkippedError,
    UnknownNameError,
    UsageError,
)
from narrowgauge_contract.placement import PASSES, LayerPlacement, PlacementPlan
from narrowgauge_lab.layers.hetero.bus import Bus, require_policy
from narrowgauge_lab.layers.hetero.elsewhere import (
    elsewhere_by,
    normalised_by_kernels,
    place_elsewhere,
)
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.modules import HeteroConv2d, HeteroLinear
from narrowgauge_lab.layers.hetero.overflow import OverflowWatch
from narrowgauge_lab.layers.hetero.runner import Runner
from narrowgauge_lab.layers.passes import Problem, passes_for

__all__ = ["Converted", "LeftAlone", "convert", "home_of", "problem_of"]

Layer = Union[HeteroConv2d, HeteroLinear]
#: Other layers with products like these, which are listed where they are left alone.
_RELATED = (nn.modules.conv._ConvNd, nn.Linear, nn.Bilinear)


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """A layer that stays as it is, on the device where everything else lives."""

    name: str
    type: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model whose layers are placed. `placements`: of every layer that a plan can place.

    `native`: layers that all three passes leave where everything lives, in one plain precision:
    they stay torch's own. `native_precision` is that precision (fp32 or tf32), which whoever trains
    sets by `tf32_flags.allow_tf32`. Where no layer is native it is that of all placed float32
    products, which set it by themselves where it is not set, at some 80 us a product; empty where
    they have none or both. `elsewhere_by`: whose operators may run where everything else lives.
    """

    model: nn.Module
    bus: Bus
    placements: Tuple[Tuple[str, LayerPlacement], ...]
    left_alone: Tuple[LeftAlone, ...]
    native: Tuple[str, ...]
    native_precision: str
    runners: Tuple[Runner, ...]
    elsewhere_by: str

    @property
    def ledger(self) -> Ledger:
        return self.bus.ledger

    @property
    def capturable(self) -> bool:
        """Whether a step can be captured as a whole in a CUDA graph: nothing of it travels."""
        here = all(each.is_cuda for each in self.model.parameters())
        return self.bus.cuda and here and all(runner.stays for runner in self.runners)

    def watch(self, values: torch.Tensor) -> None:
        """A flat tensor of which parameters are parts, such as `FlatOptimizer.values`: without
        this their weights are sent at every call. See `weights`."""
        self.bus.open()
        self.bus.weights.watch(values)

    def weights_changed(self) -> None:
        """Send all weights anew; for writes that torch does not count, as through `.data`."""
        self.bus.open()
        self.bus.weights.forget()

    @contextlib.contextmanager
    def watch_overflow(self) -> Iterator[OverflowWatch]:
        """Statistics of every pass in the block. It slows a step down, and settles gradients at
        once."""
        watch = OverflowWatch()
        self.bus.overflow = watch
        try:
            yield watch
        finally:
            self.bus.overflow = None

    def facts(self) -> Dict[str, Any]:
        """What the record of a row says of the conversion."""
        said = [note for runner in self.runners for note in runner.notes()]
        return {
            **self.bus.facts(),
            "notes": [*self.bus.notes(), *dict.fromkeys(said)],
            "placed": len(self.runners),
            "native": len(self.native),
            "native_precision": self.native_precision,
            "left_alone": [dataclasses.asdict(each) for each in self.left_alone],
            "elsewhere_by": self.elsewhere_by,
            "normalised_by_kernels": normalised_by_kernels(self.model),
            "products": {runner.layer: runner.products() for runner in self.runners},
        }

    def close(self) -> None:
        """Let go of engines."""
        for runner in self.runners:
            runner.close()


def home_of(plan: PlacementPlan, accelerator: torch.device) -> torch.device:
    """Where everything but the products lives: the model has to be there."""
    return torch.device("cpu") if plan.elsewhere == "cpu" else accelerator


def convert(
    model: nn.Module,
    plan: PlacementPlan,
    accelerator: torch.device,
    ledger: Optional[Ledger] = None,
) -> Converted:
    """Place the layers of `model`, in place: each stays the same object, with its parameters,
    hooks, names and places, and changes its class; batch normalisations do too, where the plan has
    the kernels' (`elsewhere_by`). One that was converted before is placed anew.

    `ledger`: with one that keeps something, native layers are placed too, so that it sees them.
    Raises, and then has changed nothing: UnknownNameError for a pattern that matches no layer,
    UsageError for one that matches only layers that are left alone and for a model that is not at
    `home_of` the plan, NotApplicableError for what device or layers do not allow, SkippedError for
    a backend that this host lacks.
    """
    if accelerator.type == "cuda" and not torch.cuda.is_available():
        raise NotApplicableError(f"there is no {accelerator} here", why="torch finds no GPU")
    require_policy(plan.transfers.policy, accelerator)
    home = home_of(plan, accelerator)
    layers, left_alone = _found(model, plan.convolutions_only)
    _require_matches(plan, [name for name, _, _ in layers], left_alone)
    _require_home(model, home)
    placements = [(name, plan.placement(name)) for name, _, _ in layers]
    watched = ledger is not None and ledger.mode != "off"
    native, precision = ([], "") if watched else _native(placements, plan, accelerator)
    precision = precision or _placed_precision(placements)
    bus = Bus(accelerator, plan.transfers, ledger)
    runners: Dict[str, Runner] = {}
    refused: List[Tuple[str, NotApplicableError]] = []
    for name, module, problem in layers:
        placement = plan.placement(name)
        if name in native:
            continue
        try:
            _require_possible(problem, placement, module, accelerator)
            runners[name] = Runner(name, problem, placement, plan.elsewhere, bus, plan.stride_bug)
            runners[name].open()
        except NotApplicableError as error:
            refused.append((name, error))
    if refused:
        for runner in runners.values():
            runner.close()
        raise _refusal(plan, refused)
    for name, module, _ in layers:
        _place(module, runners.get(name))
    by = elsewhere_by(plan)
    place_elsewhere(model, by)
    return Converted(
        model, bus, tuple(placements), tuple(left_alone), tuple(native), precision,
        tuple(runners.values()), by,
    )  # fmt: skip


def problem_of(module: nn.Module) -> Union[Problem, str]:
    """What a layer computes, or why no plan can place it."""
    if isinstance(module, nn.Linear) and type(module) in (nn.Linear, HeteroLinear):
        return _dtype_refused(module) or Problem("linear")
    if not isinstance(module, nn.Conv2d) or type(module) not in (nn.Conv2d, HeteroConv2d):
        return "its class is not exactly Conv2d or Linear: its forward may do something else"
    if module.padding_mode != "zeros":
        return f"padding_mode '{module.padding_mode}': only zeros are padded inside of a product"
    padding = _padding(module)
    if isinstance(padding, str):
        return padding
    problem = Problem(
        "conv2d", _pair(module.stride), padding, _pair(module.dilation), module.groups
    )
    return _dtype_refused(module) or problem


def _dtype_refused(module: Union[nn.Conv2d, nn.Linear]) -> str:
    dtype = module.weight.dtype
    return "" if dtype == torch.float32 else f"its weight is {dtype}, and plans place float32"


def _padding(module: nn.Conv2d) -> Union[Tuple[int, int], str]:
    padding: Any = module.padding
    if not isinstance(padding, str):
        return _pair(padding)
    if padding == "valid":
        return 0, 0
    total = [d * (k - 1) for d, k in zip(module.dilation, module.kernel_size)]
    if any(each % 2 for each in total):
        return f"padding '{padding}' is not the same on both sides of a window of even size"
    return total[0] // 2, total[1] // 2


def _pair(values: Sequence[int]) -> Tuple[int, int]:
    first, second = values
    return first, second


def _found(
    model: nn.Module, convolutions_only: bool
) -> Tuple[List[Tuple[str, Layer, Problem]], List[LeftAlone]]:
    """The layers that can be placed, by their first names, and those that cannot."""
    layers: List[Tuple[str, Any, Problem]] = []
    left_alone = []
    for name, module in model.named_modules():
        if not isinstance(module, _RELATED):
            continue
        problem = problem_of(module)
        if convolutions_only and isinstance(module, nn.Linear):
            problem = "the plan places convolutions only"
        if isinstance(problem, str):
            left_alone.append(LeftAlone(name, type(module).__name__, problem))
        else:
            layers.append((name, module, problem))
    return layers, left_alone


def _require_matches(
    plan: PlacementPlan, names: Sequence[str], left_alone: Sequence[LeftAlone]
) -> None:
    for pattern, _ in plan.layers:
        if any(fnmatch.fnmatchcase(name, pattern) for name in names):
            continue
        for other in left_alone:
            if fnmatch.fnmatchcase(other.name, pattern):
                raise UsageError(
                    f"plan '{plan.name}' places '{pattern}', and no plan can place layer "
                    f"'{other.name}', a {other.type}",
                    why=other.reason,
                    next_step="leave it out of the plan: it then stays as it is",
                )
        raise UnknownNameError("layer", pattern, names, where=f"in the plan '{plan.name}'")


def _require_home(model: nn.Module, home: torch.device) -> None:
    for name, parameter in model.named_parameters():
        if parameter.device.type != home.type:
            raise UsageError(
                f"parameter '{name}' is on {parameter.device}, and the plan has all but the "
                f"products on {home}",
                next_step=f"model.to('{home}') before it is converted",
            )


def _require_possible(
    problem: Problem, placement: LayerPlacement, module: Layer, accelerator: torch.device
) -> None:
    """NotApplicableError where device or torch lack a precision, or the layer's shape forbids."""
    for name in PASSES:
        placed = placement.of(name)
        if placed.backend == "torch":
            device = torch.device("cpu") if placed.device == "cpu" else accelerator
            passes_for(placed.precision, device, problem).require(module.weight.shape)


def _native(
    placements: Sequence[Tuple[str, LayerPlacement]], plan: PlacementPlan, accelerator: torch.device
) -> Tuple[List[str], str]:
    """The layers that may stay torch's own, and their one precision: more than one cannot be had
    by flags that hold for all."""
    found: Dict[str, List[str]] = {"fp32": [], "tf32": []}
    for name, placement in placements:
        passes = {placement.of(each) for each in PASSES}
        placed = placement.forward
        here = placed.device == plan.elsewhere and placed.backend == "torch"
        if len(passes) == 1 and here and placed.precision in found:
            found[placed.precision].append(name)
    used = [precision for precision, names in found.items() if names]
    if len(used) != 1 or (used[0] == "tf32" and accelerator.type != "cuda"):
        return [], ""
    return found[used[0]], used[0]


def _placed_precision(placements: Sequence[Tuple[str, LayerPlacement]]) -> str:
    """The one precision of all float32 products by torch, wherever they are; or none."""
    passes = [placement.of(name) for _, placement in placements for name in PASSES]
    used = {each.precision for each in passes if each.backend == "torch"} & {"fp32", "tf32"}
    return used.pop() if len(used) == 1 else ""


def _refusal(
    plan: PlacementPlan, refused: Sequence[Tuple[str, NotApplicableError]]
) -> NotApplicableError:
    """One error for all layers; skipped only where each would be."""
    reasons: Dict[str, List[str]] = {}
    for name, error in refused:
        reasons.setdefault(f"{error.what}: {error.why}" if error.why else error.what, []).append(
            name
        )
    lines = [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
    kind = NotApplicableError
    if all(isinstance(error, SkippedError) for _, error in refused):
        kind = SkippedError
    return kind(
        f"the plan '{plan.name}' cannot run here",
        why="\n".join(lines),
        next_step=refused[0][1].next_step or "place these layers elsewhere",
    )


def _place(module: nn.Module, runner: Optional[Runner]) -> None:
    """Change the class of a layer, which stays the same object."""
    kinds = {nn.Conv2d: HeteroConv2d, nn.Linear: HeteroLinear}
    if runner is None:
        if isinstance(module, (HeteroConv2d, HeteroLinear)):
            module.runner = None
        return
    module.__class__ = kinds.get(type(module), type(module))
    assert isinstance(module, (HeteroConv2d, HeteroLinear))
    module.runner = runner
