"""How OpenMP's threads wait for the next region: asleep, or spinning for a moment first.

GCC's OpenMP, torch's on Linux, reads these variables once, when it is loaded. A step by a placement
plan has some two hundred short regions, and to wake eight threads takes as long as many of them do;
threads that spin on a core which other work wants cost a loaded 2-core machine a factor of seven in
training.
"""

from __future__ import annotations

import os
from typing import Dict, Mapping

__all__ = ["processors", "waiting"]

_POLICY, _SPINS, _THREADS = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS"
#: A fraction of a millisecond: longer than what lies between two regions of a step.
_SPIN_COUNT = "100000"


def processors() -> int:
    """Those that this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on Linux
        return os.cpu_count() or 1


def waiting(env: Mapping[str, str], available: int) -> Dict[str, str]:
    """What to add to `env` so that threads sleep at once, but spin for a moment where so few were
    asked for (`OMP_NUM_THREADS`) that as many processors are left; nothing where it says itself how
    they wait."""
    if _POLICY in env or _SPINS in env:
        return {}
    added = {_POLICY: "PASSIVE"}
    asked = env.get(_THREADS, "")
    if asked.isdigit() and 1 < int(asked) <= available // 2:
        added[_SPINS] = _SPIN_COUNT
    return added
