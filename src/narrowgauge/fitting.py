"""Whether a target can work on a host, and if not, which of its bounds is in the way. Pure."""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import dataclass

from narrowgauge.machine import Host
from narrowgauge.targets import Target, version_tuple

__all__ = ["Bound", "Refusal", "nearest_miss", "refusal", "refusals", "remedies", "runs_on"]

#: What NVIDIA calls the software that brings an L4T release; for the advice to flash it.
_JETPACK = {35: "JetPack 5.1", 36: "JetPack 6", 38: "JetPack 7"}
#: Boards of L4T 32 (JetPack 4) are older than Orin, and Orin is all that L4T 36 is for.
_FIRST_OF_ORIN = 34
#: From here on a board may be newer than Orin (Thor), and then no older release is for it.
_FIRST_AFTER_ORIN = 37


class Bound(str, enum.Enum):
    """Which of a target's bounds a host is outside of, in the order they are told."""

    ARCHITECTURE = "architecture"
    GPU = "gpu"
    L4T = "l4t"
    CAPABILITY = "capability"
    DRIVER = "driver"


@dataclass(frozen=True)
class Refusal:
    """One bound that is in the way. `remedy` is empty where nothing on this host moves it."""

    bound: Bound
    reason: str
    remedy: str = ""


def refusal(target: Target, host: Host) -> Refusal | None:
    """The first bound of `target` that `host` is outside of; None where the target can work."""
    return next(iter(refusals(target, host)), None)


def refusals(target: Target, host: Host) -> tuple[Refusal, ...]:
    """Every bound of `target` that `host` is outside of."""
    found = [_architecture(target, host)]
    if target.fits.needs_gpu:
        kind = _kind(target, host)
        found.append(kind)
        if kind is None:
            found += [_l4t(target, host), _capability(target, host), _driver(target, host)]
    return tuple(each for each in found if each is not None)


def remedies(targets: Mapping[str, Target], host: Host) -> tuple[str, ...]:
    """What would make a target work here, for each that only one thing keeps from it."""
    found = []
    for target in targets.values():
        bounds = refusals(target, host)
        if len(bounds) == 1 and bounds[0].remedy:
            found.append(f"{bounds[0].remedy}: target '{target.name}' then works")
    return tuple(found)


def nearest_miss(targets: Mapping[str, Target], host: Host) -> Target | None:
    """The accelerator's target that the least keeps from working here; None without a GPU.

    One for a Jetson is never near to a host that is none, nor the other way round.
    """
    if not host.has_gpu:
        return None
    missed = [t for t in targets.values() if t.fits.needs_gpu and _kind(t, host) is None]

    def distance(target: Target) -> tuple[int, bool]:
        bounds = refusals(target, host)
        return len(bounds), not any(bound.remedy for bound in bounds)

    return min(missed, key=distance, default=None)


def runs_on(compiled: str, capability: str, *, tegra: bool) -> bool:
    """Whether a kernel compiled for `compiled` (`8.6`, `9.0a`) runs on a GPU of `capability`.

    Machine code of x.y runs on x.z with z >= y; that of an architecture with a suffix, and any on
    a Jetson (NVIDIA promises nothing there), on exactly its own. Our libraries hold no PTX, which
    the driver could translate for a newer GPU.
    """
    have, made = version_tuple(capability), version_tuple(compiled)
    if tegra or compiled[-1].isalpha():
        return have == made
    return have[0] == made[0] and have[1] >= made[1]


def _architecture(target: Target, host: Host) -> Refusal | None:
    if host.architecture in target.architectures:
        return None
    wanted = ", ".join(target.architectures)
    return Refusal(
        Bound.ARCHITECTURE, f"its image is for {wanted}, this host is {host.architecture}"
    )


def _kind(target: Target, host: Host) -> Refusal | None:
    if host.broken_driver and target.fits.l4t_least is None:
        return Refusal(
            Bound.GPU,
            f"it needs an NVIDIA GPU, and the driver here does not answer: {host.driver_problem}",
            "mend the NVIDIA driver (after its update: reboot)",
        )
    if not host.has_gpu and not host.broken_driver:
        return Refusal(Bound.GPU, "it needs an NVIDIA GPU and this host shows none")
    if (target.fits.l4t_least is None) != (host.l4t is None):
        reason = "it is for a Jetson" if target.fits.l4t_least else "it is not for a Jetson"
        return Refusal(Bound.GPU, reason)
    return None


def _l4t(target: Target, host: Host) -> Refusal | None:
    fits = target.fits
    if host.l4t is None or fits.l4t_least is None:
        return None
    have, least = version_tuple(host.l4t), version_tuple(fits.l4t_least)
    flash = f"flash {_JETPACK.get(least[0], 'the JetPack')} (L4T {least[0]})"
    if have < least:
        reason = f"it needs L4T {fits.l4t_least} or newer, this board has {host.l4t}"
        if have[0] < _FIRST_OF_ORIN:
            reason += " (JetPack 4, whose Python 3.6 is at its end)"
            flash = "" if least[0] > 35 else flash
        return Refusal(Bound.L4T, reason, flash)
    if fits.l4t_below and have >= version_tuple(fits.l4t_below):
        reason = (
            f"it is for L4T from {fits.l4t_least} to below {fits.l4t_below},"
            f" this board has {host.l4t}"
        )
        older = have[0] < _FIRST_AFTER_ORIN or bool(host.capabilities)
        return Refusal(Bound.L4T, reason, flash if older else "")
    return None


def _capability(target: Target, host: Host) -> Refusal | None:
    """The first GPU out of range or not compiled for: a container gets all of them."""
    fits = target.fits
    for name, capability in host.capabilities:
        have = version_tuple(capability)
        reason = remedy = ""
        if fits.capability_least and have < version_tuple(fits.capability_least):
            reason = f"{name} has compute capability {capability}, below {fits.capability_least}"
        elif fits.capability_most and have > version_tuple(fits.capability_most):
            reason = f"{name} has compute capability {capability}, above {fits.capability_most}"
            if target.cuda:
                reason += f": its CUDA {target.cuda} does not know that GPU"
        elif not any(
            runs_on(each, capability, tegra=host.l4t is not None) for each in target.capabilities
        ):
            reason = (
                f"{name} has compute capability {capability}, and its kernels are compiled for"
                f" {', '.join(target.capabilities)}, none of which runs there"
            )
            remedy = (
                f'add "{capability}" to the capabilities of [{target.name}] in'
                " docker/targets.toml and build the image again"
            )
        if reason:
            others = len(host.capabilities) > 1
            reason += "; a container gets all GPUs of a host" if others else ""
            return Refusal(Bound.CAPABILITY, reason, remedy)
    return None


def _driver(target: Target, host: Host) -> Refusal | None:
    """The bound on the driver. A Jetson's comes with L4T, and NVML may not tell it."""
    least = target.fits.driver_least
    if least is None or host.driver is None or version_tuple(host.driver) >= version_tuple(least):
        return None
    number = re.sub(r"(\.0+)+$", "", least)
    return Refusal(
        Bound.DRIVER,
        f"it needs driver {number} or newer, this host has {host.driver}",
        f"update the NVIDIA driver to {number} or newer",
    )
