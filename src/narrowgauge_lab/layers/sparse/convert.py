"""The pairs of ReLU and convolution in a model found and replaced by SparseConv2d.

Which ReLU precedes which convolution is read from the graph that torch.fx traces. The model's mode
(train or eval) at that moment stays built into what its own code asks of it, such as a functional
dropout.
"""

from __future__ import annotations

import copy
import dataclasses
import fnmatch
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import fx, nn

from narrowgauge_contract.errors import BadValueError, NotApplicableError, UnknownNameError
from narrowgauge_lab.layers.sparse import backends
from narrowgauge_lab.layers.sparse.modules import SparseConv2d, obstacle
from narrowgauge_lab.layers.sparse.relus import Relus, has_hooks
from narrowgauge_lab.layers.sparse.settings import Settings, key_of

__all__ = ["Converted", "LeftAlone", "Replaced", "choices", "convert"]


@dataclasses.dataclass(frozen=True)
class LeftAlone:
    """A convolution that stays as it is."""

    name: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Replaced:
    """A convolution that skips zeros now; the ReLUs that went into it are in its `settings`."""

    name: str
    settings: Settings


@dataclasses.dataclass(frozen=True)
class Converted:
    """A model with sparse layers, which convolutions they are, and the others."""

    model: nn.Module
    replaced: Tuple[Replaced, ...]
    left_alone: Tuple[LeftAlone, ...]

    def choices(self, example: Any) -> List[Dict[str, Any]]:
        """See `choices`."""
        return choices(self.model, example)


def convert(
    model: nn.Module,
    exclude: Sequence[str] = (),
    *,
    kernel_sizes: Sequence[int] = (1, 3, 5),
    backend: str = "auto",
) -> Converted:
    """A copy of `model` in which every Conv2d that reads the output of a ReLU is a SparseConv2d.

    The ReLU before it goes into the layer where nothing else reads that ReLU; else it stays, and
    the layer skips the zeros it made. The ReLU after it goes into the layer where nothing else
    reads the convolution and no sparse layer takes that ReLU in. A convolution with hooks, which
    watch what it is given and gives, takes none. Parameters, names, hooks and the
    state dict are as in `model`; the model's own class is torch.fx's GraphModule.

    `exclude`: patterns of names of convolutions to leave alone. `kernel_sizes`: square windows to
    convert. `backend` as in `settings`. Raises UnknownNameError for a pattern that matches nothing,
    BadValueError where no convolution is left to convert, NotApplicableError where torch.fx cannot
    trace the model.
    """
    Settings(backend=backend)
    graph, new = _traced(model)
    modules = dict(new.named_modules())
    relus = Relus(graph, modules)
    calls = _calls(graph, modules)
    chosen, left_alone = _sorted(calls, modules, relus, exclude, tuple(kernel_sizes))
    alone = {name for name in chosen if not has_hooks(modules[name])}
    into = {
        name: name in alone and all(relus.may_go(node.args[0], node) for node in calls[name])
        for name in chosen
    }
    for name in chosen:
        if into[name]:
            for node in calls[name]:
                relus.take_out(node.args[0])
    replaced = []
    for name in chosen:
        after = [relus.after(node) if name in alone else None for node in calls[name]]
        if all(after):
            for relu in after:
                relus.take_out(relu)
        settings = Settings(into[name], all(after), backend)
        module = modules[name]
        module.__class__ = SparseConv2d
        assert isinstance(module, SparseConv2d)
        module.adopt(settings)
        replaced.append(Replaced(name, settings))
    result = fx.GraphModule(new, graph)
    result.train(model.training)
    return Converted(result, tuple(replaced), tuple(left_alone))


def choices(model: nn.Module, example: Any) -> List[Dict[str, Any]]:
    """For a record: how each sparse layer computes its map of `model(example)`, why, how many zeros
    that map has, and its crossover. Raises what `SparseConv2d.choose` raises."""
    found: List[Dict[str, Any]] = []
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, SparseConv2d):
            hooks.append(module.register_forward_pre_hook(_noting(name, found)))
    try:
        with torch.no_grad():
            model(example)
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _noting(name: str, found: List[Dict[str, Any]]) -> Any:
    def note(module: SparseConv2d, inputs: Tuple[torch.Tensor, ...]) -> None:
        (x,) = inputs
        chosen, why = module.choose(x)
        crossover = module.crossovers.get(key_of(x))
        found.append(
            {
                "layer": name,
                "shape": list(x.shape),
                "chosen": chosen,
                "why": why,
                "zeros": backends.zero_fraction(x, module.settings.relu_input),
                "relu_input": module.settings.relu_input,
                "relu_output": module.settings.relu_output,
                "crossover": crossover.to_fact() if crossover else None,
            }
        )

    return note


def _traced(model: nn.Module) -> Tuple[fx.Graph, nn.Module]:
    """The graph of a model, and a copy of the model."""
    # Tracing runs the model's own code with stand-ins for tensors, which it may store.
    new = copy.deepcopy(model)
    tracer = _KeepingSparse()
    try:
        graph = tracer.trace(copy.deepcopy(model))
    except Exception as error:  # whatever a forward does with a stand-in for a tensor
        raise NotApplicableError(
            f"torch.fx cannot trace this {type(model).__name__}",
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            next_step="put SparseConv2d in place of its ReLUs and convolutions by hand",
        ) from error
    return graph, new


class _KeepingSparse(fx.Tracer):
    """Sparse layers that are there already are one call."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, nn.Conv2d) or super().is_leaf_module(m, module_qualified_name)


def _calls(graph: fx.Graph, modules: Dict[str, nn.Module]) -> Dict[str, List[fx.Node]]:
    """The calls of every convolution."""
    found: Dict[str, List[fx.Node]] = {}
    for node in graph.nodes:
        if node.op == "call_module" and isinstance(modules[node.target], nn.Conv2d):
            found.setdefault(node.target, []).append(node)
    return found


def _sorted(
    calls: Dict[str, List[fx.Node]],
    modules: Dict[str, nn.Module],
    relus: Relus,
    exclude: Sequence[str],
    kernel_sizes: Tuple[int, ...],
) -> Tuple[List[str], List[LeftAlone]]:
    """The names of the convolutions to convert, and those that are left alone."""
    for pattern in exclude:
        if not fnmatch.filter(calls, pattern):
            raise UnknownNameError("layer", pattern, calls, where="to exclude")
    chosen, left_alone = [], []
    for name, nodes in calls.items():
        module = modules[name]
        assert isinstance(module, nn.Conv2d)
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in exclude):
            reason = "excluded"
        elif type(module) is not nn.Conv2d:
            reason = "its class is not exactly Conv2d: its forward may do something else"
        elif not all(node.args and relus.reaches(node.args[0]) for node in nodes):
            reason = "its input is not the output of a ReLU"
        elif module.kernel_size not in [(each, each) for each in kernel_sizes]:
            reason = f"its kernel is {module.kernel_size}, and {kernel_sizes} are to be converted"
        else:
            reason = obstacle(module)
        if reason:
            left_alone.append(LeftAlone(name, reason))
        else:
            chosen.append(name)
    if not chosen:
        raise BadValueError(
            "no convolution of this model can be converted",
            why="\n".join(f"{each.name}: {each.reason}" for each in left_alone) or "it has none",
        )
    return chosen, left_alone
