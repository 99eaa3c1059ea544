"""What cuDNN and torch offer for a step, beside our own kernels."""

from __future__ import annotations

import base64
import copy
from typing import Any, Callable, Dict, List, Mapping, Optional, Tuple

import torch
from torch import fx, nn

from narrowgauge_lab.engines.errors import OperatorNotTakenError
from narrowgauge_lab.engines.own import cudnn
from narrowgauge_lab.engines.own.gpu.candidate import Candidate
from narrowgauge_lab.engines.own.gpu.formats import for_products
from narrowgauge_lab.engines.own.gpu.memory import Lane, Memory
from narrowgauge_lab.engines.own.gpu.packing import STEM_PIXEL, PackedWeight
from narrowgauge_lab.engines.own.gpu.steps import ConvStep, TorchStep
from narrowgauge_lab.engines.own.gpu.tracing import IN_PLACE
from narrowgauge_lab.measure.watch import declare

__all__ = ["Convolutions", "convolutions", "torch_step"]

#: Plans that are tried for a problem: more than cuDNN's heuristics propose for its first form.
_PLANS = 64
#: Bytes that cuDNN takes addresses to be multiples of.
_ALIGNMENT = 16


class Convolutions:
    """cuDNN's plans for one convolution. There are none where a kernel of ours is alone in taking
    it: in 8-bit formats, and where x is read through a batch norm or in runs of padded pixels."""

    def __init__(
        self, memory: Memory, lane: Lane, step: ConvStep, conv: nn.Conv2d, packed: PackedWeight
    ) -> None:
        self._memory, self._lane, self._step, self._conv = memory, lane, step, conv
        self._stem = packed.stem
        self._packed: Dict[Optional[torch.dtype], Tuple[torch.Tensor, torch.Tensor]] = {}

    def candidates(self, seconds: float) -> List[Candidate]:
        """Those that are found in about so many seconds: the heuristics' first, and engines that
        compile at run time last."""
        if self._is_ours_alone() or cudnn.missing():
            return []
        plans = cudnn.plans(self._problem(), self._memory.device, limit=_PLANS, seconds=seconds)
        return [self._candidate(plan) for plan in plans]

    def restore(self, spec: Mapping[str, Any]) -> Optional[Candidate]:
        """Of what `Candidate.store` gave; None where cuDNN does not take it any more."""
        if "plan" not in spec or self._is_ours_alone() or cudnn.missing():
            return None
        try:
            blob = base64.b64decode(spec["plan"], validate=True)
            return self._candidate(cudnn.rebuild(self._problem(), blob, self._memory.device))
        except (ValueError, cudnn.CudnnPlanError):
            return None

    def _is_ours_alone(self) -> bool:
        memory, step = self._memory, self._step
        if memory.form.scaled or step.prologue is not None:
            return True
        if step.source == memory.plan.source and not self._stem:
            return True
        # A value in a concatenation begins where the one before it ends.
        read = () if step.residual is None else (step.residual,)
        names = (step.source, step.output, *read)
        return any(memory.place(name).offset * memory.form.width % _ALIGNMENT for name in names)

    def _problem(self) -> cudnn.ConvProblem:
        memory, step, conv = self._memory, self._step, self._conv
        where, into = memory.place(step.source), memory.place(step.output)
        beside = memory.place(step.residual).pixel if step.residual is not None else into.pixel
        form = memory.form
        channels, width, padding, row = where.channels, where.width, _pair(conv.padding), 0
        if self._stem:  # the images have their border in memory already, and rows that are longer
            channels, padding = where.pixel, (0, 0)
            width, row = memory.size(step.source)[2] + 2 * memory.border, where.width * where.pixel
        return cudnn.ConvProblem(
            batch=memory.batch, channels=channels, height=where.height, width=width, x_row=row,
            count=into.channels, rows=int(conv.kernel_size[0]), columns=int(conv.kernel_size[1]),
            stride=_pair(conv.stride), padding=padding, dilation=_pair(conv.dilation),
            groups=conv.groups, dtype="tf32" if form.name == "tf32" else str(form.dtype)[6:],
            bias=True, residual=step.residual is not None, activation=step.activation,
            x_pixel=where.pixel, y_pixel=into.pixel, residual_pixel=beside,
        )  # fmt: skip

    def _candidate(self, plan: cudnn.ConvPlan) -> Candidate:
        memory, step = self._memory, self._step
        x = memory.whole(step.source) if self._stem else memory.view(step.source)
        y = memory.view(step.output)
        residual = memory.view(step.residual) if step.residual is not None else None
        weight, bias = self._operands(plan.bias_dtype)
        macs = y.numel() * weight[0].numel()
        workspace = self._lane.workspace(plan.workspace)
        bound = plan.bind(x, weight, bias, residual, y, workspace)

        def start() -> None:
            declare("cudnn::convolution", x, weight, y, macs)
            bound()

        def store() -> Mapping[str, Any]:
            return {"plan": base64.b64encode(plan.blob()).decode("ascii")}

        return Candidate("cudnn", plan.name, store, start)

    def _operands(self, dtype: Optional[torch.dtype]) -> Tuple[torch.Tensor, torch.Tensor]:
        """Weight and bias on the device, shared by the plans that want the bias as `dtype`."""
        if dtype not in self._packed:
            conv, form = self._conv, self._memory.form
            weight = for_products(conv.weight.detach(), form).to(form.dtype)
            if self._stem:
                weight = nn.functional.pad(weight, (0, 0, 0, 0, 0, STEM_PIXEL - weight.shape[1]))
            bias = conv.bias if conv.bias is not None else conv.weight.new_zeros(conv.out_channels)
            self._packed[dtype] = (
                weight.contiguous(memory_format=torch.channels_last),
                bias.detach().to(dtype or form.dtype).view(1, -1, 1, 1),
            )
        return self._packed[dtype]


