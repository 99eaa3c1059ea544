"""Data sets on this host: fetched once, decoded to flat files, verified, then only mapped.

`ensure` is all that a run needs. Runs mount the folder read-only and never change it. The launcher
calls this package, and so does a container that has Python 3.8 and no launcher: it imports the
standard library and the contract only, Pillow in `png` alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Iterable, Mapping

from narrowgauge_contract.datasets import data_set

if TYPE_CHECKING:
    from narrowgauge_data.caller import Caller

__all__ = ["default_root", "ensure"]


def default_root(env: Mapping[str, str], home: Path) -> Path:
    """Where data lies unless `--data` says otherwise: the XDG data folder of `env` or `home`."""
    base = env.get("XDG_DATA_HOME", "")
    # The XDG specification asks that a relative path be ignored.
    parent = Path(base) if base.startswith("/") else home / ".local" / "share"
    return parent / "narrowgauge" / "data"


def ensure(names: Iterable[str], root: Path, caller: Caller) -> None:
    """See to it that each set lies whole and verified below `root`; fetch what is missing.

    A set that was verified before costs four `stat` calls. A file that is there and wrong is not
    replaced behind the user's back.

    Raises UnknownNameError, DataUnavailableError, DataCorruptError, DiskFullError.
    """
    from narrowgauge_data import local

    declared = [data_set(name) for name in names]
    missing = []
    for dataset in declared:
        with caller.naming_failures(dataset.name, root):
            report = local.check(dataset, root)
        report.raise_if_corrupt(caller.commands)
        if not report.complete:
            missing.append(dataset)
    if missing:
        from narrowgauge_data.fetch import fetch

        for dataset in missing:
            fetch(dataset, root, caller)
