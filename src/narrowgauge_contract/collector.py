"""Python's search for cycles among objects, where it would come at a bad time."""

from __future__ import annotations

import contextlib
import gc
from typing import Iterator

__all__ = ["without_collector"]


@contextlib.contextmanager
def without_collector() -> Iterator[None]:
    """No search inside, and afterwards what was before. One takes tens of milliseconds among
    many objects, and begins wherever an object happens to be made."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
