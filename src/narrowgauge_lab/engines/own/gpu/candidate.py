"""One step's ways to run, of which one is chosen."""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, List, Mapping, Optional, Tuple

__all__ = ["Candidate", "Launch", "problem_key", "triton_candidate"]

_OURS = "triton"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One way to run a step. `start` queues it; `store` gives what a cache keeps of it, JSON."""

    provider: str
    kernel: str
    store: Callable[[], Mapping[str, Any]]
    start: Callable[[], None]

    @property
    def is_ours(self) -> bool:
        return self.provider == _OURS


def triton_candidate(kernel: str, block: Any, start: Callable[[], None]) -> Candidate:
    """One of our kernels with a `block`, a dataclass of the numbers that tell it from others."""
    spec = {"kernel": kernel, **dataclasses.asdict(block)}
    return Candidate(_OURS, f"{kernel} {block}", lambda: spec, start)


def _nobody(seconds: float) -> List[Candidate]:
    del seconds
    return []


def _nothing(spec: Mapping[str, Any]) -> Optional[Candidate]:
    del spec
    return None


@dataclasses.dataclass
class Launch:
    """One step; `key` is the same for steps that are the same problem.

    `own`: candidates at hand. `others` makes those of libraries, for about so many seconds;
    `restore` makes one of them of what was stored, or None. `chosen`: None until it has been
    settled; then the first of ours runs.
    """

    layer: str
    operator: str
    key: Tuple[Any, ...]
    own: List[Candidate]
    others: Callable[[float], List[Candidate]] = _nobody
    restore: Callable[[Mapping[str, Any]], Optional[Candidate]] = _nothing
    chosen: Optional[Candidate] = None

    def __call__(self) -> None:
        self.running().start()

    def running(self) -> Candidate:
        return self.chosen or self.own[0]

    def stored(self, spec: Mapping[str, Any]) -> Optional[Candidate]:
        """The candidate that `store` gave `spec` of; None where there is no such one any more."""
        mine = (each for each in self.own if dict(each.store()) == dict(spec))
        return next(mine, None) or self.restore(spec)


def problem_key(*parts: Any) -> Tuple[Any, ...]:
    """A problem as numbers and words alone. Names of buffers are no part of it, but where in a
    pixel a value begins is: it decides how wide its loads can be."""
    plain: List[Any] = []
    for part in parts:
        if dataclasses.is_dataclass(part):
            values = {each.name: getattr(part, each.name) for each in dataclasses.fields(part)}
            plain.append(tuple(value for name, value in values.items() if name != "buffer"))
        else:
            plain.append(part)
    return tuple(plain)
