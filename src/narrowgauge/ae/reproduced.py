"""Badge Results Reproduced: claims that can be checked by others, on their hardware."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from narrowgauge.ae.artifact import Artifact, Part
from narrowgauge.ae.findings import (
    Criterion,
    Finding,
    listed,
    met,
    missing,
    partly,
    to_judge,
)
from narrowgauge.container import ContainerPlan
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs
from narrowgauge.targets import Accelerator
from narrowgauge_contract.claims import Claim, ClaimKind
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.spec import ExperimentSpec

__all__ = ["CRITERIA"]

_DAY_MINUTES = 24 * 60
#: What a mean over several runs takes at least.
_LEAST_REPEATS = 2
_UNRECORDED = ("open", "damaged")
#: Packages that report to somebody. Ours ask only for what the user asked for.
_TELEMETRY = frozenset((
    "amplitude", "analytics", "bugsnag", "clearml", "comet_ml", "datadog", "ddtrace",
    "google_analytics", "mixpanel", "mlflow", "neptune", "opentelemetry", "posthog", "rollbar",
    "segment", "sentry_sdk", "statsd", "wandb",
))  # fmt: skip
_EXIT_CODES_PAGE = "docs/judging.md"
#: An order or a tendency is the variation that is allowed.
_SHAPES = (ClaimKind.ORDERING, ClaimKind.TREND)


def _one_command(of: Artifact) -> Finding:
    broken = [f"{part.name}: {part.problem}" for part in of.parts if part.problem]
    broken += [text for part in of.parts if part.spec for text in _unplannable(part.spec)]
    if broken:
        return missing(f"cannot be planned: {listed(broken)}", "narrowgauge plan says where")
    page = of.pages[_EXIT_CODES_PAGE]
    untold = [str(code.value) for code in ExitCode if f"| {code.value} |" not in page]
    found = f"`narrowgauge run` plans all {len(of.parts)} experiments; a second run has its own id"
    if untold:
        return partly(f"{found}; exit codes that no page explains: {listed(untold)}",
                      f"list them in {_EXIT_CODES_PAGE}")  # fmt: skip
    return met(f"{found}; {_EXIT_CODES_PAGE} explains all {len(ExitCode)} exit codes")


def _unplannable(spec: ExperimentSpec) -> Iterator[str]:
    """Each profile is planned twice: both must do, under different run ids."""
    for profile in spec.profiles:
        try:
            first, second = (
                plan_jobs(spec, JobRequest(spec.id, profile, (), 0), NATIVE) for _ in range(2)
            )
        except NarrowgaugeError as error:
            yield f"{spec.id} {profile}: {error.what}"
            continue
        ids = [job.run_id for job in (*first, *second)]
        if len(set(ids)) != len(ids):
            yield f"{spec.id} {profile}: two runs would have one id"


def _figures(of: Artifact) -> Finding:
    undrawn = [p.name for p in _claiming(of) if p.spec is not None and not p.spec.drawings]
    if "report" not in of.commands:
        return missing("there is no command report", "update Narrowgauge")
    if undrawn:
        return partly(
            f"no drawing is declared for {listed(undrawn)}",
            "add [[draw]] to experiment.toml; the verdicts' own figures are in the report",
        )
    drawings = sum(len(part.spec.drawings) for part in of.parts if part.spec)
    return met(f"{drawings} drawings from records, and `narrowgauge report` beside the paper's")


def _claims(of: Artifact) -> Finding:
    unclaimed = [part.name for part in of.parts if part.spec is not None and not part.claims]
    unbounded = [f"{p.name}/{c.id}" for p in of.parts for c in _open(p) if not _is_bounded(c)]
    if unbounded:
        return missing(
            f"no variation is allowed or none is said: {listed(unbounded)}",
            "give a tolerance, a minimum or a maximum in claims.toml",
        )
    kinds = Counter(claim.kind.value for part in of.parts for claim in _open(part))
    if not kinds:
        return missing("there is no claim that can be checked", "write a claims.toml")
    found = f"{sum(kinds.values())} claims that can be checked (" + ", ".join(
        f"{count} {kind}" for kind, count in sorted(kinds.items())
    ) + "), each with what it may vary by"  # fmt: skip
    if unclaimed:
        remedy = "write claims.toml beside experiment.toml, or drop what proves nothing"
        return partly(f"{found}; without a claim: {listed(unclaimed)}", remedy)
    return met(found)


def _is_bounded(claim: Claim) -> bool:
    return claim.kind in _SHAPES or all(
        each.tolerance is not None or each.minimum is not None or each.maximum is not None
        for each in claim.expected.values()
    )


def _recorded(of: Artifact) -> Finding:
    without = [part.name for part in _claiming(of) if not part.references]
    records = sum(len(part.references) for part in of.parts)
    if not records:
        return missing("there is no reference record", "narrowgauge results export RUN --reference")
    found = f"{records} reference records with raw samples, which `narrowgauge replay` judges"
    if without:
        return partly(
            f"{found}; claims without one: {listed(without)}",
            "narrowgauge results export RUN --reference, of a run on the paper's hardware",
        )
    return met(found)


def _repeated(of: Artifact) -> Finding:
    once = [
        f"{part.name}/{claim.id}"
        for part in of.parts
        for claim in _open(part)
        if claim.minimum_repeats < _LEAST_REPEATS
    ]
    too_few = [
        f"{part.name}/{claim.id} ({claim.profile}: {_repeats(part, claim)})"
        for part in of.parts
        for claim in _open(part)
        if part.spec is not None and _repeats(part, claim) < claim.minimum_repeats
    ]
    if too_few:
        return missing(
            f"the claim's profile repeats less than the claim asks for: {listed(too_few)}",
            "raise `repeats` of the profile, or lower `minimum_repeats`",
        )
    found = "intervals over processes, and two modes are looked for before a figure is believed"
    if once:
        return partly(f"one run is enough for {listed(once)}; else {found}",
                      "minimum_repeats of 3 or more, unless the figure cannot vary")  # fmt: skip
    return met(f"each claim asks for {_LEAST_REPEATS} processes or more; {found}")


def _repeats(part: Part, claim: Claim) -> int:
    return part.spec.profiles[claim.profile].repeats if part.spec is not None else 0


def _other_hardware(of: Artifact) -> Finding:
    bound = [
        part.name
        for part in _claiming(of)
        if _open(part) and all(_is_of_one_device(claim) for claim in _open(part))
    ]
    every = [claim for part in of.parts for claim in _open(part)]
    portable = sum(not _is_of_one_device(claim) for claim in every)
    found = f"{portable} of {len(every)} claims say something on other hardware too"
    if not portable:
        return missing(found, "add a ratio, an ordering or a bound: a shape that holds elsewhere")
    if bound:
        return partly(
            f"{found}; only absolute figures of one device: {listed(bound)}",
            "add a ratio, an ordering or a bound to them",
        )
    return met(found)


def _is_of_one_device(claim: Claim) -> bool:
    fixed = bool(claim.device) or "any" not in claim.expected
    return fixed and claim.kind is ClaimKind.VALUE


def _long_or_special(of: Artifact) -> Finding:
    special = [
        part
        for part in _claiming(of)
        if (part.spec is not None and part.spec.requires_accelerator)
        or any(claim.minutes > _DAY_MINUTES for claim in _open(part))
    ]
    bare = [part.name for part in special if not part.references]
    if bare:
        return partly(
            f"over a day or a GPU, and no reference record to replay: {listed(bare)}",
            "narrowgauge results export RUN --reference; `replay` says that it is no reproduction",
        )
    if not special:
        return met(
            "no claim needs more than a day, and no experiment a GPU; claims on what only a GPU has"
            " are SKIPPED without one"
        )
    names = listed([part.name for part in special])
    return met(f"over a day or a GPU, with records to replay: {names}")


def _anonymous(of: Artifact) -> Finding:
    found = sorted(
        f"{name} imports {module}"
        for name, text in of.sources.items()
        if any(word in text for word in _TELEMETRY)
        for module in _imports(text) & _TELEMETRY
    )
    if found:
        return missing(f"{listed(found)}", "remove it: evaluators must not be seen")
    plan = ContainerPlan(
        name="", image="", command=(), user="", binds=(), cache_volume="",
        accelerator=Accelerator.NONE, environment=(), labels=(), groups=(), read_only_root=True,
    )  # fmt: skip
    if plan.network != "none":
        return missing(f"containers get the network '{plan.network}'", "plan.py: network = none")
    return met(
        f"no package that reports to anybody in {len(of.sources)} files; containers run without a"
        " network; records name no person"
    )


def _imports(text: str) -> set[str]:
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return set()
    named = {a.name for node in ast.walk(tree) if isinstance(node, ast.Import) for a in node.names}
    named |= {
        node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
    }
    return {name.partition(".")[0] for name in named}


def _active_time(of: Artifact) -> Finding:
    absent = [name for name in ("reproduce", "report") if name not in of.commands]
    if absent:
        return missing(f"there is no command {listed(absent)}", "update Narrowgauge")
    lost = [name for name, status in of.runs.items() if status in _UNRECORDED]
    if lost:
        return partly(
            f"{len(lost)} of {len(of.runs)} runs have no record that can be read: {listed(lost)}",
            "narrowgauge attach RUN records what was measured; remove what is damaged",
        )
    if not of.runs:
        return to_judge("nothing was run here yet", "narrowgauge kick")
    ended = ", ".join(f"{n} {word}" for word, n in sorted(Counter(of.runs.values()).items()))
    return met(f"one command to a table of verdicts; {len(of.runs)} runs recorded ({ended})")


def _claiming(of: Artifact) -> list[Part]:
    return [part for part in of.parts if part.claims]


def _open(part: Part) -> list[Claim]:
    """The claims that a measurement can be held against."""
    return [claim for claim in part.claims if not claim.not_comparable]


CRITERIA = (
    Criterion(
        "R1", "Reproduced", "one command per experiment, which may be run twice",
        "EuroSys, cTuning: a single script per experiment, tolerant of forgotten arguments and of"
        " being run again; exit codes that say what happened.", _one_command,
    ),
    Criterion(
        "R2", "Reproduced", "a command from results to the paper's figure or table",
        "sysartifacts: scripts that turn results into what the paper shows.", _figures,
    ),
    Criterion(
        "R3", "Reproduced", "claims, each with its experiment and the variation it allows",
        "NDSS, USENIX: claims C1.. 'proven by' E1.., expected outcomes, 'maximum allowable"
        " variation'.", _claims,
    ),
    Criterion(
        "R4", "Reproduced", "the authors' own recorded results, and a comparison by program",
        "cTuning: pre-recorded results and automatic comparison.", _recorded,
    ),
    Criterion(
        "R5", "Reproduced", "more than one run, with its distribution looked at",
        "cTuning FAQ: several runs; where a distribution has two modes its mean is not used.",
        _repeated,
    ),
    Criterion(
        "R6", "Reproduced", "what supports a claim on other hardware",
        "cTuning: evaluators rarely have the same device; trend, order or ratio must be judged.",
        _other_hardware,
    ),
    Criterion(
        "R7", "Reproduced", "a way for what takes over a day or special hardware",
        "EuroSys: remote access, or recorded logs, marked as what they are.", _long_or_special,
    ),
    Criterion(
        "R8", "Reproduced", "nothing that could tell authors who their evaluator is",
        "All: no analytics, no tracking.", _anonymous,
    ),
    Criterion(
        "R9", "Reproduced", "minutes of a person's time; success and failure are both logged",
        "EuroSys: 'a few minutes' of active time; logs of what worked and what did not.",
        _active_time,
    ),
)  # fmt: skip
