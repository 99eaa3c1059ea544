"""Whether a run without a record goes on, by locks that its processes hold: the kernel drops those
with the last process, however it ends.

The lab and its rows hold one in the folder that they write, a launcher the host's, which names the
run (`lock`). A run elsewhere has its locks there.
"""

from __future__ import annotations

import enum
from pathlib import Path

from narrowgauge.lock import is_held, last_holder
from narrowgauge.store import RunFolder
from narrowgauge_contract.codec import read_json
from narrowgauge_contract.errors import NarrowgaugeError

__all__ = ["Liveness", "liveness_of"]

#: What the lab holds while it writes there.
_LAB_LOCK = ".lock"
#: Executors whose labs hold their locks on this host.
_HERE = ("native", "docker")


class Liveness(enum.Enum):
    """How a run without a record stands, in words."""

    WATCHED = "running, its launcher is alive"
    RUNNING = "running"
    ALONE = "running, its launcher is gone"
    CUT_OFF = "no record: nothing of it runs any more"
    UNKNOWN = "no record yet: running, or its launcher is gone"

    @property
    def going(self) -> bool | None:
        """Whether it runs; None where that is not known."""
        if self is Liveness.UNKNOWN:
            return None
        return self is not Liveness.CUT_OFF


def liveness_of(folder: RunFolder, host_lock: Path) -> Liveness:
    """Ask for the locks of a run that has no record."""
    launcher = _launcher_lives(folder, host_lock)
    if launcher:
        return Liveness.WATCHED
    # Before its first event a lab may be about to take the lock, and would find it taken by us.
    lab = is_held(folder.out / _LAB_LOCK) if folder.events_path.is_file() else None
    if lab:
        return Liveness.RUNNING if launcher is None else Liveness.ALONE
    return Liveness.CUT_OFF if lab is False and _ran_here(folder) else Liveness.UNKNOWN


def _launcher_lives(folder: RunFolder, host_lock: Path) -> bool | None:
    """None where the host's lock does not speak of this run."""
    holder = last_holder(host_lock)
    if holder is None or Path(holder.folder) not in (folder.path.absolute(), folder.path.resolve()):
        return None
    return is_held(host_lock)


def _ran_here(folder: RunFolder) -> bool:
    """Whether a lock that nobody holds means that nobody runs."""
    if not folder.launched:
        return True
    try:
        handle = read_json(folder.handle_path)
    except (OSError, NarrowgaugeError):
        return False
    return isinstance(handle, dict) and handle.get("executor") in _HERE
