"""One layer's passes, each where its placement says."""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence, Tuple

import torch

from narrowgauge_contract.placement import LayerPlacement, PassPlacement
from narrowgauge_lab.layers.hetero.away import Away
from narrowgauge_lab.layers.hetero.backends import BackendOptions, WholeBackend, make_backend
from narrowgauge_lab.layers.hetero.bus import Bus
from narrowgauge_lab.layers.hetero.gradients import bias_gradient
from narrowgauge_lab.layers.hetero.ledger import Ledger
from narrowgauge_lab.layers.hetero.prepared import Lease
from narrowgauge_lab.layers.passes import Operand, Passes, Problem, passes_for
from narrowgauge_lab.layers.passes.choice import seeds_on_device
from narrowgauge_lab.layers.passes.seeds import Seed

__all__ = ["Runner"]

_CPU = torch.device("cpu")
#: DLA cores are numbered; the original and the boards' tools use the first.
_DLA = 0


class Runner:
    """The passes of one layer: on the device where everything else lives (`here`), over the bus
    (`away`: elsewhere is the CPU, the pass on the accelerator), down to the CPU and back (elsewhere
    is the accelerator), or by a whole backend.

    Opened at its first use. A copy of a layer has a runner of its own and, with the copied model's
    other layers, a bus of its own.
    """

    def __init__(
        self,
        layer: str,
        problem: Problem,
        placement: LayerPlacement,
        elsewhere: str,
        bus: Bus,
        stride_bug: bool = False,
    ) -> None:
        self.layer, self.problem, self.placement = layer, problem, placement
        self.elsewhere, self.bus, self.stride_bug = elsewhere, bus, stride_bug
        self.home = _CPU if elsewhere == "cpu" else bus.device
        self._opened = False
        self._whole: Dict[PassPlacement, WholeBackend] = {}

    def __reduce__(self) -> Tuple[Any, ...]:
        return Runner, (
            self.layer, self.problem, self.placement, self.elsewhere, self.bus, self.stride_bug,
        )  # fmt: skip

    @property
    def ledger(self) -> Ledger:
        return self.bus.ledger

    def open(self) -> None:
        """Make what the passes need, for any shape. Raises NotApplicableError for what is not to be
        had here."""
        if self._opened:
            return
        self.bus.open()
        self._away = Away(self.layer, self.problem, self.placement, self.bus) if (
            self.elsewhere == "cpu"
        ) else None  # fmt: skip
        self._forward = self._local(self.placement.forward)
        self._input_grad = self._local(self.placement.input_grad)
        self._weight_grad = self._local(self.placement.weight_grad)
        for name in ("forward", "input_grad", "weight_grad"):
            placed = self.placement.of(name)
            if placed.backend != "torch" and placed not in self._whole:
                self._whole[placed] = make_backend(
                    placed.backend, self.layer, self.problem, placed.precision, self.bus.device,
                    self.ledger, self._options(placed),
                )  # fmt: skip
        self._opened = True

    def close(self) -> None:
        """Let go of whole backends' engines. The next pass opens the runner anew."""
        for backend in self._whole.values():
            backend.close()
        self._whole.clear()
        self._opened = False

    def notes(self) -> List[str]:
        """What the layer's whole backends have to say for the record."""
        return [note for backend in self._whole.values() for note in backend.notes]

    def products(self) -> Dict[str, str]:
        """Who computes each pass, for the record: "cpu: torch", "cuda: triton", "faithful"."""
        self.open()
        away = self._away.passes() if self._away is not None else (None, None, None)
        local = (self._forward, self._input_grad, self._weight_grad)
        found = {}
        for name, far, near in zip(("forward", "input_grad", "weight_grad"), away, local):
            placed = self.placement.of(name)
            if placed.backend != "torch":
                found[name] = placed.backend
            else:
                passes = near if near is not None else far
                device = self.bus.device if placed.device == "accelerator" else _CPU
                found[name] = f"{device.type}: {passes.product if passes is not None else ''}"
        return found

    @property
    def stays(self) -> bool:
        """Whether all passes are on the accelerator, as is everything else, and ask the host for
        nothing that a captured step could not have baked in."""
        self.open()
        local = (self._forward, self._input_grad, self._weight_grad)
        if self.elsewhere == "cpu":
            return False
        for name, passes in zip(("forward", "input_grad", "weight_grad"), local):
            placed = self.placement.of(name)
            if passes is None or placed.device != "accelerator":
                return False
            if placed.precision == "int8" and not seeds_on_device(passes):
                return False
        return True

    def forward(
        self, x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]
    ) -> Tuple[torch.Tensor, Optional[Operand], Optional[Lease]]:
        """The output, and the input as it is on the accelerator, where it can stay there: as long
        as the lease is held, if there is one."""
        if not self._opened:
            self.open()
        placed = self.placement.forward
        kept: Optional[Operand] = None
        lease: Optional[Lease] = None
        with self.ledger.call(self.layer, "forward"):
            if placed.backend != "torch":
                result = self._whole[placed].forward(x.detach(), weight.detach(), _plain(bias))
            elif self._forward is not None:
                result = self._near("forward", self._forward, x, weight, bias)
            else:
                assert self._away is not None
                result, kept, lease = self._away.forward(x, weight, bias)
        watch = self.bus.overflow
        if watch is not None:
            watch.see(self.layer, "forward", "input", x, self._forms("forward", "input"))
            watch.see(self.layer, "forward", "output", result)
        stays = self.bus.transfers.resident and self._is_away("weight_grad")
        return (result, kept, lease) if stays else (result, None, None)

    def backward(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
        input_shape: Sequence[int],
        inputs: Optional[Operand],
        x: Optional[torch.Tensor],
        wanted: Tuple[bool, bool, bool],
        late: bool,
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor], Optional[torch.Tensor]]:
        """The gradients by input, weight and bias that are `wanted`. `inputs` is what `forward`
        kept, or `x` the input itself; `late`: those by weight and bias may be filled later."""
        if not self._opened:
            self.open()
        watch = self.bus.overflow
        late = late and watch is None and self.bus.may_defer()
        with self.ledger.call(self.layer, "backward"):
            found: List[Optional[torch.Tensor]] = [None, None, None]
            if self._away is not None:
                found = list(
                    self._away.backward(grad, weight, bias, input_shape, inputs, x, wanted, late)
                )
            if wanted[0] and not self._is_away("input_grad"):
                found[0] = self._input_gradient(grad, weight, input_shape)
            if (wanted[1] or wanted[2]) and not self._is_away("weight_grad"):
                found[1], found[2] = self._weight_gradients(grad, weight, x, wanted)
        if watch is not None:
            self._show(grad, found)
        return found[0], found[1], found[2]

    def _input_gradient(
        self, grad: torch.Tensor, weight: torch.Tensor, shape: Sequence[int]
    ) -> torch.Tensor:
        placed = self.placement.input_grad
        if placed.backend != "torch":
            return self._whole[placed].input_grad(grad.detach(), weight.detach(), shape)
        assert self._input_grad is not None
        device = self._device(placed)
        grad, weight = (self._brought("input_grad", each, device) for each in (grad, weight))
        seed = self._seed(placed, self._input_grad)
        with self.ledger.stage(self.layer, "input_grad", "compute", stream=self._stream(device)):
            result = self._input_grad.input_grad(grad, weight, shape, seed)
        return self._brought("input_grad", result, self.home)

    def _weight_gradients(
        self,
        grad: torch.Tensor,
        weight: torch.Tensor,
        x: Optional[torch.Tensor],
        wanted: Tuple[bool, bool, bool],
    ) -> Tuple[Optional[torch.Tensor], Optional[torch.Tensor]]:
        placed, by_weight, by_bias = self.placement.weight_grad, None, None
        grad = grad.detach()
        if placed.backend != "torch":
            if wanted[1]:
                assert x is not None
                by_weight = self._whole[placed].weight_grad(grad, x.detach(), weight.shape)
            if wanted[2]:
                with self.ledger.stage(self.layer, "weight_grad", "compute"):
                    by_bias = bias_gradient(grad)
            return by_weight, by_bias
        assert self._weight_grad is not None
        device = self._device(placed)
        grad = self._brought("weight_grad", grad, device)
        if wanted[1]:
            assert x is not None
            x = self._brought("weight_grad", x.detach(), device)
            seed = self._seed(placed, self._weight_grad)
        with self.ledger.stage(self.layer, "weight_grad", "compute", stream=self._stream(device)):
            if wanted[1]:
                by_weight = self._weight_grad.weight_grad(grad, x, weight.shape, seed)
            if wanted[2]:
                by_bias = bias_gradient(grad)
        home = self.home
        return (
            None if by_weight is None else self._brought("weight_grad", by_weight, home),
            None if by_bias is None else self._brought("weight_grad", by_bias, home),
        )

    def _near(
        self,
        pass_: str,
        passes: Passes,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: Optional[torch.Tensor],
    ) -> torch.Tensor:
        """The forward pass where everything lives, or brought to the CPU and back."""
        device = self._device(self.placement.forward)
        x, weight = (self._brought(pass_, each, device) for each in (x, weight))
        added = None if bias is None else self._brought(pass_, bias, device)
        with self.ledger.stage(self.layer, pass_, "compute", stream=self._stream(device)):
            result = passes.forward(x, weight, added)
        return self._brought(pass_, result, self.home)

    def _brought(self, pass_: str, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The tensor on a device; a blocking copy, counted, where it is not there yet."""
        tensor = tensor.detach()
        if tensor.device.type == device.type:
            return tensor
        size = tensor.numel() * tensor.element_size()
        up = device.type != "cpu"
        with self.ledger.stage(
            self.layer, pass_, "to_device" if up else "from_device",
            to_device=size if up else 0, from_device=0 if up else size,
        ):  # fmt: skip
            return tensor.to(device)

    def _seed(self, placed: PassPlacement, passes: Passes) -> Seed:
        if placed.precision != "int8":
            return 0
        return self.bus.draws.next(on_device=seeds_on_device(passes))

    def _local(self, placed: PassPlacement) -> Optional[Passes]:
        """The passes of a product that does not go over the bus; None where it does, or where a
        whole backend has it."""
        if placed.backend != "torch" or (self.elsewhere == "cpu" and placed.device != "cpu"):
            return None
        return passes_for(placed.precision, self._device(placed), self.problem, torch.float32)

    def _is_away(self, pass_: str) -> bool:
        placed = self.placement.of(pass_)
        far = placed.device == "accelerator" and placed.backend == "torch"
        return far and self.elsewhere == "cpu"

    def _device(self, placed: PassPlacement) -> torch.device:
        return _CPU if placed.device == "cpu" else self.bus.device

    def _stream(self, device: torch.device) -> Any:
        return torch.cuda.current_stream(device) if device.type == "cuda" else None

    def _options(self, placed: PassPlacement) -> BackendOptions:
        dla = _DLA if placed.device == "dla" else None
        return BackendOptions(self.stride_bug, dla, self.bus.transfers)

    def _forms(self, pass_: str, tensor: str) -> Tuple[str, ...]:
        """What an operand is rounded to: on the wire where it goes over one, and in the product."""
        precision = self.placement.of(pass_).precision
        if self._is_away(pass_):
            return (self.bus.transfers.wire[tensor], precision)
        return (precision,)

    def _show(self, grad: torch.Tensor, found: Sequence[Optional[torch.Tensor]]) -> None:
        watch = self.bus.overflow
        if watch is None:
            return
        by_input, by_weight, _ = found
        for pass_, role, result in (
            ("input_grad", "grad_input", by_input),
            ("weight_grad", "weight_grad", by_weight),
        ):
            if result is not None:
                forms = self._forms(pass_, "grad_output")
                watch.see(self.layer, pass_, "grad_output", grad, forms)
                watch.see(self.layer, pass_, role, result)


def _plain(tensor: Optional[torch.Tensor]) -> Optional[torch.Tensor]:
    return None if tensor is None else tensor.detach()
