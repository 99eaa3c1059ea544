"""Which target and which executor a run gets, and why. Pure: the host's facts are arguments."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence

from narrowgauge.fitting import Refusal, refusal, refusals, remedies
from narrowgauge.machine import Host
from narrowgauge.targets import Accelerator, Target, target_named, version_tuple
from narrowgauge_contract.errors import ExperimentFileError, NotApplicableError
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "check_experiment",
    "choose_accelerator",
    "pick_target",
    "torch_satisfies",
    "working_targets",
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
    """The target that `--on` names, or the first that fits this host. Raises NotApplicableError.

    A host with a GPU never gets the CPU's target by itself: a slow result would look like a fast
    one.
    """
    if on is not None:
        target = target_named(targets, on)
        found = refusal(target, host)
        if found is not None:
            raise _not_here(target, found, targets, host)
        return target
    if host.broken_driver:
        # Without this a broken driver would turn a GPU host into a CPU host without a word.
        raise NotApplicableError(
            f"the NVIDIA driver of this host does not answer: {host.driver_problem}",
            why="there are NVIDIA devices here, so a run on the CPU may not be what you want",
            next_step="mend the driver (after its update: reboot), or ask for the CPU: --on cpu",
        )
    for target in targets.values():
        if target.fits.needs_gpu == host.has_gpu and refusal(target, host) is None:
            return target
    raise NotApplicableError(
        f"no target fits this host ({host.describe()})",
        why="\n".join(_reasons(targets, host)),
        next_step=_ways_out(targets, host),
    )


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


def _reasons(targets: Mapping[str, Target], host: Host) -> list[str]:
    """Why no target was taken: one line for each. One that could work is for the CPU."""
    told = "it uses the CPU only, which a host with a GPU gets when asked for"
    found = {name: refusals(target, host) for name, target in targets.items()}
    return [f"{name}: {'; '.join(r.reason for r in all_) or told}" for name, all_ in found.items()]


def _ways_out(targets: Mapping[str, Target], host: Host) -> str:
    ways = list(remedies(targets, host))
    ways += [f"--on {name}" for name in _working(targets, host)]
    ways.append("--executor native --lab-python PYTHON, one whose torch works here")
    return "\nor ".join(ways)


def _not_here(
    target: Target, found: Refusal, targets: Mapping[str, Target], host: Host
) -> NotApplicableError:
    ways = [found.remedy] if found.remedy and len(refusals(target, host)) == 1 else []
    working = _working(targets, host)
    ways.append(f"--on {' or '.join(working)}" if working else "--executor native")
    return NotApplicableError(
        f"target '{target.name}' cannot work on this host ({host.describe()})",
        why="\n".join(each.reason for each in refusals(target, host)),
        next_step="; or ".join(ways),
    )


def _working(targets: Mapping[str, Target], host: Host) -> list[str]:
    """The targets that can work here; the CPU's last, since it is the slower way out."""
    found = [target for target in targets.values() if refusal(target, host) is None]
    return [target.name for target in sorted(found, key=lambda target: not target.fits.needs_gpu)]


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
