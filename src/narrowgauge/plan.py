"""From a target, an experiment and parameters to Jobs and containers. Touches no engine, and is
pure but for `read_request`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from narrowgauge.container import (
    LABEL_EXPERIMENT,
    LABEL_FOLDER,
    LABEL_NOTEBOOK,
    LABEL_RUN,
    Bind,
    ContainerPlan,
)
from narrowgauge.rendezvous import Rendezvous
from narrowgauge.targets import Accelerator, Target
from narrowgauge_contract.job import Job, parse_overrides, resolve_all
from narrowgauge_contract.placement_files import read_plans
from narrowgauge_contract.spec import ExperimentSpec

__all__ = [
    "NATIVE",
    "JobRequest",
    "NotebookServer",
    "Places",
    "User",
    "cache_volume",
    "container_exceptions",
    "container_name",
    "lab_arguments",
    "plan_container",
    "plan_jobs",
    "plan_notebook",
    "plan_shell",
    "read_request",
]

#: Where JupyterLab listens inside its container.
_NOTEBOOK_PORT = 8888

#: What a Job's target is called where no image is used and none was named.
NATIVE = "native"

#: The uid has no name inside, and torch asks for one when it looks for its cache.
_ENVIRONMENT = (("HOME", "/cache"), ("LOGNAME", "narrowgauge"), ("USER", "narrowgauge"))


@dataclass(frozen=True)
class JobRequest:
    """What a user asked for, before it is resolved. `parameters` are `name=value[,value]` words.

    `plans`: the placement plans that were read from files (`read_request`), by their values.
    """

    experiment: str
    profile: str
    parameters: tuple[str, ...]
    seed: int
    plans: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Places:
    """Host paths of one run. `data` is None where the job reads no data set."""

    folder: Path
    experiments: Path
    data: Path | None

    @property
    def job(self) -> Path:
        return self.folder / "job.json"

    @property
    def out(self) -> Path:
        return self.folder / "out"


@dataclass(frozen=True)
class User:
    """Who the container runs as, and the groups of the device files it needs."""

    uid: int
    gid: int
    device_groups: tuple[str, ...] = ()


@dataclass(frozen=True)
class NotebookServer:
    """Where a notebook is reached on this host's loopback, and what one must know to get in."""

    port: int
    token: str = field(repr=False)

    def url(self, path: str) -> str:
        """`path` is below the folder of results; empty: the folder itself."""
        tree = f"/tree/{quote(path)}" if path else ""
        return f"http://127.0.0.1:{self.port}/lab{tree}?token={self.token}"


def read_request(spec: ExperimentSpec, request: JobRequest) -> JobRequest:
    """The request with every file of a placement plan read, relative to the current folder: no
    container needs to see it. The one thing here that reads. Raises PlanFileError."""
    read = read_plans(spec, request.parameters, Path())
    return replace(request, parameters=read.words, plans=read.documents)


def plan_jobs(
    spec: ExperimentSpec, request: JobRequest, target: str, run_ids: Sequence[str] = ()
) -> tuple[Job, ...]:
    """Every Job the request asks for. Raises UnknownNameError, BadValueError, UsageError."""
    overrides = parse_overrides(spec, request.parameters)
    return resolve_all(
        spec,
        overrides,
        profile=request.profile,
        target=target,
        seed=request.seed,
        run_ids=run_ids,
        plans=request.plans,
    )


def lab_arguments(job: str, out: str, experiments: str, data: str | None) -> tuple[str, ...]:
    """The lab's arguments for a resolved job; the same in a container and natively."""
    words = ("run", "--job", job, "--out", out, "--experiments", experiments)
    return words if data is None else (*words, "--data", data)


def container_name(run_id: str) -> str:
    return f"narrowgauge-{run_id}"


def cache_volume(target: str, image: str, uid: int) -> str:
    """One volume per image and user: what one build tuned, another must not read.

    `image` is the image's digest or content tag; twelve characters of it name the volume.
    """
    digest = image.rpartition(":")[2][:12]
    return f"narrowgauge-cache-{target}-{digest}-{uid}"


