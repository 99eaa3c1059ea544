"""`run` and `plan` where a cluster's scheduler decides when and where: Slurm, Kubernetes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.launch import World
    from narrowgauge.plan import JobRequest
    from narrowgauge.progress import Reporter
    from narrowgauge.store import RunFolder, Store
    from narrowgauge_contract.record import Record

__all__ = [
    "on_slurm",
    "print_manifests",
    "refuse_ignored",
    "require_executor",
    "submit_manifests",
    "together",
]

#: What a run elsewhere takes no notice of, and what does it there instead.
_IGNORED: Mapping[str, Mapping[str, str]] = {
    "boards": {
        "--node": "on each machine by itself: narrowgauge run … --node RANK/NODES@ADDRESS",
        "--lab-python": "leave it out; a board's own stands in hosts.toml",
    },
    "slurm": {
        "--node": "--slurm nodes=N",
        "--wait": "leave it out; --slurm patience=MINUTES bounds the wait for room",
    },
    "kubernetes": {
        "--node": "--kubernetes nodes=N",
        "--results": "--kubernetes results=CLAIM: the pod records the run there",
        "--data": "--kubernetes data=CLAIM",
        "--wait": "leave it out; the cluster queues, and `kubectl wait` waits",
        "--json": "leave it out; `narrowgauge plan --json` prints the manifests",
        "--lab-python": "leave it out; the image has its own",
    },
}


def require_executor(executor: str, given: Mapping[str, Sequence[str] | None]) -> None:
    """Refuse settings of an executor that was not asked for. Raises UsageError."""
    from narrowgauge.errors import UsageError

    for name, words in given.items():
        if words and name != executor:
            raise UsageError(f"--{name} is for --executor {name}", next_step="give both, or none")


def refuse_ignored(where: str, given: Mapping[str, object]) -> None:
    """Refuse options that were given and that runs `where` take no notice of. Raises UsageError."""
    from narrowgauge.errors import UsageError

    for name, next_step in _IGNORED.get(where, {}).items():
        if given.get(name):
            what = "runs on boards" if where == "boards" else f"--executor {where}"
            raise UsageError(f"{name} means nothing to {what}", next_step=next_step)


def together(world: World, node: str | None) -> World:
    """The world of one machine among several that train together. Raises BadValueError."""
    if node is None:
        return world
    from dataclasses import replace

    from narrowgauge.rendezvous import parse_node

    return replace(world, meeting=parse_node(node))


def on_slurm(
    world: World,
    request: JobRequest,
    words: Sequence[str] | None,
    store: Store,
    data: Path,
    reporter: Reporter,
    *,
    on: str | None,
    lab_python: Path | None,
) -> tuple[int, list[tuple[RunFolder, Record]]]:
    """How many runs there were to be, and those that were recorded."""
    from narrowgauge.launch_slurm import run_request
    from narrowgauge.slurm.asking import parse_ask

    return run_request(
        world, request, parse_ask(words or ()), store=store, data=data, lab_python=lab_python,
        on=on, reporter=reporter,
    )  # fmt: skip


def submit_manifests(
    world: World, request: JobRequest, words: Sequence[str] | None, on: str | None
) -> None:
    """Hand a run to Kubernetes, and say what it is called there."""
    from narrowgauge.kubernetes.asking import parse_ask
    from narrowgauge.launch_kubernetes import run_kubernetes

    for name in run_kubernetes(world, request, parse_ask(words or ()), on):
        print(name)
    world.say("submitted; the pod records the run in the results claim, under its experiment")


def print_manifests(
    world: World, request: JobRequest, words: Sequence[str] | None, on: str | None, as_json: bool
) -> None:
    """For `kubectl apply -f -`."""
    from narrowgauge.kubernetes.asking import parse_ask
    from narrowgauge.kubernetes.submit import manifest_text
    from narrowgauge.launch_kubernetes import plan_kubernetes

    documents = plan_kubernetes(world, request, parse_ask(words or ()), on)
    print(json.dumps(documents, indent=2) + "\n" if as_json else manifest_text(documents), end="")
