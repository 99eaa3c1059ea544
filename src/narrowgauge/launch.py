"""Puts a run together: which executor, which image or environment, which data, whose turn."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.catalog import load_experiment
from narrowgauge.checkout import Checkout, git_facts
from narrowgauge.errors import (
    BaseUnreachable,
    BuildFailed,
    DockerPermission,
    DockerUnavailable,
    NarrowgaugeError,
    NotApplicableError,
    ToolchainMissing,
    UnknownNameError,
)
from narrowgauge.executors.base import Executor, ExecutorFacts, load_handle
from narrowgauge.lock import Holder
from narrowgauge.machine import Host, machine_facts
from narrowgauge.plan import (
    NATIVE,
    JobRequest,
    Places,
    User,
    cache_volume,
    plan_container,
    plan_jobs,
    read_request,
)
from narrowgauge.progress import Reporter
from narrowgauge.recording import StartFacts
from narrowgauge.rendezvous import Rendezvous
from narrowgauge.runner import (
    Session,
    StopRequest,
    assist_job,
    attach,
    check_results,
    check_results_early,
    run_job,
    stop_signals,
)
from narrowgauge.selection import check_experiment, choose_accelerator, pick_target
from narrowgauge.store import RunFolder, Store
from narrowgauge.targets import Target, load_targets
from narrowgauge.turns import holder_of, my_turn
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import ImageFacts, Record
from narrowgauge_contract.spec import ExperimentSpec

if TYPE_CHECKING:
    import docker

    from narrowgauge.container import ContainerPlan
    from narrowgauge.executors.docker import PlanContainer

__all__ = [
    "EXECUTORS",
    "NO_IMAGE",
    "Launch",
    "World",
    "attach_to",
    "choose",
    "container_planner",
    "draw_quietly",
    "executor_of",
    "forget_leftovers",
    "image_finder",
    "prepare",
    "run_all",
    "start_facts",
]

EXECUTORS = ("auto", "docker", "native")
Say = Callable[[str], None]

#: What makes `--executor auto` go native: the image cannot be had here. Anything else is an error.
NO_IMAGE = (DockerUnavailable, DockerPermission, BaseUnreachable, BuildFailed, ToolchainMissing)


@dataclass(frozen=True)
class World:
    """What a command works in. `say` takes whole sentences for the user; `meeting`: where other
    machines are met that run the same job."""

    checkout: Checkout
    env: Mapping[str, str]
    host: Host
    say: Say
    meeting: Rendezvous | None = None

    @property
    def user(self) -> User:
        return User(os.getuid(), os.getgid(), self.host.device_groups)


@dataclass(frozen=True)
class Launch:
    """A decision, ready to start: the jobs, what runs them, and why that was chosen."""

    jobs: tuple[Job, ...]
    spec: ExperimentSpec
    executor: Executor
    target: Target | None
    reason: str


def choose(
    world: World, request: JobRequest, *, on: str | None, executor: str, lab_python: Path | None
) -> Launch:
    """Decide how a request runs here, and prepare that. Everything a user got wrong comes first.

    Raises UsageError and its kin before anything is built; `docker` never turns into `native`.
    """
    if executor not in EXECUTORS:
        raise UnknownNameError("executor", executor, EXECUTORS)
    spec = load_experiment(world.checkout.experiments, request.experiment)
    jobs = plan_jobs(spec, read_request(spec, request), NATIVE)
    targets = load_targets(world.checkout.targets_file)
    if executor == "native":
        target = pick_target(targets, world.host, on) if on is not None else None
        check_experiment(spec, None, targets, world.host)
        return _native(world, jobs, spec, target, lab_python, "as asked")
    try:
        target = pick_target(targets, world.host, on)
    except NotApplicableError as error:
        if executor == "docker" or on is not None or world.host.broken_driver:
            raise
        check_experiment(spec, None, targets, world.host)
        try:
            return _native(world, jobs, spec, None, lab_python, error.what)
        except NotApplicableError:
            # No torch is known for this host either; what keeps a target from it says more.
            raise error from None
    check_experiment(spec, target, targets, world.host)
    try:
        return _docker(world, jobs, spec, target)
    except NO_IMAGE as error:
        if executor == "docker":
            raise
        why = f"{error.what} ({error.why.splitlines()[-1]})" if error.why else error.what
        return _native(world, jobs, spec, target if on else None, lab_python, why)


def prepare(
    world: World,
    request: JobRequest,
    results: Path,
    *,
    on: str | None,
    executor: str,
    lab_python: Path | None,
) -> Launch:
    """`choose`, for runs that will be kept in `results`.

    Whether they can be is asked before anything is downloaded or built for them, and proved after.
    Raises ResultsUnwritable and DiskFull besides what `choose` raises.
    """
    check_results_early(results)
    launch = choose(world, request, on=on, executor=executor, lab_python=lab_python)
    check_results(results)
    return launch


def run_all(
    world: World,
    launch: Launch,
    *,
    store: Store,
    data: Path,
    wait: bool,
    reporter: Reporter,
    stop: StopRequest | None = None,
) -> list[tuple[RunFolder, Record]]:
    """Fetch the data, take the host, run every job of a launch in turn, draw each record.

    A job that failed does not keep the next from running; one that was interrupted does. Where
    another machine records the jobs, there are no records here. `stop`: whoever else may ask to
    stop, besides signals.
    """
    from narrowgauge_contract.data_commands import LAUNCHER
    from narrowgauge_data import ensure
    from narrowgauge_data.caller import Caller

    caller = Caller(world.say, world.env, LAUNCHER)
    for job in launch.jobs:
        ensure(job.data_sets, data, caller)
    if launch.reason:
        world.say(launch.reason)
    stop = stop or StopRequest()
    session = _session(world, launch.executor, store, data, reporter, stop)
    finished = []
    first = holder_of(launch.jobs[0], store)
    with _turn(world, launch.executor, first, wait) as rename, stop_signals(stop):
        for job in launch.jobs:
            rename(holder_of(job, store))
            if world.meeting is not None and not world.meeting.records:
                assist_job(job, session)
                continue
            folder, record = run_job(job, session)
            finished.append((folder, record))
            draw_quietly(folder, store, world.say)
            if stop.requested:
                break
    return finished


def attach_to(world: World, folder: RunFolder, *, wait: bool, reporter: Reporter) -> Record:
    """Take a run over, in its own folder, from a launcher that is gone."""
    job = folder.job()
    store = Store(folder.path.parent.parent)
    stop = StopRequest()
    name = load_handle(folder.handle_path).executor if folder.handle_path.is_file() else NATIVE
    if name == "slurm":
        from narrowgauge.launch_slurm import attach_slurm

        return attach_slurm(world, folder, reporter)
    if name == "ssh":
        from narrowgauge.launch_fleet import attach_fleet

        return attach_fleet(world, folder, reporter)
    executor = executor_of(name, world)
    session = _session(world, executor, store, folder.path, reporter, stop)
    with _turn(world, executor, holder_of(job, store), wait), stop_signals(stop):
        record = attach(folder, session)
    draw_quietly(folder, store, world.say)
    return record


def forget_leftovers(world: World, folder: RunFolder) -> None:
    """Remove elsewhere what is left of a run that is recorded here: of a run on a board. Does
    nothing for others; what cannot be removed now is said."""
    if not folder.handle_path.is_file():
        return
    handle = load_handle(folder.handle_path)
    if handle.executor == "ssh":
        from narrowgauge.launch_fleet import forget_there

        forget_there(world, handle)


def _session(
    world: World,
    executor: Executor,
    store: Store,
    data: Path,
    reporter: Reporter,
    stop: StopRequest,
) -> Session:
    return Session(
        executor=executor,
        store=store,
        experiments=world.checkout.experiments,
        data=data,
        start_facts=lambda engine: start_facts(world, engine),
        reporter=reporter,
        stop=stop,
    )


def _turn(
    world: World, executor: Executor, holder: Holder, wait: bool
) -> AbstractContextManager[Callable[[Holder], None]]:
    named = functools.partial(executor_of, world=world)
    return my_turn(executor, holder, executor_of=named, env=world.env, wait=wait, say=world.say)


def draw_quietly(folder: RunFolder, store: Store, say: Say) -> None:
    """Pictures can be drawn again (`results draw`), so their failure must not hide the record."""
    from narrowgauge.draw import draw_run
    from narrowgauge.noise import Floors

    try:
        draw_run(folder, Floors.in_store(store))
    except (NarrowgaugeError, OSError, ValueError) as error:
        say(f"the record is written, but its pictures are not: {error}")


def _docker(world: World, jobs: tuple[Job, ...], spec: ExperimentSpec, target: Target) -> Launch:
    from narrowgauge.executors.docker import DockerExecutor
    from narrowgauge.executors.docker_client import connect

    client = connect(world.env)
    executor = DockerExecutor(
        client,
        ensure_image=image_finder(world, client, target),
        plan=container_planner(world, target),
        needs_accelerator=target.fits.needs_gpu,
    )
    executor.prepare()
    facts = executor.probe()
    return Launch(
        jobs=tuple(dataclasses.replace(job, target=target.name) for job in jobs),
        spec=spec,
        executor=executor,
        target=target,
        reason=f"docker, target {target.name}: Docker {facts.version} answers and has the image",
    )


def _native(
    world: World,
    jobs: tuple[Job, ...],
    spec: ExperimentSpec,
    target: Target | None,
    lab_python: Path | None,
    why: str,
) -> Launch:
    from narrowgauge.environment import ensure_lab_python
    from narrowgauge.executors.native import NativeExecutor

    world.say(f"native: {why}")

    def ensure() -> Path:
        return ensure_lab_python(world.checkout, world.host, world.env, world.say, lab_python)

    met = world.meeting.environment() if world.meeting is not None else {}
    env = {**world.env, **met}
    executor = NativeExecutor(world.checkout.source, env, ensure_python=ensure)
    executor.prepare()
    name = target.name if target is not None else NATIVE
    named = tuple(dataclasses.replace(job, target=name) for job in jobs)
    return Launch(named, spec, executor, target, "")


def image_finder(
    world: World, client: docker.APIClient, target: Target
) -> Callable[[], ImageFacts]:
    """Gives the target's image: found through the SDK in milliseconds, or built by the CLI."""
    from narrowgauge.executors.docker_client import inspect_image
    from narrowgauge.images.inspect import find_image

    def ensure() -> ImageFacts:
        found = find_image(lambda name: inspect_image(client, name), world.checkout.root, target)
        if found is not None:
            return found
        from narrowgauge.images.build import ensure_image

        return ensure_image(world.checkout.root, target, world.env, world.say)

    return ensure


