"""Which claims the lists of benchmarks/reference serve: whether the judge takes their rows."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from result_cases import host

from narrowgauge.judge.evidence import evidence_for
from narrowgauge_contract.claims import Claim, load_claims
from narrowgauge_contract.job import Job as Run
from narrowgauge_contract.job import RowPlan, parse_overrides, resolve, shard_rows
from narrowgauge_contract.outcome import InsideFacts, Metric, Row, Status, Validity
from narrowgauge_contract.record import Hashes, Record
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
EXPERIMENTS = ROOT / "experiments"
LISTS = ROOT / "benchmarks" / "reference" / "lists"

RESNETS = ("resnet50", "imagenet-form")
METHODS = ("voting", "bagging", "fusion", "boosting", "snapshot")
#: By list and experiment; all other claims of the experiment are none of the list's.
SERVED = {
    "transforms": {
        "residual-cutting": {
            "resnet18-whole", "resnet18-links", "resnet18-stage-links", "readme-resnet18",
            "own-resnet18", "resnet50-whole", "resnet50-links", "resnet50-stage-links",
            "readme-resnet50", "own-resnet50",
            "statistics-matter", "stochastic-depth-is-robust", "readme-resnet101",
            "identities-save-nothing",  # counted, whatever a row is trained for
        },
        "quantisation": {
            "wu-within-a-percent", "static-int8", "qat-int8", "qat-int4", "greedy-beats-uniform",
            "notes-accuracy", "one-architecture",
        },
        "pruning": {
            "quantisation-is-better", "channels-are-faster", "channels-cost-a-point",
            "zeros-are-not-faster", "iterative-is-better",
        },
        "resolution-ladder": {
            "statistics-of-its-own", "trained-at-random-sizes", "random-sizes-cost-little",
            "glance-beats-sizes", "the-map-finds-the-object", "the-ladder-has-the-larger-area",
            # Counted, whatever a row is trained for.
            "half-the-side-a-quarter-of-the-cost", "an-odd-map-costs-more",
        },
        "class-maps": {
            "deleting-where-the-map-points", "inserting-where-the-map-points",
            "neighbours-look-alike", "thinking-where-it-looks", "cam-is-grad-cam",
        },
        "feature-pyramid": {
            "pyramid-over-plain-own", "pyramid-over-plain-trunk",
            "equal-cost-own", "equal-cost-trunk",  # counted, whatever a row is trained for
        },
        "fundamentals": {
            "quadratic-95", "overfitting-82", "l2-87", "two-hidden-layers", "three-hidden-layers",
            "four-hidden-layers", "convolution-98", "scaled-weights-end-alike", "l2-helps",
            "l1-helps", "dropout-helps",
        },
    },
    "plans": {
        "resnet": {
            "heterogeneous-converges", "heterogeneous-bf16-costs-little",
            "heterogeneous-int8-costs-little", "products-int8-cost-little",
            "products-bf16-cost-little", "products-fp16-cost-little", "products-fp8-cost-little",
            "products-tf32-cost-little",
            # By the twin; a record of the published schedule goes before it.
            "resnet20-accuracy", "upstream-resnet20",
        },
        "mnist": {
            "mnist-heterogeneous-converges", "mnist-heterogeneous-int8-costs-nothing",
            "mnist-fp32-accuracy",
        },
    },
    "hetero": {
        "hetero-tax": {
            "best-over-strict-fp32", "best-over-tf32", "it-cannot-win",
            "copies-alone-exceed-the-step", "heterogeneous-is-6.4-times-slower",
            "ten-times-the-original", "slower-than-all-on-the-gpu",
            "bytes-fp32", "bytes-fp16", "bytes-int8",
        },
    },
    "anytime": {
        "iresnext": {
            *(f"cifar10-exit{number}" for number in range(8)), "cifar10-best", "cifar10-area",
            "own-area", "wider-is-better", "sandwich-costs-little",
            "sandwich-area", "sandwich-exit0", "sandwich-exit7",
            # Counted, whatever a row is trained for.
            "shared-recomputes", "incremental-reuses",
        },
        "nested-osgd": {
            *(f"notes-exit-{number}" for number in range(4)), "exits-rise",
            *(f"{each}-exit-92" for each in ("first", "second", "third", "fourth")),
            "first-exit-has-priority",
        },
        "ddnn": {
            "tiles-all", *(f"tiles-without-{view}" for view in range(6)), "tiles-without-4-to-5",
            "tiles-without-3-to-5", "tiles-without-2-to-5", "tiles-outage-shape", "masked-outage",
            "binary-uplink-costs-little",
        },
    },
    "ensembles": {
        "ensembles": {
            *(f"{net}-{each}" for net in ("lenet", *RESNETS) for each in METHODS),
            *(f"time-{each}" for each in METHODS[1:]),  # beside voting
            *(f"time-imagenet-form-{each}" for each in METHODS[1:]),
            "published-order", "imagenet-form-order",
        },
    },
}  # fmt: skip


def _jobs(name: str) -> list[Any]:
    sys.path.insert(0, str(LISTS.parent))  # as where take.py is run as a script
    from jobs import load_jobs

    found: list[Any] = load_jobs([LISTS / f"{name}.toml"])
    return found


def _run_of(job: Any) -> tuple[Run, tuple[RowPlan, ...]]:
    spec = load_spec(EXPERIMENTS / job.experiment / "experiment.toml")
    chosen = parse_overrides(spec, job.parameters)
    run = resolve(spec, chosen, profile=job.profile, target="native", seed=0, run_id=job.name)
    if not job.shard:
        return run, run.rows
    part, of = map(int, job.shard.split("/"))
    return run, shard_rows(run.rows, (part, of))


def _record(job: Any, metrics: set[str]) -> Record:
    """What the job would leave, with every metric in every row; their figures are of no use."""
    run, plans = _run_of(job)
    rows = tuple(
        Row(
            plan.index, plan.repeat, plan.seed, plan.parameters, Status.COMPLETE, Validity(True),
            metrics=tuple(Metric(name, "1", "computed", (1.0,)) for name in sorted(metrics)),
        )
        for plan in plans
    )  # fmt: skip
    return Record(
        format=1, run_id=job.name, experiment=job.experiment, profile=job.profile,
        target="native", seed=0, parameters=run.parameters, synthetic=False, data_sets=(),
        status=Status.COMPLETE, exit_code=0, hashes=Hashes(None, "b" * 64, "c" * 64), rows=rows,
        host=host(), inside=InsideFacts("3.12", "Linux", torch="2.11.0", accelerator="H200"),
        started_utc=1e9, ended_utc=1e9 + 1, seconds=1.0, spec={},
    )  # fmt: skip


def _is_served(claim: Claim, spec: Any, records: list[Record]) -> bool:
    found = evidence_for(claim, spec, records)
    return (
        bool(found.cases)
        and not (found.lacking or found.ambiguous)
        and all(len(s) >= claim.minimum_repeats for case in found.cases for s in case.sides)
    )


@pytest.mark.parametrize(
    ("listed", "experiment"), [(name, each) for name in SERVED for each in SERVED[name]]
)
def test_a_list_serves_its_claims(listed: str, experiment: str) -> None:
    spec = load_spec(EXPERIMENTS / experiment / "experiment.toml")
    claims = load_claims(EXPERIMENTS / experiment / "claims.toml", spec)
    metrics = {selection.metric for claim in claims for selection in claim.selections}
    jobs = [job for job in _jobs(listed) if job.experiment == experiment]

    records = [_record(job, metrics) for job in jobs]

    assert {claim.id for claim in claims if _is_served(claim, spec, records)} == SERVED[listed][
        experiment
    ]


def test_only_thirty_epochs_serve_what_is_claimed_of_thirty() -> None:
    """Rows of the published schedule are another training; bfloat16 and int8 are claimed of it."""
    spec = load_spec(EXPERIMENTS / "resnet" / "experiment.toml")
    claims = load_claims(EXPERIMENTS / "resnet" / "claims.toml", spec)
    jobs = [job for job in _jobs("plans") if job.experiment == "resnet"]
    at_thirty = [_record(job, {"test_accuracy"}) for job in jobs if "epochs=30" in job.parameters]
    of = {each.id: each for each in claims if each.id.startswith("products-")}

    served = {name for name, claim in of.items() if _is_served(claim, spec, at_thirty)}
    assert served == {f"products-{each}-cost-little" for each in ("tf32", "fp16", "fp8")}
    for name in served:
        asked = {each.where.get("epochs") for each in of[name].selections}
        assert asked == {30}, name


def test_the_original_tables_and_the_corrected_layer_have_jobs() -> None:
    spec = load_spec(EXPERIMENTS / "per-layer" / "experiment.toml")
    claims = load_claims(EXPERIMENTS / "per-layer" / "claims.toml", spec)
    jobs = [job for job in _jobs("hetero") if job.experiment == "per-layer"]
    metrics = {selection.metric for claim in claims for selection in claim.selections}
    records = [_record(job, metrics) for job in jobs]

    assert not [claim.id for claim in claims if not _is_served(claim, spec, records)]
    assert {"per-layer", "per-layer-overlapped"} <= {
        job.name for job in jobs if "1c" in {p.parameters["group"] for p in _run_of(job)[1]}
    }


def test_what_measures_cpu_or_bus_has_the_host_to_itself() -> None:
    """All but trainings that live on the GPU, and commands that time nothing but it."""
    for job in _jobs("hetero"):
        if job.experiment and job.name != "hetero-tax":
            assert job.alone, job.name


@pytest.mark.parametrize("name", [path.stem for path in sorted(LISTS.glob("*.toml"))])
def test_a_job_reads_rows_that_another_leaves(name: str) -> None:
    jobs = {job.name: job for job in _jobs(name)}
    for job in jobs.values():
        for text in (*job.command, *job.parameters):
            for other, row in re.findall(r"\{out\}/([^/]+)/row-(\d+)/", text):
                assert other in job.after
                assert int(row) in {plan.index for plan in _run_of(jobs[other])[1]}, text


def test_a_record_of_another_recipe_is_not_joined() -> None:
    """Or the tests above would say yes to anything."""
    spec = load_spec(EXPERIMENTS / "pruning" / "experiment.toml")
    claims = load_claims(EXPERIMENTS / "pruning" / "claims.toml", spec)
    (claim,) = (each for each in claims if each.id == "iterative-is-better")
    both = [job for job in _jobs("transforms") if job.name.startswith("pruning-18-")]
    metrics = {"accuracy_after"}
    assert _is_served(claim, spec, [_record(job, metrics) for job in both])

    for job in both:
        if "schedule=one-shot" in job.parameters:
            changed = [each for each in job.parameters if not each.startswith("finetune")]
            plain = SimpleNamespace(**{**vars(job), "parameters": tuple(changed)})
            both[both.index(job)] = plain
    assert not _is_served(claim, spec, [_record(job, metrics) for job in both])
