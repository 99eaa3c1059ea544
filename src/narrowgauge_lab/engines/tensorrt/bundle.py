"""What is kept of a built engine: the plan, and what only its build could know."""

from __future__ import annotations

import dataclasses
import json
from typing import Optional, Tuple

__all__ = ["Built", "pack", "unpack"]

_MAGIC = b"narrowgauge tensorrt 1\n"


@dataclasses.dataclass(frozen=True)
class Built:
    """`plan`: TensorRT's own serialised engine. `network`: (name, type) of each layer of the
    network it was built from. `on_dla`: names of layers meant for the DLA; `fallback`: (name,
    reason) of those that the GPU runs although the DLA was asked for. `loadables`: how many pieces
    the DLA's share is in. `notes`: what the build has to say.
    """

    plan: bytes
    network: Tuple[Tuple[str, str], ...] = ()
    on_dla: Tuple[str, ...] = ()
    fallback: Tuple[Tuple[str, str], ...] = ()
    loadables: int = 0
    notes: Tuple[str, ...] = ()


def pack(built: Built) -> bytes:
    fields = {**dataclasses.asdict(dataclasses.replace(built, plan=b"")), "plan": len(built.plan)}
    return _MAGIC + json.dumps(fields).encode() + b"\n" + built.plan


def unpack(payload: bytes) -> Optional[Built]:
    """None where the bytes are not what `pack` gave."""
    head, newline, plan = payload[len(_MAGIC) :].partition(b"\n")
    if not payload.startswith(_MAGIC) or not newline:
        return None
    try:
        fields = json.loads(head.decode())
        if fields["plan"] != len(plan):
            return None
        return Built(
            plan=plan,
            network=tuple((str(a), str(b)) for a, b in fields["network"]),
            on_dla=tuple(map(str, fields["on_dla"])),
            fallback=tuple((str(a), str(b)) for a, b in fields["fallback"]),
            loadables=int(fields["loadables"]),
            notes=tuple(map(str, fields["notes"])),
        )
    except (ValueError, KeyError, TypeError):
        return None