def plan_container(
    job: Job,
    target: Target,
    *,
    image: str,
    cache: str,
    places: Places,
    user: User,
    accelerator: Accelerator,
    meeting: Rendezvous | None = None,
) -> ContainerPlan:
    """The container for one Job. `image` and `cache` name the image and the cache volume. With a
    `meeting` it has the host's network: the machines connect to each other at ports of their own
    choice."""
    binds = [
        Bind(str(places.job), "/job.json", True),
        Bind(str(places.out), "/out", False),
        Bind(str(places.experiments), "/experiments", True),
    ]
    if places.data is not None:
        binds.append(Bind(str(places.data), "/data", True))
    data = "/data" if places.data is not None else None
    return ContainerPlan(
        name=container_name(job.run_id),
        image=image,
        command=lab_arguments("/job.json", "/out", "/experiments", data),
        user=f"{user.uid}:{user.gid}",
        binds=tuple(binds),
        cache_volume=cache,
        accelerator=accelerator,
        environment=(*_ENVIRONMENT, *(meeting.environment().items() if meeting else ())),
        network="none" if meeting is None else "host",
        labels=(
            (LABEL_RUN, job.run_id),
            (LABEL_EXPERIMENT, job.experiment),
            (LABEL_FOLDER, str(places.folder)),
        ),
        groups=() if accelerator is Accelerator.NONE else user.device_groups,
        read_only_root=target.read_only_root,
    )


def plan_shell(
    target: Target,
    *,
    words: tuple[str, ...],
    image: str,
    cache: str,
    places: Places,
    user: User,
    accelerator: Accelerator,
) -> ContainerPlan:
    """The container a job would get, with a shell (or `words`) in place of the lab and no job."""
    binds = [
        Bind(str(places.out), "/out", False),
        Bind(str(places.experiments), "/experiments", True),
    ]
    if places.data is not None:
        binds.append(Bind(str(places.data), "/data", True))
    return ContainerPlan(
        name=places.folder.name,
        image=image,
        command=words[1:],
        entrypoint=words[0] if words else "/bin/bash",
        user=f"{user.uid}:{user.gid}",
        binds=tuple(binds),
        cache_volume=cache,
        accelerator=accelerator,
        environment=_ENVIRONMENT,
        groups=() if accelerator is Accelerator.NONE else user.device_groups,
        read_only_root=target.read_only_root,
    )


def plan_notebook(
    target: Target,
    *,
    name: str,
    image: str,
    cache: str,
    results: Path,
    experiments: Path,
    data: Path | None,
    user: User,
    accelerator: Accelerator,
    server: NotebookServer,
) -> ContainerPlan:
    """JupyterLab as hardened as a run, but for what a browser needs: a port of this host's
    loopback, hence a network, which is `name`'s own and leads nowhere; and all results, writable.

    The token is in the environment: a command line can be read by every user of the host.
    """
    binds = [Bind(str(results), "/results", False), Bind(str(experiments), "/experiments", True)]
    if data is not None:
        binds.append(Bind(str(data), "/data", True))
    command = (
        "lab", "--ip=0.0.0.0", f"--port={_NOTEBOOK_PORT}", "--no-browser", "--allow-root",
        "--notebook-dir=/results", "--ServerApp.port_retries=0",
    )  # fmt: skip
    return ContainerPlan(
        name=name,
        image=image,
        command=command,
        entrypoint="jupyter",
        user=f"{user.uid}:{user.gid}",
        binds=tuple(binds),
        cache_volume=cache,
        accelerator=accelerator,
        environment=(*_ENVIRONMENT, ("JUPYTER_TOKEN", server.token)),
        labels=((LABEL_NOTEBOOK, name),),
        groups=() if accelerator is Accelerator.NONE else user.device_groups,
        read_only_root=target.read_only_root,
        network=name,
        ports=((server.port, _NOTEBOOK_PORT),),
    )


def container_exceptions(plan: ContainerPlan) -> tuple[str, ...]:
    """What this container has beyond the house rules, for the record."""
    said = []
    if not plan.read_only_root:
        said.append("writable root file system: the base needs it")
    if plan.groups:
        said.append(f"device groups {', '.join(plan.groups)}")
    if plan.network != "none":
        said.append(f"network {plan.network}")
    return tuple(said)
