"""Who asks for data: where progress is told, the environment, and what to type next."""

from __future__ import annotations

import errno
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Callable, Iterator, Mapping

from narrowgauge_contract.data_commands import DataCommands
from narrowgauge_contract.errors import DataUnavailableError, DiskFullError

__all__ = ["Caller", "Say"]

Say = Callable[[str], None]
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Caller:
    """`say` is told what happens, a line at a time; `env` is the process's environment; `commands`
    are quoted in errors."""

    say: Say
    env: Mapping[str, str]
    commands: DataCommands

    def full(self, name: str, root: Path, why: str = "") -> DiskFullError:
        """The error for a set that has no room below `root`."""
        return DiskFullError(
            f"no room left for {name}",
            why=why or f"the file system of {root} is full, or a quota is reached",
            next_step=f"free some space, or choose another place: {self.commands.elsewhere}",
        )

    @contextmanager
    def naming_failures(self, name: str, root: Path) -> Iterator[None]:
        """What the file system says of the set `name` below `root`, as an error of ours:
        DiskFullError or DataUnavailableError."""
        try:
            yield
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise self.full(name, root) from error
            raise DataUnavailableError(
                f"cannot use the folder {root}{self.commands.folder}",
                why=f"{error.strerror or error}: {error.filename or root}",
                next_step="make it readable and writable for your user, or choose another place: "
                f"{self.commands.elsewhere}",
            ) from error
