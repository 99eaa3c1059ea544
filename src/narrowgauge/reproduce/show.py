"""A plan, verdicts, and one claim in full, as text for a terminal. Records are anybody's text: what
could steer a terminal is shown, not sent."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from narrowgauge.judge.model import Estimate, Judged, Judgement
from narrowgauge.judge.words import estimate_words
from narrowgauge.noise import percent
from narrowgauge.progress import duration
from narrowgauge.reproduce.planning import ReproducePlan
from narrowgauge.terminal import plain
from narrowgauge.view import widen
from narrowgauge_contract.claims import Expectation, Verdict

__all__ = ["REPLAY_LABEL", "explain_lines", "plan_lines", "print_verdicts", "summary_line"]

_WIDTH, _INDENT = 100, 12 * " "
REPLAY_LABEL = "REPLAY: stored records were judged, nothing was measured; this is no reproduction"
_STYLES = {
    Verdict.REPRODUCED: "green",
    Verdict.REPRODUCED_TREND: "cyan",
    Verdict.NOT_REPRODUCED: "red",
    Verdict.UNSTABLE: "yellow",
    Verdict.INVALID: "magenta",
}


def plan_lines(plan: ReproducePlan) -> Iterator[str]:
    """What is going to be done, with time and disk first."""
    claims, runs = (
        f"{count} {what}{'s' if count != 1 else ''}"
        for count, what in ((len(plan.claims), "claim"), (len(plan.steps), "run"))
    )
    budget = f", at most {duration(plan.budget_s)}" if plan.budget_s is not None else ""
    yield (
        f"{claims}, {runs}:"
        f" about {duration(plan.seconds)} (as measured on the claims' own hardware){budget},"
        f" {plan.disk_gb:.2g} GB of disk"
    )
    yield (
        f"blocked random order, seed {plan.order_seed}; pauses of {plan.cooldown_s:g} s;"
        f" first repeats' seed {plan.seed}"
    )
    for number, step in enumerate(plan.steps, start=1):
        claims = f"{len(step.claims)} claim{'s' if len(step.claims) != 1 else ''}"
        yield f"{number:4d}  {step.minutes:g} min, {claims}: {step.command}"
    for reason, names in _by_reason(plan).items():
        yield f"no run, {reason}: {_few(names)}"


def _by_reason(plan: ReproducePlan) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for each in plan.left_out:
        found.setdefault(f"{each.verdict.value} ({each.reason})", []).append(each.claim)
    return found


def _few(names: Sequence[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


#: Columns of a terminal for the verdict and its reason.
_LEAST_BESIDE = 50


def print_verdicts(judged: Judged, console: Console, *, all_: bool = False) -> None:
    """The table of verdicts. Without `all_`, claims that nothing was measured for are counted."""
    widen(console)
    if judged.occasion.replay:
        console.print(Text(REPLAY_LABEL, style="bold yellow"))
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 2, 0, 0))
    shown = [each for each in judged.judgements if all_ or _says_something(each)]
    longest = max((len(each.experiment) + 1 + len(each.claim.id) for each in shown), default=0)
    # A claim's name is there to be copied: it breaks only where that leaves the rest no room.
    roomy = console.width - longest >= _LEAST_BESIDE
    table.add_column("verdict", no_wrap=True)
    table.add_column("claim", no_wrap=roomy, overflow="fold")
    table.add_column("measured", overflow="fold")
    for each in shown:
        verdict = Text(each.verdict.value, style=_STYLES.get(each.verdict, "dim"))
        table.add_row(verdict, f"{each.experiment}/{each.claim.id}", Text(plain(each.reason)))
    if shown:
        console.print(table)
    for refused in judged.refused:
        console.print(Text(f"refused: {plain(refused.path)}: {plain(refused.why)}", style="red"))
    console.print(Text(summary_line(judged)))


def _says_something(judgement: Judgement) -> bool:
    return judgement.verdict not in (Verdict.NOT_APPLICABLE, Verdict.SKIPPED)


def summary_line(judged: Judged) -> str:
    """`494 claims: 12 REPRODUCED, 3 UNSTABLE, …`, in the order of the verdicts."""
    counts = Counter(each.verdict for each in judged.judgements)
    said = ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict if counts[verdict])
    total = len(judged.judgements)
    words = f"{total} claim{'s' if total != 1 else ''}: {said or 'none'}"
    if judged.refused:
        words += f"; {len(judged.refused)} record{'s' if len(judged.refused) != 1 else ''} refused"
    return words


def explain_lines(judgement: Judgement) -> Iterator[str]:
    """What was claimed, how it is tested, what was found, what would change the verdict. Lines of
    100 letters, but for what one word or the command needs more for."""
    claim = judgement.claim
    yield f"{judgement.experiment}/{claim.id}"
    for line in _explained(judgement):
        yield from textwrap.wrap(
            line, _WIDTH, subsequent_indent=_INDENT, break_long_words=False, break_on_hyphens=False
        )
    if judgement.command:
        yield f"  command   {judgement.command}"


def _explained(judgement: Judgement) -> Iterator[str]:
    claim = judgement.claim
    yield f"  claimed   {claim.text}"
    yield f"            {claim.paper}"
    if claim.measured_on:
        yield f"            measured on {claim.measured_on}"
    yield from _tested(judgement)
    yield f"  verdict   {judgement.verdict.value}: {plain(judgement.reason)}"
    yield from _found(judgement)
    yield f"  to change {plain(judgement.flip)}"


def _repeats(count: int) -> str:
    return f"{count} valid repeat{'s' if count != 1 else ''}"


def _tested(judgement: Judgement) -> Iterator[str]:
    claim = judgement.claim
    labels = [str(selection) for selection in claim.selections]
    kind, of = claim.kind.value, claim.operator.value
    # "value of value" and "ordering of order" say one thing twice.
    tested = kind if kind.startswith(of) or kind == "ordering" else f"{kind} of {of}"
    yield f"  tested by {tested}, {claim.statistic}:"
    yield from (f"            {label}" for label in labels)
    for target, expectation in claim.expected.items():
        yield f"            on {target}: {_expected(expectation) or 'in this order, rising'}"
    if claim.device:
        yield f"            the figures are those of {claim.device}; elsewhere in trend only"
    yield (
        f"            at least {_repeats(claim.minimum_repeats)}, profile {claim.profile};"
        f" about {claim.minutes:g} min, {claim.disk_gb:g} GB"
    )


def _expected(expectation: Expectation) -> str:
    words = []
    if expectation.figure is not None:
        words.append(f"{expectation.figure:g}")
    if expectation.tolerance is not None:
        words.append(f"within {percent(expectation.tolerance)}")
    if expectation.minimum is not None:
        words.append(f"at least {expectation.minimum:g}")
    if expectation.maximum is not None:
        words.append(f"at most {expectation.maximum:g}")
    return " ".join(words)


def _found(judgement: Judgement) -> Iterator[str]:
    parts: tuple[Estimate, ...] = judgement.parts
    for part in parts:
        yield f"            {plain(part.label)}: {plain(estimate_words(part))}"
    found = judgement.sensitivity
    if found is not None:
        words = found.reason
        if found.least is not None:
            within = ", and the ratio is within it" if found.within else ""
            words = f"least detectable effect {percent(found.least)}{within} ({found.run})"
        yield f"            {plain(words)}"
    if judgement.bimodal:
        yield f"            {plain(judgement.bimodal)}"
    for run in judgement.runs:
        yield f"            run {plain(run)} on {plain(judgement.device)}"
    for line in judgement.disagreements:
        yield f"            not put together: {plain(line)}"
    reasons = Counter(each.why for each in judgement.exclusions if each.row is not None)
    for why, count in reasons.most_common():
        yield f"            {count} row{'s' if count != 1 else ''} left out: {plain(why)}"