def container_planner(world: World, target: Target) -> PlanContainer:
    """Plans a job's container once the image and the engine are known."""

    def plan(job: Job, places: Places, image: ImageFacts, facts: ExecutorFacts) -> ContainerPlan:
        return plan_container(
            job,
            target,
            image=image.name,
            cache=cache_volume(target.name, image.content_tag or image.digest, world.user.uid),
            places=places,
            user=world.user,
            accelerator=choose_accelerator(target, facts.runtimes, facts.cdi),
            meeting=world.meeting,
        )

    return plan


def executor_of(name: str, world: World) -> Executor:
    """An executor that only watches and collects, for a run that was started before."""
    if name == "docker":
        from narrowgauge.executors.docker import DockerExecutor
        from narrowgauge.executors.docker_client import connect

        return DockerExecutor(connect(world.env))
    if name == "native":
        from narrowgauge.executors.native import NativeExecutor

        return NativeExecutor(world.checkout.source, world.env)
    if name == "slurm":
        from narrowgauge.executors.slurm import SlurmExecutor
        from narrowgauge.slurm.asking import SlurmAsk

        return SlurmExecutor(SlurmAsk(), world.env, world.say)
    if name == "ssh":
        from narrowgauge.executors.ssh import SshExecutor

        return SshExecutor(world.env, say=world.say)
    raise UnknownNameError("executor", name, EXECUTORS[1:])


def start_facts(world: World, engine: str | None) -> StartFacts:
    """The host and the commit, gathered once the run is going."""
    return StartFacts(machine_facts(docker=engine), git_facts(world.checkout.root))
