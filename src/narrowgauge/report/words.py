"""Figures, intervals and expectations as a reader wants them."""

from __future__ import annotations

import datetime
import re
from collections.abc import Sequence

from narrowgauge.judge.model import Estimate, Judgement
from narrowgauge.progress import duration
from narrowgauge.units import number, prefixed_scale_of
from narrowgauge_contract.claims import Claim, ClaimKind, Expectation, MetricOperator

__all__ = [
    "coverage_words",
    "duration",
    "estimate_words",
    "expectation_words",
    "interval_words",
    "paper_words",
    "percent_words",
    "told_apart",
    "when",
]


def estimate_words(estimate: Estimate | None) -> str:
    """The figure with its unit; empty without one."""
    if estimate is None:
        return ""
    return prefixed_scale_of(estimate.figure, estimate.unit).text(estimate.figure)


def coverage_words(estimate: Estimate | None) -> str:
    """`95 % interval`, or whatever its coverage is; empty where there is no interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    return f"{percent_words(estimate.coverage)} interval"


def interval_words(estimate: Estimate | None) -> str:
    """`1.21 to 1.25`, in the unit of the figure; empty where there is no interval."""
    if estimate is None or estimate.low is None or estimate.high is None:
        return ""
    scale = prefixed_scale_of(estimate.figure, estimate.unit)
    return f"{scale.number(estimate.low)} to {scale.number(estimate.high)}"


def paper_words(judgement: Judgement) -> str:
    """What the paper has and how far off it may be: of the expectation that was used, or of all
    where nothing was measured to use one for."""
    claim = judgement.claim
    unit = judgement.estimate.unit if judgement.estimate else ""
    if claim.operator is MetricOperator.ORDER:
        return "the order stated"
    if judgement.expectation is not None:
        return expectation_words(judgement.expectation, claim, unit)
    known = {
        target: expectation_words(each, claim, unit) for target, each in claim.expected.items()
    }
    if len(set(known.values())) == 1:
        return next(iter(known.values()))
    return "; ".join(f"{target}: {words}" for target, words in known.items())


def expectation_words(expectation: Expectation, claim: Claim, unit: str = "") -> str:
    """`9.7 s ± 10 %`, `at least 8`, `equal within 3 %`."""

    def shown(value: float) -> str:
        return prefixed_scale_of(value, unit).text(value)

    words = []
    if claim.kind is ClaimKind.EQUIVALENCE and expectation.tolerance is not None:
        words.append(f"equal within {percent_words(expectation.tolerance)}")
    elif expectation.figure is not None:
        words.append(shown(expectation.figure))
        if expectation.tolerance is not None:
            words.append(f"± {percent_words(expectation.tolerance)}")
    if expectation.minimum is not None:
        words.append(f"at least {shown(expectation.minimum)}")
    if expectation.maximum is not None:
        words.append(f"at most {shown(expectation.maximum)}")
    return " ".join(words) or "its direction"


def percent_words(share: float) -> str:
    """`3 %` of 0.03."""
    return f"{number(100 * share)} %"


def told_apart(labels: Sequence[str]) -> tuple[str, ...]:
    """Labels by what differs in them: `fp16`, `int8` of `a{p=fp16, b=1}`, `a{p=int8, b=1}`."""
    split = [re.split(r"[{}]|,\s+", label) for label in labels]
    shared = set(split[0]).intersection(*split[1:]) if split else set()
    short = [", ".join(word for word in words if word and word not in shared) for words in split]
    keys = {word.partition("=")[0] for words in short for word in words.split(", ")}
    if len(keys) == 1 and all("=" in words for words in short):
        short = [words.partition("=")[2] for words in short]
    whole = all(short) and len(set(short)) == len(short)
    return tuple(short) if whole else tuple(labels)


def when(seconds: float | None) -> str:
    """`2026-11-21 09:45 UTC`; empty where nobody knows, or where a clock was beyond all years."""
    if seconds is None:
        return ""
    try:
        moment = datetime.datetime.fromtimestamp(seconds, tz=datetime.timezone.utc)
    except (OverflowError, OSError, ValueError):
        return ""
    return moment.strftime("%Y-%m-%d %H:%M UTC")
