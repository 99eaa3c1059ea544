"""Checks every compiled operator against its reference, forward and backward.

`python -m narrowgauge_kernels.selfcheck` on any host; each image's `verify` calls it. An operator
is a function `f` of a module here whose reference `f_ref` is in that module's `__all__`, and
`f_example(generator)` gives it inputs. So a new operator is checked without being listed anywhere.
A module's `DEVICES` say where its operators are to be had; without, on all.
"""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Any, Callable, Dict, NamedTuple, Sequence, Tuple

__all__ = ["Operator", "check", "check_all", "find_operators"]

#: Of a result of order one in float32, after sums of a few dozen products; NaN fails too.
TOLERANCE = 1e-4


class Operator(NamedTuple):
    """An operator, its reference of equal signature, and what makes inputs for both."""

    name: str
    function: Callable[..., Any]
    reference: Callable[..., Any]
    example: Callable[..., Tuple[Any, ...]]
    devices: Tuple[str, ...] = ("cpu", "cuda")


def find_operators() -> Dict[str, Operator]:
    """Every operator of this package by name. AttributeError where one has no example."""
    found = {}
    for module in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if module.name in ("selfcheck", "build"):
            continue
        loaded = importlib.import_module(f"narrowgauge_kernels.{module.name}")
        for name in getattr(loaded, "__all__", ()):
            if name.endswith("_ref"):
                plain = name[: -len("_ref")]
                parts = (getattr(loaded, part) for part in (plain, name, f"{plain}_example"))
                devices = getattr(loaded, "DEVICES", ("cpu", "cuda"))
                found[plain] = Operator(plain, *parts, devices=devices)
    return found


def check(operator: Operator, device: str = "cpu") -> float:
    """The largest difference from the float64 reference, over the results and all gradients of the
    first.

    Raises ArithmeticError where it is above TOLERANCE or not a number.
    """
    import torch

    inputs = operator.example(torch.Generator().manual_seed(0))
    ours = [_moved(each, device) for each in inputs]
    exact = [_moved(each, "cpu", torch.float64) for each in inputs]
    results, wanted = _several(operator.function(*ours)), _several(operator.reference(*exact))
    grad = torch.randn(wanted[0].shape, generator=torch.Generator().manual_seed(1))
    got = [*results, *_gradients(results[0], ours, grad.to(device))]
    expected = [*wanted, *_gradients(wanted[0], exact, grad.double())]
    worst = 0.0
    for one, other in zip(got, expected):
        if one is None and other is None:
            continue  # neither differentiates by this input
        if one is None or other is None:
            raise ArithmeticError(
                f"{operator.name} on {device} lacks a gradient, or has one too many"
            )
        difference = (one.cpu().double() - other).abs().max().item()
        if not difference <= TOLERANCE:
            raise ArithmeticError(f"{operator.name} on {device} is off by {difference}")
        worst = max(worst, difference)
    return worst


def _moved(value: Any, device: str, dtype: Any = None) -> Any:
    """A tensor of floats ready to be differentiated by; another tensor moved; the rest as it is."""
    import torch

    if not isinstance(value, torch.Tensor):
        return value
    if not value.is_floating_point():
        return value.to(device)
    return value.detach().to(device=device, dtype=dtype or value.dtype).requires_grad_()


def _several(result: Any) -> Tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def _gradients(result: Any, inputs: Sequence[Any], grad: Any) -> Tuple[Any, ...]:
    """The gradients by the inputs that can have one; None where the result depends on none."""
    import torch

    wanted = [each for each in inputs if getattr(each, "requires_grad", False)]
    if not result.requires_grad:
        return (None,) * len(wanted)
    return torch.autograd.grad(result, wanted, grad, allow_unused=True)


def check_all() -> Dict[str, float]:
    """Check every operator on the CPU, and on the GPU where the kernels for one are here.

    The largest difference by `operator on device`; ArithmeticError at the first that is wrong.
    """
    import torch

    from narrowgauge_kernels.library import library_directory
    from narrowgauge_kernels.sources import Library, library_name

    devices = ["cpu"]
    cuda_built = (library_directory() / library_name(Library.CUDA)).is_file()
    if torch.cuda.is_available() and cuda_built:
        devices.append("cuda")
    return {
        f"{name} on {device}": check(operator, device)
        for name, operator in sorted(find_operators().items())
        for device in devices
        if device in operator.devices
    }


def main() -> int:
    """Print a line per check; 1 where an operator is wrong."""
    try:
        for name, worst in check_all().items():
            print(f"{name}: within {worst:.1e} of the reference")
    except ArithmeticError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
