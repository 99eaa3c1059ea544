"""Which target and which executor a run gets, and why. Pure: the host's facts are arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

from narrowgauge.machine import Host
from narrowgauge.targets import Accelerator, Target, target_named, version_tuple
from narrowgauge_contract.errors import ExperimentFileError, NotApplicableError
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "check_experiment",
    "choose_accelerator",
    "pick_target",
    "refusal",
    "torch_satisfies",
]

_OPERATORS: dict[str, Callable[[tuple[int, ...], tuple[int, ...]], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


def pick_target(targets: Mapping[str, Target], host: Host, on: str | None) -> Target:
    """The target that `--on` names, or the one for this host. Raises NotApplicableError.

    A host with a GPU never gets the CPU's target by itself: a slow result would look like a fast
    one.
    """
    if on is not None:
        target = target_named(targets, on)
        reason = refusal(target, host)
        if reason is not None:
            raise _not_here(target, reason, targets, host)
        return target
    if host.driver_problem is not None and not host.has_gpu:
        # Without this a broken driver would turn a GPU host into a CPU host without a word.
        raise NotApplicableError(
            f"the NVIDIA driver of this host does not answer: {host.driver_problem}",
            why="there are NVIDIA devices here, so a run on the CPU may not be what you want",
            next_step="mend the driver (after its update: reboot), or ask for the CPU: --on cpu",
        )
    fitting = [
        target
        for target in targets.values()
        if target.fits.needs_gpu == host.has_gpu and refusal(target, host) is None
    ]
    if not fitting:
        raise NotApplicableError(
            f"no target fits this host ({host.describe()})",
            why="\n".join(f"{t.name}: {refusal(t, host)}" for t in targets.values()),
            next_step=f"name one with --on ({', '.join(targets)}), or use --executor native",
        )
    return next((target for target in fitting if target.available), fitting[0])


def refusal(target: Target, host: Host) -> str | None:
    """Why `target` cannot work on `host`, or None where it can."""
    if host.architecture not in target.architectures:
        return (
            f"its image is for {', '.join(target.architectures)}, this host is {host.architecture}"
        )
    fits = target.fits
    if not fits.needs_gpu:
        return None
    if not host.has_gpu:
        return "it needs an NVIDIA GPU and this host shows none"
    if (fits.l4t_least is None) != (host.l4t is None):
        return "it is for a Jetson" if fits.l4t_least else "it is not for a Jetson"
    return _l4t_refusal(target, host) or _gpu_refusal(target, host)


def check_experiment(
    spec: ExperimentSpec, target: Target | None, targets: Mapping[str, Target], host: Host
) -> None:
    """Refuse an experiment that cannot work on `target` (None: natively). NotApplicableError.

    What the native environment's torch is, only the lab can say, and it does.
    """
    needs_gpu = spec.requires_accelerator
    if target is None:
        if needs_gpu and not host.has_gpu:
            raise NotApplicableError(
                f"'{spec.id}' needs an accelerator and this host shows none",
                next_step=_that_work(spec, targets),
            )
        return
    if needs_gpu and not target.fits.needs_gpu:
        raise NotApplicableError(
            f"'{spec.id}' needs an accelerator and target '{target.name}' gives none",
            next_step=_that_work(spec, targets),
        )
    if target.torch.version and not torch_satisfies(spec.requires_torch, target.torch.version):
        raise NotApplicableError(
            f"'{spec.id}' needs torch {spec.requires_torch}",
            why=f"target '{target.name}' has torch {target.torch.version}",
            next_step=_that_work(spec, targets),
        )


def torch_satisfies(specifier: str, version: str) -> bool:
    """Whether `version` meets `>=1.8,<3`. A local part (`+cu111`) does not count.

    Raises ExperimentFileError for a specifier of another form.
    """
    have = version_tuple(version.partition("+")[0])
    for part in filter(None, (word.strip() for word in specifier.split(","))):
        match = re.fullmatch(r"(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)", part)
        if match is None:
            raise ExperimentFileError(
                f"requires.torch '{specifier}' is not understood",
                next_step='for example: torch = ">=2.0,<3"',
            )
        wanted = version_tuple(match[2])
        width = max(len(have), len(wanted))
        if not _OPERATORS[match[1]](_padded(have, width), _padded(wanted, width)):
            return False
    return True


def choose_accelerator(target: Target, runtimes: Sequence[str], cdi: bool) -> Accelerator:
    """How this engine gives a container the GPU: the first of the target's ways that it offers.

    `runtimes` are the engine's runtimes. Where none is offered, the first way is tried all the
    same, and the engine's refusal is translated.
    """
    for accelerator in target.accelerators:
        offered = {
            Accelerator.NONE: True,
            Accelerator.DEVICE_REQUEST: "nvidia" in runtimes,
            Accelerator.NVIDIA_RUNTIME: "nvidia" in runtimes,
            Accelerator.CDI: cdi,
        }
        if offered[accelerator]:
            return accelerator
    return target.accelerators[0]


def _padded(version: tuple[int, ...], width: int) -> tuple[int, ...]:
    return version + (0,) * (width - len(version))


def _l4t_refusal(target: Target, host: Host) -> str | None:
    if host.l4t is None or target.fits.l4t_least is None:
        return None
    have = version_tuple(host.l4t)
    if have < version_tuple("35"):
        return f"L4T {host.l4t} is JetPack 4, whose Python 3.6 is at its end: flash JetPack 5.1"
    if have < version_tuple(target.fits.l4t_least):
        return f"it needs L4T {target.fits.l4t_least} or newer, this board has {host.l4t}"
    if target.fits.l4t_below and have >= version_tuple(target.fits.l4t_below):
        return f"it is for L4T below {target.fits.l4t_below}, this board has {host.l4t}"
    return None


def _gpu_refusal(target: Target, host: Host) -> str | None:
    """Bounds on capability and driver. A Jetson's NVML answers neither: nothing is refused."""
    fits = target.fits
    for gpu in host.gpus:
        have = version_tuple(gpu.capability)
        if fits.capability_least and have < version_tuple(fits.capability_least):
            return (
                f"{gpu.name} has compute capability {gpu.capability}, below {fits.capability_least}"
            )
        if fits.capability_most and have > version_tuple(fits.capability_most):
            return (
                f"{gpu.name} has compute capability {gpu.capability}, above {fits.capability_most}"
            )
    least = version_tuple(fits.driver_least or "0")
    if host.driver and version_tuple(host.driver) < least:
        return f"it needs driver {fits.driver_least} or newer, this host has {host.driver}"
    return None


def _not_here(
    target: Target, reason: str, targets: Mapping[str, Target], host: Host
) -> NotApplicableError:
    working = [t.name for t in targets.values() if refusal(t, host) is None]
    way_out = f"--on {' or '.join(working)}" if working else "--executor native"
    return NotApplicableError(
        f"target '{target.name}' cannot work on this host ({host.describe()})",
        why=reason,
        next_step=way_out,
    )


def working_targets(spec: ExperimentSpec, targets: Mapping[str, Target]) -> list[str]:
    """The targets whose torch and accelerator are enough; one whose base brings torch may be."""
    return [
        target.name
        for target in targets.values()
        if (target.fits.needs_gpu or not spec.requires_accelerator)
        and (
            target.torch.version is None
            or torch_satisfies(spec.requires_torch, target.torch.version)
        )
    ]


def _that_work(spec: ExperimentSpec, targets: Mapping[str, Target]) -> str:
    working = working_targets(spec, targets)
    return f"it works on: {', '.join(working)}" if working else "no target offers that"
