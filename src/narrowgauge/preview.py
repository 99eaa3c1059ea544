"""What `narrowgauge plan` prints: the jobs of a request and how each would be started."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from narrowgauge.catalog import load_experiment
from narrowgauge.container import create_body, docker_run_line
from narrowgauge.launch import EXECUTORS, World
from narrowgauge.plan import (
    NATIVE,
    JobRequest,
    Places,
    cache_volume,
    lab_arguments,
    plan_container,
    plan_jobs,
    read_request,
)
from narrowgauge.selection import check_experiment, pick_target
from narrowgauge.targets import Target, load_targets
from narrowgauge_contract.codec import dumps, encode
from narrowgauge_contract.errors import UnknownNameError
from narrowgauge_contract.job import Job

__all__ = ["Preview", "preview", "preview_json", "preview_text"]


@dataclass(frozen=True)
class Preview:
    """One run that would be started. `create` is the engine's create call; None natively."""

    job: Job
    line: str
    create: dict[str, object] | None


def preview(
    world: World, request: JobRequest, *, on: str | None, executor: str, results: Path, data: Path
) -> tuple[Preview, ...]:
    """Decide as `run` does, without asking an engine: the image is named by its content.

    The accelerator is given in the target's first way; `run` asks the engine which ways it offers.
    Raises UsageError, NotApplicableError.
    """
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    spec = load_experiment(world.checkout.experiments, request.experiment)
    targets = load_targets(world.checkout.targets_file)
    jobs = plan_jobs(spec, read_request(spec, request), NATIVE)
    if executor == "native":
        named = pick_target(targets, world.host, on) if on is not None else None
        check_experiment(spec, None, targets, world.host)
        name = named.name if named else NATIVE
        return tuple(
            _native(world, replace(job, target=name), _places(job, world, results, data))
            for job in jobs
        )
    target = pick_target(targets, world.host, on)
    check_experiment(spec, target, targets, world.host)
    return tuple(
        _container(
            world, replace(job, target=target.name), target, _places(job, world, results, data)
        )
        for job in jobs
    )


def preview_text(previews: tuple[Preview, ...]) -> str:
    """For people: the line, then job.json."""
    parts = []
    for each in previews:
        parts.append(f"{each.line}\n\n# job.json\n{dumps(each.job)}")
    return "\n".join(parts)


def preview_json(previews: tuple[Preview, ...]) -> str:
    """For scripts: a list of {job, command, create}."""
    body = [{"job": encode(p.job), "command": p.line, "create": p.create} for p in previews]
    return json.dumps(body, indent=2, sort_keys=True) + "\n"


def _places(job: Job, world: World, results: Path, data: Path) -> Places:
    folder = results / job.experiment / job.run_id
    return Places(folder, world.checkout.experiments, data if job.data_sets else None)


def _container(world: World, job: Job, target: Target, places: Places) -> Preview:
    from narrowgauge.images.content import content_tag, image_name

    tag = content_tag(world.checkout.root, target)
    container = plan_container(
        job,
        target,
        image=image_name(target, tag),
        cache=cache_volume(target.name, tag, world.user.uid),
        places=places,
        user=world.user,
        accelerator=target.accelerators[0],
    )
    return Preview(job, docker_run_line(container), create_body(container))


def _native(world: World, job: Job, places: Places) -> Preview:
    python = world.checkout.lab_environment / "bin" / "python"
    data = str(places.data) if places.data is not None else None
    arguments = lab_arguments(str(places.job), str(places.out), str(places.experiments), data)
    words = [
        f"PYTHONPATH={world.checkout.source}",
        str(python),
        "-m",
        "narrowgauge_lab",
        *arguments,
    ]
    return Preview(job, shlex.join(["env", *words]), None)
