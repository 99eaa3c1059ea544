"""Which image a run would take, asked of the engine in a few milliseconds.

The engine's client is an argument, so that this module imports no SDK.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from narrowgauge.images.content import (
    LABEL_BASE_DIGEST,
    LABEL_BASE_NAME,
    LABEL_CONTENT,
    LABEL_STANDIN,
    content_tag,
    image_name,
    standin_name,
)
from narrowgauge.targets import Target
from narrowgauge_contract.record import ImageFacts

__all__ = ["Inspect", "facts_of", "find_image", "labels_of"]

#: Gives what `docker image inspect NAME` says, or None where there is no such image.
Inspect = Callable[[str], Mapping[str, Any] | None]


def find_image(inspect: Inspect, root: Path, target: Target) -> ImageFacts | None:
    """The image that holds what the checkout `root` says now; None where it must be built.

    The image on the target's own base comes first. Where there is none, a stand-in counts that
    somebody built on purpose for this checkout (`images build --base`) and that is up to date.
    """
    name = image_name(target, content_tag(root, target))
    found = inspect(name)
    if found is not None:
        return facts_of(name, found)
    return _current_standin(inspect, root, target)


def facts_of(name: str, inspected: Mapping[str, Any]) -> ImageFacts:
    """What the record says of an image of ours; `digest` is the engine's image id."""
    labels = labels_of(inspected)
    return ImageFacts(
        name=name,
        digest=inspected["Id"],
        base=labels.get(LABEL_BASE_NAME, "unknown"),
        base_digest=labels.get(LABEL_BASE_DIGEST) or None,
        content_tag=labels.get(LABEL_CONTENT, ""),
        stand_in=_is_standin(labels),
    )


def labels_of(inspected: Mapping[str, Any]) -> Mapping[str, str]:
    """The labels of an inspected image; empty where it has none."""
    return (inspected.get("Config") or {}).get("Labels") or {}


def _is_standin(labels: Mapping[str, str]) -> bool:
    # An image that does not say what it stands on is not trusted to stand on the true base.
    return labels.get(LABEL_STANDIN, "true") != "false"


def _current_standin(inspect: Inspect, root: Path, target: Target) -> ImageFacts | None:
    found = inspect(standin_name(root, target))
    if found is None:
        return None
    labels = labels_of(found)
    if not _is_standin(labels) or LABEL_BASE_NAME not in labels:
        return None
    tag = content_tag(
        root,
        target,
        standin_base=labels[LABEL_BASE_NAME],
        standin_digest=labels.get(LABEL_BASE_DIGEST, ""),
    )
    if labels.get(LABEL_CONTENT) != tag:
        return None
    return facts_of(image_name(target, tag), found)
