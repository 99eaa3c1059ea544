"""Each step of a network of our GPU engine by itself, held against the reference."""

from __future__ import annotations

import dataclasses
from typing import List, Optional, Tuple

import torch

from narrowgauge_lab.engines.own.gpu.candidate import Candidate, Launch
from narrowgauge_lab.engines.own.gpu.formats import NumberFormat
from narrowgauge_lab.engines.own.gpu.launches import Launches
from narrowgauge_lab.engines.own.gpu.lowered import Lowered
from narrowgauge_lab.engines.own.gpu.reference import Reference
from narrowgauge_lab.engines.own.gpu.steps import ConcatStep, PoolStep, Step, sources

__all__ = ["NORMS", "Bench", "Way", "distance"]

#: How far a step's values may be from the reference's, in norm: what sums in another order, and in
#: what the tensor cores keep, make of the last place of the format.
NORMS = {"int8": 3e-3, "fp8": 4e-2, "fp32": 2e-5, "tf32": 2e-3, "fp16": 2e-3, "bf16": 1e-2}


@dataclasses.dataclass(frozen=True)
class Way:
    """One candidate of one of a step's launches."""

    step: Step
    launches: Tuple[Launch, ...]
    launch: Launch
    candidate: Candidate

    def __str__(self) -> str:
        return f"{self.launch.layer} ({type(self.step).__name__}) by {self.candidate.kernel}"

    def start(self) -> None:
        """The step, with this candidate for its launch."""
        for each in self.launches:
            (self.candidate if each is self.launch else each.own[0]).start()


class Bench:
    """A network's steps, each given what the reference gives it, in memory where nothing else is.

    `x`: images on the CPU. What was not given to a step is NaN (in int8, which has none, -128):
    a kernel that reads it cannot be right, and one that writes there is found out.
    """

    def __init__(self, network: Lowered, x: torch.Tensor) -> None:
        self.network, self.form, self.plan = network, network.form, network.plan
        self.reference = Reference(network)
        self.logits = self.reference(x)
        self.memory = network.memory(x.shape[0])
        self.makes = Launches(
            self.memory, network.modules, network.weights, network.affines, network.scales
        )
        self.read = self.makes.read(x.to(network.device))

    def ways(self, step: Step, *, libraries: bool = False) -> List[Way]:
        """All ways to run a step, those of libraries among them where they are asked for."""
        launches = tuple(self.makes.of(step))
        return [
            Way(step, launches, launch, candidate)
            for launch in launches
            for candidate in (*launch.own, *(launch.others(2.0) if libraries else ()))
        ]

    def check_images(self) -> None:
        """The kernel that reads the images: their values, and zeros around them."""
        self._poison()
        self.read()
        name = self.plan.source
        found = self.memory.view(name).cpu()
        _check(found, self.reference.stored[name], self.form, exact=not self.form.scaled)
        self.memory.view(name).copy_(torch.zeros(1).to(self.form.dtype))
        assert not self._bytes(self.memory.buffers[name]).any(), "no zeros around the images"

    def check(self, way: Way) -> torch.Tensor:
        """Run a step and compare; what it wrote. AssertionError says what is wrong."""
        final = self.plan.is_result(way.step)
        found = self.run(way)
        if final:
            _check(found, self.logits, None, exact=False, bound=self._final())
        else:
            exact = isinstance(way.step, ConcatStep) or (
                isinstance(way.step, PoolStep) and way.step.kind == "max"
            )
            _check(found, self.reference.stored[way.step.output], self.form, exact=exact)
        self._check_rest(way)
        return found

    def run(self, way: Way) -> torch.Tensor:
        """What a step writes, on the CPU, after nothing but what it reads was there."""
        self._poison()
        self.read()
        for name in sources(way.step):
            if name != self.plan.source:
                self.memory.view(name).copy_(self.reference.stored[name])
        way.start()
        if self.plan.is_result(way.step):
            return self.memory.result().cpu()
        return self.memory.view(way.step.output).cpu()

    def _final(self) -> float:
        """float32, whatever the format: what is left is the order of the sums."""
        return {"tf32": 2e-3, "int8": 1e-5, "fp8": 2e-3}.get(self.form.name, 2e-5)

    def _poison(self) -> None:
        for buffer in self.memory.buffers.values():
            self._bytes(buffer).copy_(self._pattern(buffer))
        self.memory.result().fill_(float("nan"))

    def _check_rest(self, way: Way) -> None:
        """Nothing but the step's result was written."""
        names = [*sources(way.step)]
        if not self.plan.is_result(way.step):
            names.append(way.step.output)
        poison = self._pattern(self.memory.buffers[self.plan.source])[: self.form.width]
        for name in names:
            self.memory.view(name).copy_(poison.view(self.form.dtype))
        for name, buffer in self.memory.buffers.items():
            if name != self.plan.source:
                assert torch.equal(self._bytes(buffer), self._pattern(buffer)), f"wrote to {name}"

    def _pattern(self, buffer: torch.Tensor) -> torch.Tensor:
        """As many bytes as `buffer` has, of a value that no kernel gives."""
        if self.form.dtype == torch.int8:
            one = torch.full((1,), -128, dtype=torch.int8, device=buffer.device)
        else:
            one = torch.full((1,), float("nan"), device=buffer.device).to(self.form.dtype)
        return self._bytes(one).repeat(buffer.numel())

    @staticmethod
    def _bytes(buffer: torch.Tensor) -> torch.Tensor:
        return buffer.view(torch.uint8)


def _check(
    found: torch.Tensor,
    expected: torch.Tensor,
    form: Optional[NumberFormat],
    *,
    exact: bool,
    bound: float = 0.0,
) -> None:
    """`form` None: float32 results, which have to be within `bound` in norm."""
    assert found.shape == expected.shape
    mine, right = found.double(), expected.double()
    missing = torch.isnan(right) & ~torch.isnan(mine)
    assert not missing.any(), f"{int(missing.sum())} values should be NaN"
    # A NaN spreads within its image where a kernel reads it for a weight of zero, and no further.
    images = torch.isnan(right.flatten(1)).any(1)
    strange = torch.isnan(mine.flatten(1)).any(1) & ~images
    assert not strange.any(), f"NaN in images {strange.nonzero().flatten().tolist()}"
    known = ~torch.isnan(mine)
    mine, right = mine[known], right[known]
    if exact:
        assert torch.equal(mine, right), f"{int((mine != right).sum())} values differ"
    elif form is not None and form.name == "int8":
        difference = (mine - right).abs()
        assert float(difference.max()) <= 1, f"off by {float(difference.max())} units"
        assert float((difference > 0).double().mean()) <= 0.01
    else:
        allowed = bound or NORMS[form.name]  # type: ignore[union-attr]
        apart = distance(mine, right)
        assert apart <= allowed, f"{apart:.1e} from the reference"


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """In norm, of the whole."""
    expected = expected.double()
    return float((found.cpu().double() - expected).norm() / expected.norm())
