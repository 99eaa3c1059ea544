"""Whether the kernel's out-of-memory killer was here: its count for this control group."""

from __future__ import annotations

from pathlib import Path
from typing import Iterator, Optional

__all__ = ["oom_kills"]

_KEY = "oom_kill"


def oom_kills(sysfs: Path = Path("/sys/fs/cgroup"), proc: Path = Path("/proc")) -> Optional[int]:
    """How many processes of this control group were killed for memory; None: it cannot be read.

    In a container the group is the root of the mount whatever /proc says, so that is asked too.
    """
    for path in _candidates(sysfs, proc):
        try:
            for line in path.read_text(encoding="utf-8").splitlines():
                name, _, value = line.partition(" ")
                if name == _KEY:
                    return int(value)
        except (OSError, ValueError):
            continue
    return None


def _candidates(sysfs: Path, proc: Path) -> Iterator[Path]:
    """The counters of cgroup v2 and v1, the group's own first."""
    try:
        lines = (proc / "self" / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    for line in lines:
        _, controllers, group = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            yield sysfs / group.lstrip("/") / "memory.events"
        elif "memory" in controllers.split(","):
            yield sysfs / "memory" / group.lstrip("/") / "memory.oom_control"
    yield sysfs / "memory.events"
    yield sysfs / "memory" / "memory.oom_control"
