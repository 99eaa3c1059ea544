"""What this host is, as far as it decides which claims can be held against it."""

from __future__ import annotations

from narrowgauge.errors import NotApplicableError
from narrowgauge.launch import World
from narrowgauge.machine import machine_facts
from narrowgauge.plan import NATIVE
from narrowgauge.reproduce.planning import Here
from narrowgauge.selection import pick_target
from narrowgauge.targets import load_targets

__all__ = ["here_of"]


def here_of(world: World, *, on: str | None, executor: str) -> Here:
    """The target that runs are going to have, and the names of this host's devices.

    Where `auto` ends up native although a target fits, claims of that target are run all the same
    and judged by what their records say. Raises NotApplicableError for an `--on` that cannot work.
    """
    machine = machine_facts(docker=None)
    names = [machine.cpu, machine.system, *(gpu.name for gpu in world.host.gpus)]
    if world.host.soc is not None:
        names.append(world.host.soc)
    target = NATIVE
    if executor != NATIVE or on is not None:
        try:
            target = pick_target(load_targets(world.checkout.targets_file), world.host, on).name
        except NotApplicableError:
            if on is not None:
                raise
    return Here(target, tuple(filter(None, names)), world.host.has_gpu)
