"""What the tests of the report share: a `Judged` with every verdict, and hostile texts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from narrowgauge.judge.model import (
    JUDGED_FORMAT,
    Estimate,
    Exclusion,
    Judged,
    Judgement,
    Occasion,
    Refused,
    Sensitivity,
)
from narrowgauge.report.cards import Energy, RunCard
from narrowgauge.report.content import Report, build
from narrowgauge_contract.claims import (
    Claim,
    ClaimKind,
    Expectation,
    MetricOperator,
    Selection,
    Verdict,
)
from narrowgauge_contract.record import GitFacts, Record

#: Each acts somewhere: in HTML, in Markdown, in TeX, on a terminal, in a spreadsheet, in a path.
HOSTILE = (
    "<script>alert(1)</script>",
    "\"><img src=x onerror=alert(1)>",
    "' onmouseover='alert(1)",
    "</style><style>*{display:none}</style>",
    "{{ 7*7 }} {% raw %} << 7*7 >> <% if 1 %>",
    "\x1b[2J\x1b]0;title\x07\x9b31m",
    "\\input{/etc/passwd} \\write18{id} ^^5cinput $x$ % #1 & ~ _ {}",
    "=HYPERLINK(\"http://evil.example\",\"x\")",
    "@SUM(1+1)*cmd|' /C calc'!A0",
    "[x](javascript:alert(1)) ![y](http://evil.example/z.png) <http://evil.example>",
    "http://evil.example www.evil.example a@evil.example",
    "| cell | break |\n\n# heading\n\n- list\n```\nfence",
    "../../../../etc/passwd",
    "\u202etxt.exe\u2066 \u2028 \ud800 \x00",
    "$\\frac{1}{",
    "x" * 10_000,
)  # fmt: skip
RUN = "20261121T100000Z-toy-aaaaaa"


def claim(name: str = "toy-speed", **changes: object) -> Claim:
    """A claim on a ratio, or what `changes` make of it."""
    whole = Claim(
        id=name,
        text="bf16 is 1.5 times as fast as fp32.",
        paper="Table 2",
        kind=ClaimKind.RATIO,
        operator=MetricOperator.RATIO,
        selections=(
            Selection("images_per_second", {"precision": "bf16"}),
            Selection("images_per_second", {"precision": "fp32"}),
        ),
        statistic="median",
        expected={"any": Expectation(figure=1.5, tolerance=0.1)},
        minimum_repeats=3,
        profile="short",
        minutes=5.0,
        disk_gb=0.1,
        device="NVIDIA H200",
        measured_on="one H200",
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def judgement(verdict: Verdict, name: str = "toy-speed", **changes: object) -> Judgement:
    """A judgement with that verdict; without a measurement where the verdict has none."""
    measured = verdict not in (Verdict.SKIPPED, Verdict.NOT_APPLICABLE)
    stated = claim(name)
    whole = Judgement(
        claim=stated,
        experiment="toy",
        verdict=verdict,
        reason="The interval lies within the tolerance." if measured else "It was not measured.",
        command=f"narrowgauge reproduce toy/{name}",
        flip="A ratio below 1.35 or above 1.65.",
    )
    if measured:
        ratios = (1.48, 1.5, 1.52, 1.49, 1.51, 1.53)
        whole = dataclasses.replace(
            whole,
            estimate=Estimate("bf16 / fp32", 1.505, "1", 1.48, 1.53, 6, ratios),
            parts=(
                Estimate("bf16", 1505.0, "image/s", 1480.0, 1530.0, 6),
                Estimate("fp32", 1000.0, "image/s", 990.0, 1010.0, 6),
            ),
            expectation=stated.expected["any"],
            expected_for="any",
            target="desktop-next",
            device="NVIDIA H200",
            device_matches=True,
            sensitivity=Sensitivity(0.012, False, "launch", "20261121T090000Z-noise-floor-bbbbbb"),
            runs=(RUN,),
            exclusions=(Exclusion(RUN, 3, "the row throttled"),),
        )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def ordering(verdict: Verdict = Verdict.REPRODUCED) -> Judgement:
    """A judgement on an order, which has parts and no estimate."""
    return judgement(
        verdict,
        "toy-order",
        claim=claim(
            "toy-order",
            kind=ClaimKind.ORDERING,
            operator=MetricOperator.ORDER,
            expected={"any": Expectation()},
        ),
        estimate=None,
        expectation=Expectation(),
        order=("bf16", "fp32"),
    )


def judged(judgements: Iterable[Judgement] = (), **changes: object) -> Judged:
    """One occasion with those judgements; with one of each verdict and an order by default."""
    every = [judgement(each, f"toy-{each.value.lower()}") for each in Verdict] + [ordering()]
    occasion = Occasion(1e9, "0.1.0", GitFacts("0123456789abcdef" * 2, True), False, "results", 7)
    found = tuple(judgements) or tuple(every)
    return Judged(
        JUDGED_FORMAT,
        dataclasses.replace(occasion, **changes),  # type: ignore[arg-type]
        found,
        (Refused("results/toy/broken/record.json", "truncated"),),
    )


def card(run_id: str = RUN, **changes: object) -> RunCard:
    whole = RunCard(
        run_id=run_id,
        experiment="toy",
        target="desktop-next",
        device="NVIDIA H200",
        status="complete",
        began="2026-11-21 10:00 UTC",
        seconds=61.5,
        rows=12,
        valid_rows=11,
        facts=(
            ("executor", "docker"),
            ("image", "narrowgauge/desktop-next:local sha256:" + "d" * 64),
            ("torch", "2.11.0"),
        ),
        energy=(Energy("energy_gross", "nvml-counter", 6, "1.234 J"),),
        warnings=("pins that nobody resolved: base",),
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def cards() -> Sequence[tuple[str, RunCard | str]]:
    return [(RUN, card()), ("20261121T110000Z-toy-cccccc", "its record is not here")]


def hostile_judged() -> Judged:
    """A judgement per hostile text, which stands in every place that a text can have."""
    return judged(
        [
            judgement(
                Verdict.REPRODUCED,
                reason=each,
                flip=each,
                command=each,
                claim=claim(each, text=each, paper=each, measured_on=each),
                experiment=each,
                device=each,
                target=each,
                bimodal=each,
                runs=(each,),
                disagreements=(each,),
                exclusions=(Exclusion(each, 1, each),),
                parts=(
                    Estimate(each, 1.0, each, 0.5, 1.5, 3),
                    Estimate(each, 2.0, each, 1.5, 3, 3),
                ),
                sensitivity=Sensitivity(0.01, True, each, each),
            )
            for each in HOSTILE
        ],
        source=HOSTILE[0],
        version=HOSTILE[1],
    )


def hostile_record(record: Record, text: str) -> Record:
    """The record with the text wherever a report shows one."""
    assert record.inside is not None
    assert record.host is not None
    assert record.host.image is not None
    return dataclasses.replace(
        record,
        run_id=text,
        experiment=text,
        target=text,
        data_sets=(text,),
        inside=dataclasses.replace(
            record.inside, torch=text, python=text, cpu=text, pins_unresolved=(text,)
        ),
        host=dataclasses.replace(
            record.host,
            executor=text,
            image=dataclasses.replace(record.host.image, name=text, digest=text, base=text),
            exceptions=(text,),
        ),
    )


def report(found: Judged | None = None) -> Report:
    return build(found or judged(), cards())
