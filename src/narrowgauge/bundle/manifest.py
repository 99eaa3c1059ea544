"""`bundle.json`: what a bundle holds, and what it leaves out and why."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from narrowgauge.bundle.entries import Entry
from narrowgauge_contract.record import GitFacts, ImageFacts

__all__ = ["Contents", "ImageIn", "Kind", "LeftOut", "Manifest", "RunIn", "joined"]

#: `public` may be put anywhere; `full` holds image layers that only some may be given.
Kind = str


@dataclass(frozen=True)
class LeftOut:
    """Something that a reader might look for in vain, and why it is not there."""

    what: str
    why: str


@dataclass(frozen=True)
class Contents:
    """Files of a bundle, and what belongs beside them but is not there."""

    entries: tuple[Entry, ...] = ()
    left_out: tuple[LeftOut, ...] = ()


@dataclass(frozen=True)
class RunIn:
    """A run in a bundle. `same_experiment`: the experiment's sources in the bundle are those that
    ran."""

    run_id: str
    experiment: str
    folder: str
    target: str
    status: str
    same_experiment: bool


@dataclass(frozen=True)
class ImageIn:
    """An image that runs used. `archive`: its file in the bundle, empty where it is left out.
    `sboms`: what the builder attested of its contents."""

    facts: ImageFacts
    archive: str = ""
    sboms: tuple[str, ...] = ()


@dataclass(frozen=True)
class Manifest:
    """What `bundle.json` says. `made_utc`: seconds since the epoch."""

    format: int
    kind: Kind
    made_utc: float
    version: str
    git: GitFacts | None
    runs: tuple[RunIn, ...]
    images: tuple[ImageIn, ...]
    left_out: tuple[LeftOut, ...]


def joined(parts: Iterable[Contents]) -> Contents:
    """All of them as one."""
    listed = tuple(parts)
    return Contents(
        tuple(entry for part in listed for entry in part.entries),
        tuple(left for part in listed for left in part.left_out),
    )
