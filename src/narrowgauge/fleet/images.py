"""The one image that all boards of a target run, and how each board comes to have it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import (
    DockerPermission,
    DockerUnavailable,
    NarrowgaugeError,
    NotApplicableError,
    ToolchainMissing,
)
from narrowgauge.fleet.facts import BoardState
from narrowgauge.fleet.link import Link
from narrowgauge.fleet.sending import board_image, is_same, require_same, send_image
from narrowgauge.images.content import content_tag, image_name, standin_name
from narrowgauge.targets import Target
from narrowgauge_contract.record import ImageFacts

if TYPE_CHECKING:
    from narrowgauge.launch import World

__all__ = ["Chosen", "Images", "bring_image", "names_of"]

Inspected = Mapping[str, Any]


@dataclass(frozen=True)
class Chosen:
    """An image as an engine inspects it, and what the records say of it."""

    inspected: Inspected
    facts: ImageFacts


def names_of(root: Path, targets: Sequence[Target]) -> tuple[str, ...]:
    """By which names a board may have an image of these targets, for this checkout."""
    sums: dict[Path, str] = {}
    names: list[str] = []
    for target in targets:
        try:
            names.append(image_name(target, content_tag(root, target, sums=sums)))
        except NarrowgaugeError:
            continue  # not rendered; said where this target is the one that is needed
        names.append(standin_name(root, target))
    return tuple(names)


class Images:
    """This host's engine, asked once for each target; `None` is said once, too."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._engine: Callable[[str], Inspected | None] | None = None
        self._asked = False
        self._guard = threading.Lock()

    def choose(self, target: Target, boards: Sequence[tuple[Link, BoardState]]) -> Chosen:
        """This host's image, or where it has none what was built on one of the `boards`, or else
        built here now. Raises NotApplicableError where none of these can be."""
        from narrowgauge.images.inspect import find_image

        here = self.engine()
        # unverified: images built on a board by DOCKER_HOST | no arm64 board | build one, and run
        asked = [] if here is None else [here]
        for inspect in (*asked, *(_on_board(link, state) for link, state in boards)):
            facts = find_image(inspect, self._world.checkout.root, target)
            if facts is not None:
                # A stand-in is found by another name than its own.
                return Chosen(inspect(facts.digest) or {}, facts)
        if here is None:
            raise NotApplicableError(
                f"there is no image of target '{target.name}', here or on the boards",
                why="no Docker engine answers here, so none can be built or sent",
                next_step=f"build it on the board: DOCKER_HOST=ssh://{boards[0][0].board.login}"
                f" narrowgauge images build {target.name}",
            )
        from narrowgauge.images.build import ensure_image

        facts = ensure_image(self._world.checkout.root, target, self._world.env, self._world.say)
        return Chosen(here(facts.digest) or {}, facts)

    def engine(self) -> Callable[[str], Inspected | None] | None:
        """What asks this host's engine for an image; None where there is none."""
        with self._guard:
            if not self._asked:
                self._asked = True
                try:
                    self._engine = _local_engine(self._world)
                except (DockerUnavailable, DockerPermission, ToolchainMissing) as error:
                    self._world.say(f"no image can be sent from here: {error.what}")
            return self._engine


def bring_image(world: World, link: Link, state: BoardState, chosen: Chosen) -> str:
    """The image's id on the board, which has it afterwards: one that is there is never sent."""
    from narrowgauge.images.client import find_client

    wanted, name = chosen.inspected, chosen.facts.name
    inspect = _on_board(link, state)
    there = inspect(name)
    if there is not None:
        return require_same(link, there, wanted, name)
    tags = wanted.get("RepoTags") or [name]
    # A stand-in is here by another name than the one that its content gives it.
    sent = name if name in tags else str(tags[0])
    for other in (sent, str(wanted["Id"])):
        there = None if other == name else inspect(other)
        if there is not None and is_same(there, wanted):
            return str(there["Id"])
    docker = find_client(None, world.env).executable
    return send_image(link, wanted, sent, docker, world.env, world.say)


def _on_board(link: Link, state: BoardState) -> Callable[[str], Inspected | None]:
    """What the board said of images by the way, and for others another question."""
    ids = {str(image["Id"]): image for image in state.images.values() if image is not None}

    def inspect(name: str) -> Inspected | None:
        if name in state.images:
            return state.images[name]
        return ids.get(name) or board_image(link, name)

    return inspect


def _local_engine(world: World) -> Callable[[str], Inspected | None]:
    from narrowgauge.executors.docker_client import connect, inspect_image

    client = connect(world.env)
    return lambda name: inspect_image(client, name)
