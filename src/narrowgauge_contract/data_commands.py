"""The command lines that a message about data quotes: they differ by where the message is read.

Launcher, lab and the fetching code all tell a user to fetch a set, and a user who only has a
container cannot type what a user of the launcher types.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Mapping

__all__ = ["CONTAINER", "LAUNCHER", "TARGET_VARIABLE", "DataCommands", "commands_in", "module_at"]

#: Every image of ours sets it to the name of its target.
TARGET_VARIABLE = "NARROWGAUGE_TARGET"


@dataclass(frozen=True)
class DataCommands:
    """`{}` stands for the set's name in `fetch`, `take`, `repair`.

    `take`: takes files placed by hand; `elsewhere`: how another data folder is chosen; `folder`:
    what to add to the path of the data folder as this process sees it.
    """

    fetch: str
    take: str
    repair: str
    elsewhere: str
    folder: str = ""


LAUNCHER = DataCommands(
    fetch="narrowgauge data fetch {}",
    take="narrowgauge data fetch {} --from FOLDER",
    repair="narrowgauge data verify {} --repair",
    elsewhere="--data DIR",
)
#: Typed on the host, in the checkout. Fetching puts a new set in the place of a corrupt one.
CONTAINER = DataCommands(
    fetch="docker compose run --rm data-fetch {}",
    take='docker compose run --rm --volume "$PWD/FOLDER:/given:ro" data-fetch {} --from /given',
    repair="docker compose run --rm data-fetch {}",
    elsewhere="NARROWGAUGE_DATA=DIR in .env",
    folder=" (in the container; on the host NARROWGAUGE_DATA of .env)",
)


def module_at(root: Path) -> DataCommands:
    """The commands of a host that has Python and a copy of `src`, and keeps its data in `root`."""
    place = shlex.quote(str(root)).replace("{", "{{").replace("}", "}}")
    return DataCommands(
        fetch=f"python3 -m narrowgauge_data fetch {{}} --data {place}",
        take=f"python3 -m narrowgauge_data fetch {{}} --data {place} --from FOLDER",
        repair=f"python3 -m narrowgauge_data verify {{}} --data {place} --repair",
        elsewhere="--data DIR",
    )


def commands_in(env: Mapping[str, str], otherwise: DataCommands) -> DataCommands:
    """Those for a container where `env` is that of one, else `otherwise`."""
    return CONTAINER if env.get(TARGET_VARIABLE) else otherwise
