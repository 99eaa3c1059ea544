"""A layer's passes by engines of TensorRT, one for each pass, image size and largest batch.

What an engine takes is what travels: tensors are rounded to its input's type on the CPU, and come
back in its output's; the plan's wires are for the backend `torch`. A smaller batch uses the engine
of a larger one; one that is larger than any before gets its own, from the cache of engines where it
was built before. Weights are handed over when they changed, from device memory where TensorRT can
take them from there.

Where the plan says `resident`, x stays on the device from forward to weight_grad, and g from
input_grad to weight_grad, as long as nobody wrote to them meanwhile.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ContextManager, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_contract.placement import DLA_PRECISION, TENSORRT_PRECISIONS
from narrowgauge_lab.engines.base import DTYPES, Preparation
from narrowgauge_lab.engines.cache import EngineCache
from narrowgauge_lab.engines.errors import EngineClosedError, EngineMissingError
from narrowgauge_lab.engines.serving import kept_engines
from narrowgauge_lab.engines.tensorrt import ENGINE, ConvolutionSpec, TensorRTEngine, TensorRTRunner
from narrowgauge_lab.layers.hetero.backends import BackendOptions, WholeBackend
from narrowgauge_lab.layers.hetero.backends.shapes import as_image, convolution_of, image_shape
from narrowgauge_lab.layers.hetero.backends.tensorrt_networks import (
    forward_spec,
    input_gradient,
    weight_gradient,
)
from narrowgauge_lab.layers.hetero.host import HostMemory
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.passes import Problem

__all__ = ["TensorrtBackend"]


@dataclasses.dataclass
class _Ready:
    """An engine for up to `most` images, and the kernel that it has."""

    runner: TensorRTRunner
    most: int
    kernel: Optional[torch.Tensor] = None


@dataclasses.dataclass(frozen=True)
class _Resident:
    """A tensor of the caller's as it stood when it was sent, and its copy on the device.

    It is held, so that no other tensor can come to lie where it lies.
    """

    source: torch.Tensor
    written: int
    copy: torch.Tensor

    def is_of(self, tensor: torch.Tensor) -> bool:
        mine = (self.source.data_ptr(), self.source.shape, self.source.stride(), self.written)
        return mine == (tensor.data_ptr(), tensor.shape, tensor.stride(), _written(tensor))


# unverified: layers run by TensorRT | needs a library for a GPU at hand | plan=tensorrt-fp16 there
# unverified: refits of what a DLA runs | no board | a plan with device=dla on a Xavier
class TensorrtBackend(WholeBackend):
    """The passes of one layer; for one thread at a time."""

    engine: TensorRTEngine = ENGINE

    def __init__(
        self,
        layer: str,
        problem: Problem,
        precision: str,
        device: torch.device,
        ledger: Ledger,
        options: BackendOptions,
    ) -> None:
        super().__init__(layer, problem, precision, device, ledger, options)
        self._said: List[str] = []
        self._like = convolution_of(problem)
        self._check()
        self._dtype = DTYPES[precision]
        locks = device.type == "cuda" and options.transfers.policy != "pageable"
        self._host = HostMemory(locks)
        self._ready: Dict[Tuple[Any, ...], List[_Ready]] = {}
        self._resident: Dict[str, _Resident] = {}
        self._closed = False

    @classmethod
    def missing(cls, device: torch.device) -> str:
        return cls.engine.missing(device)

    @property
    def notes(self) -> Tuple[str, ...]:
        """What a record has to say: why a DLA does not run a pass, where memory was not pinned."""
        return (*self._said, *self._host.notes())

    def _check(self) -> None:
        """All that can be said before a shape is known."""
        lacking = self.engine.missing(self.device)
        if lacking:
            raise EngineMissingError(f"layer '{self.layer}' has no TensorRT", why=lacking)
        refused = self.engine.refuses(self.precision, self.device)
        if self.precision not in TENSORRT_PRECISIONS:
            refused = "gradients have no calibrated scales, which its engines would need"
        if refused:
            raise NotApplicableError(
                f"the backend 'tensorrt' of layer '{self.layer}' has no {self.precision}",
                why=refused,
                next_step='backend = "torch" has it',
            )
        core = self.options.dla
        if core is None:
            return
        if self.precision != DLA_PRECISION:
            raise NotApplicableError(
                f"a DLA runs the passes of a layer in {DLA_PRECISION}, not {self.precision}"
            )
        cores = self.engine.dla_cores(self.device)
        if core >= cores:
            raise NotApplicableError(
                f"layer '{self.layer}' is to run on DLA core {core}",
                why=f"TensorRT finds {cores} cores here",
                next_step='device = "accelerator"',
            )

    @torch.no_grad()
    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> torch.Tensor:
        shape = self.problem.output_shape(x.shape, weight.shape)
        if not x.numel():
            return x.new_zeros(shape)
        image, kernel = as_image(x, self.problem), as_image(weight, self.problem)
        ready = self._convolution(
            "forward", forward_spec(self._like, image.shape, kernel.shape), kernel, len(image)
        )
        there = self._sent("forward", "x", x, image)
        self._refit("forward", ready, kernel)
        y = self._called("forward", ready, there)
        with self._stage("forward", "reshape"):
            y = y.float()
            if bias is not None:
                y += bias.detach().view(1, -1, 1, 1)
            return y.reshape(shape)

    @torch.no_grad()
    def input_grad(
        self, grad: torch.Tensor, weight: torch.Tensor, input_shape: Sequence[int]
    ) -> torch.Tensor:
        if not grad.numel():
            return grad.new_zeros(tuple(input_shape))
        above, weights = as_image(grad, self.problem), as_image(weight, self.problem)
        plan = input_gradient(
            self._like, image_shape(input_shape, self.problem), weights.shape
        )  # fmt: skip
        kernel = plan.kernel(weights)
        ready = self._convolution("input_grad", plan.spec, kernel, len(above))
        there = self._sent("input_grad", "grad", grad, above)
        if plan.rows or plan.columns:
            with self._stage("input_grad", "compute", streamed=True):
                there = torch.nn.functional.pad(there, (0, plan.columns, 0, plan.rows))
        self._refit("input_grad", ready, kernel)
        result = self._called("input_grad", ready, there)
        with self._stage("input_grad", "reshape"):
            return result.float().reshape(tuple(input_shape))

    @torch.no_grad()
    def weight_grad(
        self, grad: torch.Tensor, x: torch.Tensor, weight_shape: Sequence[int]
    ) -> torch.Tensor:
        if not grad.numel():
            return grad.new_zeros(tuple(weight_shape))
        image, above = as_image(x, self.problem), as_image(grad, self.problem)
        plan = weight_gradient(self._like, image.shape, image_shape(weight_shape, self.problem))
        ready = self._fitting(("weight_grad", plan), len(image))
        if ready is None:
            runner = self.engine.prepare_network(
                repr(plan), plan.definition(self._dtype), self._example(image.shape),
                self._wanted(len(image)),
            )  # fmt: skip
            ready = self._keep(("weight_grad", plan), runner, len(image))
            if self.options.dla is not None:
                why = "a DLA multiplies with constant weights only"
                self._said.append(f"{self.layer}, weight_grad: on the GPU: {why}")
        there = self._sent("weight_grad", "x", x, image)
        above = self._sent("weight_grad", "grad", grad, above)
        self._resident.clear()
        result = self._called("weight_grad", ready, there, above)
        with self._stage("weight_grad", "reshape"):
            return result.float().reshape(tuple(weight_shape))

    def _convolution(
        self, pass_: str, spec: ConvolutionSpec, kernel: torch.Tensor, batch: int
    ) -> _Ready:
        """The engine of a convolution, on the DLA where it is asked for and has room."""
        on_dla = self.options.dla is not None
        exact = batch if on_dla else 0  # a DLA takes one size of batch
        key = (pass_, spec, exact)
        ready = self._fitting(key, batch)
        if ready is not None:
            return ready
        weights = {"kernel": kernel}
        runner = self._dla_runner(pass_, spec, kernel, batch) if on_dla else None
        if runner is None:
            runner = self.engine.prepare_convolution(spec, weights, self._wanted(batch))
        return self._keep(key, runner, batch)

    def _dla_runner(
        self, pass_: str, spec: ConvolutionSpec, kernel: torch.Tensor, batch: int
    ) -> Optional[TensorRTRunner]:
        """None, and a note, where the DLA cannot run it, has no room for it, or cannot be
        refitted, which training cannot do without."""
        core = self.options.dla
        assert core is not None
        where = f"{self.layer}, {pass_}, batches of {batch}: on the GPU, not on DLA core {core}"
        wanted = dataclasses.replace(
            self._wanted(batch), batches=(batch, batch, batch), options={"dla": core}
        )
        try:
            runner = self.engine.prepare_convolution(spec, {"kernel": kernel}, wanted)
        except NotApplicableError as error:
            self._said.append(f"{where}: {error.what}" + (f" ({error.why})" if error.why else ""))
            return None
        if "kernel" not in runner.weight_names:
            runner.close()
            self._said.append(f"{where}: TensorRT cannot refit there")
            return None
        return runner

    def _wanted(self, batch: int) -> Preparation:
        cache = EngineCache(kept_engines())
        return Preparation(self.precision, self.device, batches=(1, batch, batch), cache=cache)

    def _example(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.empty(tuple(shape), dtype=self._dtype)

    def _fitting(self, key: Tuple[Any, ...], batch: int) -> Optional[_Ready]:
        """The engine for the fewest images that takes as many."""
        if self._closed:
            raise EngineClosedError(f"the engines of layer '{self.layer}' are closed")
        fitting = [each for each in self._ready.get(key, []) if each.most >= batch]
        return min(fitting, key=lambda each: each.most) if fitting else None

    def _keep(self, key: Tuple[Any, ...], runner: TensorRTRunner, batch: int) -> _Ready:
        ready = _Ready(runner, batch)
        self._ready.setdefault(key, []).append(ready)
        self._said += [f"{self.layer}, {key[0]}: {note}" for note in runner.notes]
        return ready

    def _sent(
        self, pass_: str, role: str, source: torch.Tensor, image: torch.Tensor
    ) -> torch.Tensor:
        """`image`, which is the caller's `source` with four dimensions, on the device."""
        kept = self._resident.get(role)
        if kept is not None and kept.is_of(source):
            return kept.copy
        same = self._dtype == image.dtype
        if not same or (self._host.locks and not self._host.locked(image)):
            # Not kept: memory made in inference mode cannot be written outside of it.
            staged = self._host.fresh(image.shape, self._dtype)
            with self._stage(pass_, "reshape" if same else "quantise"):
                image = staged.copy_(image)
        with self._stage(pass_, "to_device", to_device=_bytes(image), streamed=True):
            there = torch.empty(image.shape, dtype=self._dtype, device=self.device)
            there.copy_(image, non_blocking=True)
        written = _written(source)
        if self.options.transfers.resident and written is not None:
            self._resident[role] = _Resident(source, written, there)
        return there

    def _refit(self, pass_: str, ready: _Ready, kernel: torch.Tensor) -> None:
        """Hand the kernel over where it is not what the engine has."""
        changed = ready.kernel is None or not torch.equal(ready.kernel, kernel)
        if not changed and self.options.transfers.weights == "dirty":
            return
        with self._stage(pass_, "refit", to_device=_bytes(kernel), streamed=True):
            new = kernel.to(self.device) if ready.runner.refits_on_device else kernel
            ready.runner.refit({"kernel": new})
        ready.kernel = kernel.clone()

    def _called(self, pass_: str, ready: _Ready, *inputs: torch.Tensor) -> torch.Tensor:
        """The engine's result on the CPU, in its own type. All that was queued before is over then,
        so that the memory that it was sent from may be written again."""
        with self._stage(pass_, "compute", streamed=True):
            result = ready.runner.run(*inputs)
        with self._stage(pass_, "from_device", from_device=_bytes(result), streamed=True):
            return self._host.fresh(result.shape, result.dtype).copy_(result)

    def _stage(
        self, pass_: str, stage: str, to_device: int = 0, from_device: int = 0,
        streamed: bool = False,
    ) -> ContextManager[Any]:  # fmt: skip
        on_gpu = streamed and self.device.type == "cuda"
        stream = torch.cuda.current_stream(self.device) if on_gpu else None
        return self.ledger.stage(
            self.layer, pass_, stage, stream=stream, to_device=to_device, from_device=from_device
        )

    def close(self) -> None:
        self._closed = True
        for kept in self._ready.values():
            for each in kept:
                each.runner.close()
        self._ready.clear()
        self._resident.clear()


def _written(tensor: torch.Tensor) -> Optional[int]:
    """How often it was written to; None of a tensor of inference mode, which keeps no count."""
    try:
        return int(tensor._version)
    except RuntimeError:
        return None


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
