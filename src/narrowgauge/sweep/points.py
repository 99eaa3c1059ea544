"""The points of a grid or random sweep, in an order that drifts with no parameter. Pure."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.errors import UsageError
from narrowgauge.plan import JobRequest, plan_jobs
from narrowgauge.sweep.file import Choice, Domain, Range, SweepSpec
from narrowgauge_contract.job import Job
from narrowgauge_contract.parameters import Scalar
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "MOST",
    "Point",
    "count_of",
    "example",
    "job_of",
    "point_of",
    "points_of",
    "values_of",
    "varied",
]

#: A grid of more is a slip of the pen: it would take years.
MOST = 1_000_000


@dataclass(frozen=True)
class Point:
    """One run to be made. `key` is of all that decides it, so an edited file knows what is done."""

    key: str
    values: tuple[Scalar, ...]


def points_of(sweep: SweepSpec) -> list[Point]:
    """Every point of a grid, or so many random ones; shuffled by the sweep's seed, so that neither
    heat nor other load falls on one end of a parameter. Raises UsageError for more than MOST."""
    if sweep.file.method == "random":
        found = _random(sweep)
    else:
        sizes = [count_of(domain) for domain in sweep.domains.values()]
        if math.prod(sizes) > MOST:
            raise UsageError(
                f"this grid has {math.prod(sizes)} points",
                why=" × ".join(f"{size}" for size in sizes) + f"; more than {MOST}",
                next_step='fewer values, or method = "random" with runs = …',
            )
        found = list(itertools.product(*(values_of(each) for each in sweep.domains.values())))
        random.Random(sweep.file.seed).shuffle(found)
        found = found[: sweep.file.runs or None]
    prefix = _prefix(sweep)
    return [_point(prefix, values) for values in found]


def point_of(sweep: SweepSpec, values: Mapping[str, Scalar]) -> Point:
    """The point with these values, one for each parameter that varies."""
    return _point(_prefix(sweep), tuple(values[name] for name in sweep.domains))


def count_of(domain: Domain) -> int:
    """How many values a domain with a finite number of them has; none of them is made."""
    if isinstance(domain, Choice):
        return len(domain.values)
    return math.floor((domain.high - domain.low) / domain.step + 1e-9) + 1


def values_of(domain: Domain) -> Sequence[Scalar]:
    """All values of a domain that has a finite number of them."""
    if isinstance(domain, Choice):
        return domain.values
    return [_nth(domain, index) for index in range(count_of(domain))]


def _nth(domain: Range, index: int) -> Scalar:
    value = domain.low + index * domain.step
    return int(value) if domain.whole else value


def job_of(sweep: SweepSpec, spec: ExperimentSpec, point: Point, target: str) -> Job:
    """The Job of a point. Raises UsageError where it would be several."""
    return plan_jobs(spec, _request(sweep, point.values), target)[0]


def example(sweep: SweepSpec) -> JobRequest:
    """One of the sweep's requests, for what has to be decided once for all."""
    values = tuple(
        domain.values[0] if isinstance(domain, Choice)
        else int(domain.low) if domain.whole else domain.low
        for domain in sweep.domains.values()
    )  # fmt: skip
    return _request(sweep, values)


def varied(sweep: SweepSpec, point: Point) -> Iterator[tuple[str, Scalar]]:
    """A point's values by name."""
    return zip(sweep.domains, point.values, strict=True)


def _request(sweep: SweepSpec, values: Sequence[Scalar]) -> JobRequest:
    fixed = [f"{name}={_word(value)}" for name, value in sweep.fixed.items()]
    words = [f"{name}={_word(value)}" for name, value in zip(sweep.domains, values, strict=True)]
    file = sweep.file
    return JobRequest(file.experiment, file.profile, (*fixed, *words), file.seed)


def _random(sweep: SweepSpec) -> list[tuple[Scalar, ...]]:
    """Distinct points, drawn in the order of the file's parameters; fewer where there are no more.

    A longer sweep of the same seed begins with the points of a shorter one.
    """
    generator = random.Random(sweep.file.seed)
    found: dict[tuple[Scalar, ...], None] = {}
    misses = 0
    while len(found) < sweep.file.runs and misses < 1000:
        values = tuple(_draw(domain, generator) for domain in sweep.domains.values())
        misses = misses + 1 if values in found else 0
        found[values] = None
    return list(found)


def _draw(domain: Domain, generator: random.Random) -> Scalar:
    if isinstance(domain, Choice):
        return generator.choice(domain.values)
    if domain.step:
        return _nth(domain, generator.randrange(count_of(domain)))
    if domain.log:
        value = math.exp(generator.uniform(math.log(domain.low), math.log(domain.high)))
        return _clip(domain, round(value) if domain.whole else value)
    if domain.whole:
        return generator.randint(int(domain.low), int(domain.high))
    return generator.uniform(domain.low, domain.high)


def _clip(domain: Range, value: float) -> float:
    """exp(log(x)) may miss a bound by its last bit."""
    clipped = min(max(value, domain.low), domain.high)
    return int(clipped) if domain.whole else clipped


def _prefix(sweep: SweepSpec) -> str:
    file = sweep.file
    body = [file.experiment, file.profile, file.seed, sorted(sweep.fixed.items())]
    return json.dumps([body, list(sweep.domains)])


def _point(prefix: str, values: tuple[Scalar, ...]) -> Point:
    digest = hashlib.sha256((prefix + json.dumps(values)).encode("utf-8"))
    return Point(digest.hexdigest()[:16], values)


def _word(value: Scalar) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)
