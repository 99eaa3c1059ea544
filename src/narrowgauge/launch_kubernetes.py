"""Experiments as Kubernetes manifests: `plan --executor kubernetes` prints, `run` submits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from narrowgauge.catalog import load_experiment
from narrowgauge.errors import UsageError
from narrowgauge.kubernetes.asking import KubernetesAsk
from narrowgauge.kubernetes.manifest import manifests
from narrowgauge.kubernetes.submit import submit, validate
from narrowgauge.launch import World
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs
from narrowgauge.selection import check_experiment
from narrowgauge.targets import load_targets, target_named

__all__ = ["plan_kubernetes", "run_kubernetes"]


def plan_kubernetes(
    world: World, request: JobRequest, ask: KubernetesAsk, on: str | None
) -> tuple[dict[str, Any], ...]:
    """The validated manifests of a request. `on` says which target the cluster's nodes are: this
    host's facts say nothing of them. Raises UsageError, NotApplicableError and their kin."""
    targets = load_targets(world.checkout.targets_file)
    if on is None:
        raise UsageError(
            "which target do the cluster's nodes have?",
            why="this host says nothing of them; nodes carry the label narrowgauge.io/target",
            next_step=f"--on {'|'.join(targets)}",
        )
    target = target_named(targets, on)
    spec = load_experiment(world.checkout.experiments, request.experiment)
    if any(spec.parameter(word.partition("=")[0]).type == "plan" for word in request.parameters):
        for word in request.parameters:
            if word.endswith(".toml"):
                raise UsageError(
                    f"'{word}' is a file that the cluster does not have",
                    next_step="a built-in plan: narrowgauge placement list",
                )
    jobs = plan_jobs(spec, request, NATIVE)
    if len(jobs) != 1:
        raise UsageError(
            f"these parameters make {len(jobs)} runs, and a Job is one",
            next_step="one value for each parameter that makes runs",
        )
    if jobs[0].data_sets and not ask.data:
        raise UsageError(
            f"the run reads {', '.join(jobs[0].data_sets)}, and no claim holds data",
            next_step="--kubernetes data=CLAIM, filled by `narrowgauge data fetch --data`",
        )
    check_experiment(spec, target, targets, world.host)
    documents = manifests(request, target, ask, world.user)
    validate(documents)
    return documents


def run_kubernetes(
    world: World, request: JobRequest, ask: KubernetesAsk, on: str | None
) -> Sequence[str]:
    """Submit it, and do not wait: the pod records the run in the results claim. The names."""
    documents = plan_kubernetes(world, request, ask, on)
    return submit(documents)
