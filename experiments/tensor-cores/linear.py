"""The training benches: one linear layer, plain SGD, in the levels of the original.

The update is written out: torch.optim would import torch's compiler, seconds of it, in every row.

O1 and O2 scale the loss dynamically, O2 keeps float32 copies of its weights, O3 does neither: that
is what apex did, and what torch's own tools do when they are told the same.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, ContextManager, List, Optional

import torch
from torch import nn

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab import precision, tf32_flags, torch_compat
from narrowgauge_lab.context import RowContext
from narrowgauge_lab.measure.agreement import check_output
from narrowgauge_lab.measure.cost import Cost, serialised_bytes
from narrowgauge_lab.measure.energy import Source
from narrowgauge_lab.measure.probe import observe, require_precision, tf32_by_arithmetic
from narrowgauge_lab.measure.recording import record_cost, record_energy, record_kernels

from . import setups
from .apex import Amp, patched_functions
from .evidence import check_loss
from .network import Training
from .setups import AUTOCAST, FP32_NORMS, Setup
from .times import Loop, measure_times, record_times

__all__ = ["TRAINING_WARM_UPS", "Bench", "measure"]

Forward = Callable[[torch.Tensor], torch.Tensor]

#: The original's, before each loop.
TRAINING_WARM_UPS = 10


def measure(ctx: RowContext, workload: Training, source: Optional[Source]) -> None:
    """Measure one clean row of a bench, in the precision that the row's parameters ask for; energy
    from `source`."""
    setup = setups.from_parameters(ctx.parameters)
    _require_plain(setup)
    setups.require(setup, ctx.device)
    ctx.fact("setup", dataclasses.asdict(setup))
    ctx.fact("patched_functions", patched_functions())
    tf32_flags.allow_tf32(setup.precision == "tf32")
    tf32 = tf32_by_arithmetic(ctx.device)
    bench = Bench(workload, int(ctx.parameters["batch"]), setup, ctx.device)
    check_output(ctx, bench.predict(), bench.reference, setup.precision)
    require_precision(ctx, setup.precision, observe(bench), tf32)
    for _ in range(TRAINING_WARM_UPS):
        bench()
    loop = Loop(workload.iterations, f"{workload.iterations} iterations")
    times = measure_times(ctx, bench, loop, eager=True)
    check_loss(ctx, bench())
    record_times(ctx, times, bench.batch, loop)
    record_cost(ctx, bench.cost(), bench, bench.batch, times.latency, setup.precision)
    record_kernels(ctx, bench)
    record_energy(ctx, bench, bench.batch, source)


def _require_plain(setup: Setup) -> None:
    """The benches have a precision and nothing else. Raises NotApplicableError."""
    plain = Setup(precision=setup.precision, form=setup.form)
    if setup.precision in ("int8", "fp8"):
        raise NotApplicableError(
            f"the linear benches train, and nothing here trains in {setup.precision}",
            next_step="-p workload=resnet50 runs it",
        )
    if setup != plain:
        raise NotApplicableError(
            "the linear benches have neither layouts nor engines nor convolutions",
            why="they repeat what was published: eager training of one layer",
            next_step="leave layout, engine, fold, cudnn_benchmark and rung at their defaults",
        )


class Bench:
    """The layer, its batch and its optimiser in one setup or, with `amp`, at one level of apex.

    Layer and batch come from torch's global generator, so the same seed gives the same ones. Call
    it for one iteration; it gives the loss, float32 without dimensions.
    """

    def __init__(
        self,
        workload: Training,
        batch: int,
        setup: Setup,
        device: torch.device,
        amp: Optional[Amp] = None,
        level: str = "",
    ) -> None:
        self.batch = batch
        self.inputs = torch.randn(batch, workload.features_in).to(device)
        self.targets = torch.randn(batch, workload.features_out).to(device)
        self.layer = nn.Linear(workload.features_in, workload.features_out).to(device)
        #: float64: what the first forward pass should give.
        self.reference = self._strict()
        self._amp = amp
        masters = [p.detach().clone() for p in self.layer.parameters()]
        self._autocast: Callable[[], ContextManager[Any]] = lambda: torch_compat.autocast(
            device, torch.float16 if setup.form == AUTOCAST and amp is None else torch.float32
        )
        self.forward: Forward = self._prepare(setup, level)
        has_masters = setup.form == FP32_NORMS
        self._masters: Optional[List[torch.Tensor]] = masters if has_masters else None
        self._rate = workload.rate
        scales = setup.form in (AUTOCAST, FP32_NORMS)
        self._scale = precision.LossScale(device) if scales else None

    def __call__(self) -> torch.Tensor:
        with self._autocast():
            outputs = self.forward(self.inputs)
        loss = nn.functional.mse_loss(outputs.float(), self.targets)
        for parameter in self.layer.parameters():
            parameter.grad = None
        (loss if self._scale is None else self._scale.apply(loss)).backward()
        self._update()
        if self._amp is not None:
            self._amp.clear_casts()
        return loss.detach()

    def predict(self) -> torch.Tensor:
        """The forward pass alone, float32."""
        with torch.no_grad(), self._autocast():
            return self.forward(self.inputs).float()

    def cost(self) -> Cost:
        """Of one iteration: the forward product and the weight's gradient; inputs need none."""
        product = self.batch * self.layer.in_features * self.layer.out_features
        return Cost(
            macs=2 * product,
            parameters=sum(parameter.numel() for parameter in self.layer.parameters()),
            bytes=serialised_bytes(self.layer),
            per_operator={"forward": product, "weight gradient": product},
            least_macs=2 * product,
            batch=self.batch,
        )

    def _strict(self) -> torch.Tensor:
        with torch.no_grad():
            weight, bias = (parameter.double() for parameter in self.layer.parameters())
            return self.inputs.double() @ weight.t() + bias

    def _prepare(self, setup: Setup, level: str) -> Forward:
        if self._amp is not None:
            return self.layer if level == "fp32" else self._amp.initialize(self.layer, level)
        self.layer.to(setup.dtype)
        self.inputs = self.inputs.to(setup.dtype)
        return self.layer

    def _update(self) -> None:
        """One step of SGD, left out where a gradient overflowed: without asking the device."""
        parameters = list(self.layer.parameters())
        gradients: List[torch.Tensor] = []
        for parameter in parameters:
            assert parameter.grad is not None
            wide = self._masters is not None
            gradients.append(parameter.grad.float() if wide else parameter.grad)
        if self._scale is not None:
            overflows = torch.stack([self._scale.unscale(gradient) for gradient in gradients])
            overflowed = overflows.any()
            gradients = [
                torch.where(overflowed, torch.zeros_like(gradient), gradient)
                for gradient in gradients
            ]
            self._scale.update(overflowed)
        with torch.no_grad():
            for trained, gradient in zip(self._masters or parameters, gradients):
                trained.add_(gradient, alpha=-self._rate)
            if self._masters is not None:
                for parameter, master in zip(parameters, self._masters):
                    parameter.copy_(master)
