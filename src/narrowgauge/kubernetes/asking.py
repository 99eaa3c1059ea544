"""What a user asks of Kubernetes, as `NAME=VALUE` words. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from narrowgauge.errors import BadValueError, UnknownNameError, UsageError

__all__ = ["KubernetesAsk", "parse_ask"]

_DIGEST = re.compile(r"^[\w./:-]+@sha256:[0-9a-f]{64}$")
_QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGT]i?)?$")
#: A DNS label, which names of namespaces and claims are made of.
_NAME = re.compile(r"^[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?$")


@dataclass(frozen=True)
class KubernetesAsk:
    """`image`: by digest, as the cluster pulls it. `results` and `data`: volume claims that hold
    them. `nodes`: machines that train one model; `gpus` (None: one where the target has some),
    `cpu`, `memory`: of each. `selector`: labels (`key=value;…`) beside the target's. `hours`: after
    which a run is ended.
    """

    image: str
    results: str
    data: str = ""
    namespace: str = "default"
    nodes: int = 1
    gpus: int | None = None
    cpu: str = "4"
    memory: str = "16Gi"
    selector: str = ""
    hours: int = 24


def parse_ask(words: Sequence[str]) -> KubernetesAsk:
    """Raises UnknownNameError with the nearest name, UsageError for what is missing or given twice,
    BadValueError."""
    known = [each.name for each in fields(KubernetesAsk)]
    values: dict[str, Any] = {}
    for word in words:
        name, _, text = (part.strip() for part in word.partition("="))
        if name not in known:
            raise UnknownNameError("Kubernetes setting", name, known)
        if name in values:
            raise UsageError(f"the Kubernetes setting '{name}' is given twice")
        values[name] = _checked(name, text)
    for name, what in (("image", "NAME@sha256:…"), ("results", "CLAIM")):
        if name not in values:
            raise UsageError(
                f"Kubernetes needs to know the {name}",
                why="it pulls an image by its digest from a registry of yours, and results go to a"
                " volume claim",
                next_step=f"--kubernetes {name}={what}",
            )
    return KubernetesAsk(**values)


def _checked(name: str, text: str) -> Any:
    if name in ("nodes", "gpus", "hours"):
        if not text.isdigit() or int(text) < (name != "gpus"):
            raise BadValueError(f"'{name}={text}' is no number of {name}")
        return int(text)
    if name == "image" and not _DIGEST.match(text):
        raise BadValueError(
            f"'{text}' does not name an image by its digest",
            why="a tag may be another image tomorrow, and the record could not say which ran",
            next_step="docker push NAME prints it: image=REGISTRY/NAME@sha256:…",
        )
    if name in ("cpu", "memory") and not _QUANTITY.match(text):
        raise BadValueError(f"'{name}={text}' is no quantity", next_step="such as 4, 500m or 16Gi")
    if name in ("results", "data", "namespace") and not _NAME.match(text):
        raise BadValueError(f"'{name}={text}' is no name of Kubernetes")
    return text
