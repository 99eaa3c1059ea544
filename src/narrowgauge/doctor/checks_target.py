"""Which target this host gets, and whether the host is within each of its bounds."""

from __future__ import annotations

from narrowgauge.doctor.findings import Check, Finding, error, ok, skipped, warning
from narrowgauge.doctor.situation import Engine, Situation
from narrowgauge.fitting import Bound, Refusal, refusals
from narrowgauge.machine import ARCHITECTURES

__all__ = ["CHECKS"]

_NO_TARGET = "no target to hold this host against"


def _target(at: Situation) -> Finding:
    if at.refused is not None:
        return error(at.refused.text(), at.refused.next_step)
    assert at.target is not None
    return ok(f"{at.target.name}: {at.target.title}")


def _architecture(at: Situation) -> Finding:
    found = _refused(at, Bound.ARCHITECTURE)
    if found is not None:
        return error(found.reason, found.remedy or "--on cpu, or a target for this processor")
    if isinstance(at.engine, Engine):
        runs = ARCHITECTURES.get(at.engine.architecture, at.engine.architecture)
        if runs and runs != at.host.architecture:
            return error(
                f"the engine runs {runs} and this host is {at.host.architecture}",
                "use an engine of this host: docker context use default, and unset DOCKER_HOST",
            )
    return ok(at.host.architecture)


def _l4t(at: Situation) -> Finding:
    if at.host.l4t is None:
        return skipped("not a Jetson")
    found = _refused(at, Bound.L4T)
    if found is None:
        return ok(f"L4T {at.host.l4t}")
    assert at.target is not None
    # A board that something else keeps from the target may not even take the release it asks for.
    alone = len(refusals(at.target, at.host)) == 1
    other = f"no L4T is known that brings {at.target.name} to this board; --on cpu, or see `target`"
    return error(found.reason, found.remedy if alone and found.remedy else other)


def _capability(at: Situation) -> Finding:
    if at.target is None or not at.target.fits.needs_gpu:
        return skipped("the target uses no GPU" if at.target else _NO_TARGET)
    other_kind = _refused(at, Bound.GPU)
    if other_kind is not None:
        return skipped(f"{at.target.name} is not held against it: {other_kind.reason}")
    found = _refused(at, Bound.CAPABILITY)
    if found is not None:
        return error(found.reason, found.remedy or "--on cpu, or another target: see `target`")
    if not at.host.capabilities:
        return skipped("nothing here says the GPU's compute capability")
    named = ", ".join(f"{name} ({capability})" for name, capability in at.host.capabilities)
    return ok(f"{named} runs what is compiled for {', '.join(at.target.capabilities)}")


def _driver(at: Situation) -> Finding:
    if at.host.l4t is not None:
        return skipped("a Jetson's driver comes with its L4T")
    if at.host.driver_problem is not None:
        mend = "install or mend it (after its update: reboot); nvidia-smi must answer"
        if at.target is not None and not at.target.fits.needs_gpu:
            return warning(f"{at.host.driver_problem}; {at.target.name} runs without it", mend)
        return error(at.host.driver_problem, mend)
    if at.host.driver is None:
        return skipped("no NVIDIA driver")
    found = _refused(at, Bound.DRIVER)
    if found is not None:
        return error(found.reason, found.remedy)
    if at.target is None:
        return skipped(_NO_TARGET)
    least = at.target.fits.driver_least
    wanted = f", and {at.target.name} needs {least}" if least else ""
    return ok(f"driver {at.host.driver}{wanted}")


def _refused(at: Situation, bound: Bound) -> Refusal | None:
    if at.target is None:
        return None
    return next((each for each in refusals(at.target, at.host) if each.bound is bound), None)


CHECKS = (
    Check(
        "target",
        "a target fits this host, or the one named with --on does",
        "Each target is one image for one kind of hardware. A host with a GPU is never given the "
        "CPU's target by itself: a slow result would look like a fast one.",
        "Do what the remedy says, name another target with --on, or run natively with a Python "
        "whose torch works here: --executor native --lab-python PYTHON.",
        _target,
    ),
    Check(
        "architecture",
        "host, engine and target are of one processor architecture",
        "An image for another processor starts only under an emulator, whose speed is what would "
        "be measured. Narrowgauge refuses to start it.",
        "Use a target for this processor. Images for a Jetson are built on a PC and loaded there.",
        _architecture,
    ),
    Check(
        "l4t",
        "the Jetson's L4T release is in the target's range",
        "An image for a Jetson takes the driver's libraries from the host, so it works with the "
        "L4T it was made for and no other. JetPack 4 has Python 3.6, which is too old.",
        "Flash the JetPack that the remedy names, where it names one. AGX Xavier and Xavier NX "
        "take JetPack 5.1 at most, Orin takes 5.1 and 6; TX2, Nano and Thor take neither.",
        _l4t,
    ),
    Check(
        "capability",
        "what the kernels are compiled for runs on every GPU here",
        "The libraries hold machine code and no PTX. Code for 8.0 runs on 8.6, but none for 7.5 "
        "runs on 8.0; code for 9.0a runs on 9.0 only; and on a Jetson only its own runs. Without "
        "it, the first kernel of a run fails.",
        "Choose the target for this generation. For a GPU in its range that the list misses: add "
        "it to `capabilities` in docker/targets.toml and build again.",
        _capability,
    ),
    Check(
        "driver",
        "the NVIDIA driver answers and is new enough for the target",
        "A CUDA release needs a driver at least as new as itself: 470 for the CUDA 11.4 of "
        "`desktop`, 580 for the CUDA 13 of `desktop-next`. A driver that was updated and not yet "
        "loaded answers nothing until the next start.",
        "Update the driver with your distribution's packages and reboot; nvidia-smi must answer.",
        _driver,
    ),
)
