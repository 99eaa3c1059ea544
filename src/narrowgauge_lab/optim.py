"""SGD, Adam and Adadelta over one flat tensor that all parameters of a model share.

torch's optimisers read their learning rate as a Python number (SGD still does), so a captured CUDA
graph would replay the rate of the day it was captured; and they launch a kernel per parameter and
operation. Over one flat tensor an update is a handful of kernels, the rate is a device scalar, and
skipping an update when a gradient overflowed needs no answer from the device. `tests/lab` holds
each to torch's own, step by step.
"""

from __future__ import annotations

import abc
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

import torch
from torch import nn

from narrowgauge_contract.errors import UsageError

__all__ = ["SGD", "Adadelta", "Adam", "FlatOptimizer", "OptimizerMaker"]


#: Elements; 64 bytes of float32, what cuDNN, cuBLAS and AVX-512 like best.
_ALIGNMENT = 16


class FlatOptimizer(abc.ABC):
    """Moves the model's parameters into one flat tensor (they become views) and updates that.

    `rate` is a device scalar; `state` maps names to flat tensors shaped like the parameters.
    """

    def __init__(self, model: nn.Module, rate: float, state: Sequence[str]) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        if not self.parameters:
            raise UsageError(
                f"this {type(model).__name__} has no parameter to train",
                why="it was converted to integers, which have no gradient, or all of it is frozen",
                next_step="train the float or the fake-quantised network (quant.qat), then convert",
            )
        device = self.parameters[0].device
        #: Zeros after each parameter, so that the next one begins where vector loads may begin.
        self._gaps = [torch.zeros(-p.numel() % _ALIGNMENT, device=device) for p in self.parameters]
        self.values = self._flatten([p.detach() for p in self.parameters])
        start = 0
        for parameter, gap in zip(self.parameters, self._gaps):
            part = self.values[start : start + parameter.numel()]
            parameter.data = part.view(parameter.shape)
            start += parameter.numel() + gap.numel()
        self.gradient = torch.zeros_like(self.values)
        self.rate = torch.tensor(rate, device=self.values.device)
        self.state: Dict[str, torch.Tensor] = {
            name: torch.zeros_like(self.values) for name in state
        }

    def set_rate(self, rate: float) -> None:
        """Change the learning rate in place, for captured graphs as well."""
        self.rate.fill_(rate)

    def differentiate(self, loss: torch.Tensor) -> None:
        """Put the gradient of `loss` by every parameter into `gradient`."""
        self._flatten(torch.autograd.grad(loss, self.parameters), out=self.gradient)

    def differentiate_partly(
        self, loss: torch.Tensor, out: Optional[torch.Tensor] = None, *, again: bool = False
    ) -> None:
        """The same where `loss` need not depend on every parameter: the gradient by others is 0.

        `out`: where to put it, flat like `values`; by default `gradient`. `again`: more losses of
        the same forward pass follow.
        """
        found = torch.autograd.grad(loss, self.parameters, retain_graph=again, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for g, p in zip(found, self.parameters)]
        self._flatten(parts, out=self.gradient if out is None else out)

    def extents(self) -> List[int]:
        """How many elements of the flat tensors each parameter has, the gap after it included."""
        return [p.numel() + gap.numel() for p, gap in zip(self.parameters, self._gaps)]

    def _flatten(
        self, tensors: Sequence[torch.Tensor], out: Optional[torch.Tensor] = None
    ) -> torch.Tensor:
        """Tensors shaped like the parameters as one flat tensor, a gap of zeros after each."""
        parts = [p for pair in zip(tensors, self._gaps) for p in (pair[0].reshape(-1), pair[1])]
        return torch.cat(parts, out=out)

    def step(self, skip: Optional[torch.Tensor] = None) -> None:
        """Update from `gradient`. Where the boolean scalar `skip` is true nothing changes.

        `skip` stays on the device: asking for it would stop the queue at every step.
        """
        tensors = [self.values, *self.state.values()]
        before = [tensor.clone() for tensor in tensors] if skip is not None else []
        with torch.no_grad():
            self._update()
            for tensor, old in zip(tensors, before):
                tensor.copy_(torch.where(skip, old, tensor))

    @abc.abstractmethod
    def _update(self) -> None:
        """Change `values` and `state` in place, from `gradient` and the rate."""

    def state_dict(self) -> Dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.state.items()}

    def load_state_dict(self, saved: Dict[str, Any]) -> None:
        for name, tensor in self.state.items():
            tensor.copy_(saved[name])


class SGD(FlatOptimizer):
    """Momentum without dampening, Nesterov's if asked for; weight decay is added to the gradient.

    Nesterov as torch has it: the step is of the gradient and the momentum that it gave (Sutskever
    and others 2013 with the point of evaluation as the parameters).
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        nesterov: bool = False,
    ) -> None:
        super().__init__(model, rate, ("momentum",))
        self.momentum = momentum
        self.weight_decay = weight_decay
        self.nesterov = nesterov

    def _update(self) -> None:
        velocity = self.state["momentum"]
        gradient = self.gradient.add(self.values, alpha=self.weight_decay)
        velocity.mul_(self.momentum).add_(gradient)
        step = gradient.add(velocity, alpha=self.momentum) if self.nesterov else velocity
        self.values.sub_(step * self.rate)


class Adadelta(FlatOptimizer):
    """Zeiler 2012 (arXiv 1212.5701), as torch has it: the step is multiplied by a rate."""

    def __init__(self, model: nn.Module, rate: float, rho: float = 0.9, eps: float = 1e-6) -> None:
        super().__init__(model, rate, ("square", "delta"))
        self.rho = rho
        self.eps = eps

    def _update(self) -> None:
        square, accumulated = self.state["square"], self.state["delta"]
        square.mul_(self.rho).addcmul_(self.gradient, self.gradient, value=1 - self.rho)
        deviation = square.add(self.eps).sqrt_()
        delta = accumulated.add(self.eps).sqrt_().div_(deviation).mul_(self.gradient)
        accumulated.mul_(self.rho).addcmul_(delta, delta, value=1 - self.rho)
        self.values.sub_(delta.mul_(self.rate))


class Adam(FlatOptimizer):
    """Kingma and Ba 2015 (arXiv 1412.6980), as torch has it; weight decay is added to the gradient.

    How many steps there were is a number on the device: a captured step counts too.
    """

    def __init__(
        self,
        model: nn.Module,
        rate: float,
        betas: Tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(model, rate, ("mean", "square"))
        self.betas = betas
        self.eps = eps
        self.weight_decay = weight_decay
        # float64: in float32 the first corrections, 1 - 0.999, would keep four digits.
        self.state["steps"] = torch.zeros((), dtype=torch.float64, device=self.values.device)

    def _update(self) -> None:
        mean, square, steps = self.state["mean"], self.state["square"], self.state["steps"]
        first, second = self.betas
        gradient = self.gradient.add(self.values, alpha=self.weight_decay)
        steps.add_(1)
        mean.mul_(first).add_(gradient, alpha=1 - first)
        square.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        unbiased = (1 - torch.pow(second, steps)).sqrt()
        deviation = square.sqrt().div_(unbiased.to(square.dtype)).add_(self.eps)
        size = (self.rate / (1 - torch.pow(first, steps))).to(mean.dtype)
        self.values.sub_((mean / deviation).mul_(size))


#: How a training run makes its optimiser once the model is on its device.
OptimizerMaker = Callable[[nn.Module], FlatOptimizer]