def convolutions(
    memory: Memory, lane: Lane, step: ConvStep, conv: nn.Module, packed: PackedWeight
) -> Convolutions:
    """What cuDNN offers for a convolution."""
    assert isinstance(conv, nn.Conv2d)
    return Convolutions(memory, lane, step, conv, packed)


def torch_step(memory: Memory, step: TorchStep, modules: Mapping[str, nn.Module]) -> Candidate:
    """A node of the graph as torch runs it. Raises OperatorNotTakenError for 8-bit formats."""
    form, node = memory.form, step.node
    if form.scaled:
        raise OperatorNotTakenError(
            "narrowgauge", step.operator, str(node.target), f"no kernel of it exists in {form.name}"
        )
    given: List[fx.Node] = []
    fx.node.map_arg((node.args, node.kwargs), given.append)
    values = dict(zip(given, step.sources))

    def load(each: fx.Node) -> torch.Tensor:
        view = memory.view(values[each])
        flat = view.dim() > 1 + len(memory.sizes[each.name])
        return view.flatten(1) if flat else view

    call = _callable(node, modules, form.dtype)
    target = memory.view(step.output)

    def start() -> None:
        with torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), load)
            result = call(*args, **kwargs)
            if result.shape != target.shape:
                raise OperatorNotTakenError(
                    "narrowgauge", step.operator, str(node.target),
                    f"it gives {tuple(result.shape)} where {tuple(target.shape)} is due: its first "
                    "dimension is not the batch",
                )  # fmt: skip
            target.copy_(result)

    return Candidate("torch", step.operator, lambda: {"torch": step.operator}, start)


def _callable(
    node: fx.Node, modules: Mapping[str, nn.Module], dtype: torch.dtype
) -> Callable[..., torch.Tensor]:
    if node.op == "call_module":
        return copy.deepcopy(modules[str(node.target)]).to(dtype)
    if node.op == "call_method":
        # Values lie channels last, so that what eager torch views may need a copy.
        name = "reshape" if node.target == "view" else str(node.target)
        return lambda first, *args, **kwargs: getattr(first, name)(*args, **kwargs)
    assert callable(node.target)
    # Nobody reads afterwards what `a += b` writes over, but it may lie in what others read.
    return IN_PLACE.get(node.target, node.target)


def _pair(value: Any) -> Any:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)
