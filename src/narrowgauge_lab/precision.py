"""Training precisions: what may run here, and loss scaling for float16.

What really ran, `measure.probe` finds out.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ContextManager, Dict, List

import torch

from narrowgauge_contract.errors import NotApplicableError, UnknownNameError
from narrowgauge_lab import tf32_flags, torch_compat

__all__ = ["PRECISIONS", "LossScale", "Mode", "available", "enter"]

#: The dtype that convolutions and matrix products of each precision give.
PRECISIONS: Dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclasses.dataclass(frozen=True)
class Mode:
    """A precision in force on a device. `autocast()` wraps forward passes, not backward ones."""

    name: str
    device: torch.device

    @property
    def dtype(self) -> torch.dtype:
        return PRECISIONS[self.name]

    @property
    def scales_loss(self) -> bool:
        """Only float16 has a range too short for gradients."""
        return self.dtype == torch.float16

    def autocast(self) -> ContextManager[Any]:
        return torch_compat.autocast(self.device, self.dtype)


def available(device: torch.device) -> List[str]:
    """The precisions that work on `device` with this torch."""
    names = ["fp32"]
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        names.append("tf32")
    reduced = torch_compat.autocast_dtypes(device)
    return names + [name for name in ("bf16", "fp16") if PRECISIONS[name] in reduced]


def enter(name: str, device: torch.device) -> Mode:
    """Check that `name` works here and set the math mode of this process to it.

    fp32 means IEEE float32: TF32 is switched off. Raises UnknownNameError or NotApplicableError.
    """
    if name not in PRECISIONS:
        raise UnknownNameError("precision", name, PRECISIONS)
    works = available(device)
    if name not in works:
        raise NotApplicableError(
            f"precision {name} does not work on {device.type} with torch {torch.__version__}",
            why=_why_not(name, device),
            next_step="works here: " + ", ".join(f"-p precision={known}" for known in works),
        )
    tf32_flags.allow_tf32(name == "tf32")
    return Mode(name, device)


def _why_not(name: str, device: torch.device) -> str:
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return f"this GPU has compute capability {major}.{minor}; {name} needs 8.0" + (
            " and torch 1.10" if name == "bf16" else ""
        )
    if name == "tf32":
        return "TF32 is a mode of NVIDIA's tensor cores"
    return "CPU autocast to bf16 needs torch 1.10, to fp16 a torch that offers it (2.13 does)"


class LossScale:
    """Dynamic loss scaling whose whole state is on the device, so that a captured step has it too.

    The rule is torch's GradScaler's: halve after a step with a gradient that is not finite, double
    after `interval` good steps in a row. It works on CPU with torch 1.8, where GradScaler does not.
    """

    def __init__(
        self, device: torch.device, initial: float = 65536.0, interval: int = 2000
    ) -> None:
        self.interval = interval
        self.scale = torch.tensor(float(initial), device=device)
        self.good_steps = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)

    def apply(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss to differentiate."""
        return loss * self.scale

    def unscale(self, gradient: torch.Tensor) -> torch.Tensor:
        """Divide `gradient` by the scale in place; True (a device scalar) where it overflowed."""
        gradient.div_(self.scale)
        return torch.isfinite(gradient).all().logical_not()

    def update(self, overflowed: torch.Tensor) -> None:
        """Set the scale for the next step."""
        streak = torch.where(overflowed, torch.zeros_like(self.good_steps), self.good_steps + 1)
        grow = streak >= self.interval
        doubled = self.scale * 2
        # A scale of infinity would turn every later gradient into NaN.
        raised = torch.where(grow & torch.isfinite(doubled), doubled, self.scale)
        self.scale.copy_(torch.where(overflowed, self.scale * 0.5, raised))
        self.good_steps.copy_(torch.where(grow, torch.zeros_like(streak), streak))
        self.skipped.add_(overflowed)

    def state_dict(self) -> Dict[str, torch.Tensor]:
        return {"scale": self.scale, "good_steps": self.good_steps, "skipped": self.skipped}

    def load_state_dict(self, saved: Dict[str, torch.Tensor]) -> None:
        for name, tensor in self.state_dict().items():
            tensor.copy_(saved[name])
